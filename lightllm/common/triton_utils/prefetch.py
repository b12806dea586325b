"""Reading ahead of need."""

import triton
import triton.language as tl

_LINE = tl.constexpr(128)  # bytes


@triton.jit
def fetch_into_l2(at, LENGTH: tl.constexpr):
    """Starts to read LENGTH numbers from each of the pointers `at` [N] on into the GPU's second cache. What others write
    there later is seen nevertheless. For NVIDIA's GPUs alone."""
    LINES: tl.constexpr = triton.next_power_of_2((LENGTH * at.dtype.element_ty.primitive_bitwidth // 8 + _LINE - 1) // _LINE)
    step: tl.constexpr = _LINE * 8 // at.dtype.element_ty.primitive_bitwidth
    numbers = tl.minimum(tl.arange(0, LINES) * step, LENGTH - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l", [at[:, None] + numbers[None, :]], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
