"""Makes bfloat16 right in Triton's interpreter, which keeps it as raw uint16 and truncates or misreads it, and rounds
to float8e4nv, where it loses the carry into the exponent. Comparisons keep the type of what they compare, so that one
number of theirs spread over a block is no mask; that too is put right.

Every operation on bf16 operands is computed in float32 and rounded to nearest even, as a GPU does. Not covered:
reductions and atomics on bf16 (kernels convert to float32 first). Tested with triton 3.9.0 and numpy 2.4.6.
"""

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def _is_bf16(handle: Any) -> bool:
    return isinstance(handle, TensorHandle) and handle.dtype.scalar == tl.bfloat16


def _to_float32(bits: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32)


def _to_bf16(values: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(np.asarray(values)), np.uint16(0x7FC0), rounded)


def _widened(handle: Any) -> Any:
    return TensorHandle(_to_float32(handle.data), tl.float32) if _is_bf16(handle) else handle


def install() -> None:
    """Patch the interpreter of this process. Call once, before the first kernel runs."""
    builder = InterpreterBuilder
    cast, convert, dot = builder.cast_impl, builder.create_fp_to_fp, builder.create_dot
    splat = builder.create_splat

    def cast_impl(self: Any, source: Any, to: Any) -> Any:
        if not _is_bf16(source) and to.scalar != tl.bfloat16:
            return cast(self, source, to)
        source = _widened(source)
        if to.scalar == tl.bfloat16:
            return TensorHandle(_to_bf16(source.data.astype(np.float32)), tl.bfloat16)
        return source if to.scalar == tl.float32 else cast(self, source, to)

    def create_fp_to_fp(self: Any, source: Any, to: Any, rounding: Any) -> Any:
        if _is_bf16(source) or to.scalar == tl.bfloat16:
            return cast_impl(self, source, to)
        if to.scalar == tl.float8e4nv:
            rounded = torch.from_numpy(source.data.astype(np.float32)).to(torch.float8_e4m3fn)
            return TensorHandle(rounded.view(torch.uint8).numpy(), tl.float8e4nv)
        return convert(self, source, to, rounding)

    def create_dot(self: Any, a: Any, b: Any, acc: Any, precision: Any, imprecise: Any) -> Any:
        return dot(self, _widened(a), _widened(b), acc, precision, imprecise)

    def create_splat(self: Any, block: Any, scalar: Any) -> Any:
        is_truth = scalar.data.dtype == np.bool_
        return splat(self, block, TensorHandle(scalar.data, tl.int1) if is_truth else scalar)

    def in_float32(original: Any) -> Any:
        def operation(self: Any, *handles: Any) -> Any:
            if not any(_is_bf16(handle) for handle in handles):
                return original(self, *handles)
            result = original(self, *[_widened(handle) for handle in handles])
            is_float = result.data.dtype.kind == "f"
            return TensorHandle(_to_bf16(result.data), tl.bfloat16) if is_float else result

        return operation

    builder.cast_impl, builder.create_fp_to_fp, builder.create_dot = cast_impl, create_fp_to_fp, create_dot
    builder.create_splat = create_splat
    for name in ("binary_op", "unary_op", "ternary_op"):
        setattr(builder, name, in_float32(getattr(builder, name)))
    if not hasattr(builder, "get_bf16"):
        builder.get_bf16 = lambda self, value: TensorHandle(_to_bf16(np.array([value], np.float32)), tl.bfloat16)
