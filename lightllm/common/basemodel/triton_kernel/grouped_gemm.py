"""Products of lines with the experts that they are routed to: one launch for all experts."""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from lightllm.common.basemodel.triton_kernel.group_lines import group_lines
from lightllm.common.basemodel.triton_kernel.lone_token_experts import lone_product
from lightllm.common.basemodel.triton_kernel.silu_and_mul import silu_and_mul
from lightllm.common.triton_utils.dispatch import op
from lightllm.common.triton_utils.gpu import shared_memory


@dataclass(frozen=True)
class Routing:
    """Which experts each token goes to: ids int32 [T, k]; those in first...first + experts - 1 are held here.

    A line is one choice of one token: line t * k + j is choice j of token t.
    """

    ids: Tensor
    first: int
    experts: int

    @property
    def block(self) -> int:
        """Lines of one program: enough that most experts' weights are read by one program only."""
        per_expert = self.ids.numel() / self.experts
        return 16 if per_expert <= 8 else 32 if per_expert <= 24 else 64 if per_expert <= 64 else 128

    @cached_property
    def blocks(self) -> tuple[Tensor, Tensor]:
        """group_lines of the ids, made once for all products. The choices of one token are different experts."""
        return group_lines(self.ids.view(-1), self.first, self.experts, self.block)


@op
def grouped_gemm(x: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing, gated: bool = False) -> Tensor:
    """x [T, K], or [T * k, K] with a line for each choice; weight [experts, N, K], bias [experts, N] -> [T * k, N].

    With `gated` the product's first half goes through silu and is multiplied with the second: [T * k, N / 2]. Lines of
    experts that are not held have no defined value.
    """
    flat = routing.ids.view(-1) - routing.first
    out = x.new_zeros(len(flat), weight.shape[1])
    per_token = len(flat) // max(1, len(x))
    for expert in range(routing.experts):
        lines = (flat == expert).nonzero().squeeze(1)
        if len(lines):
            part = None if bias is None else bias[expert]
            out[lines] = F.linear(x[lines // per_token], weight[expert], part)
    return silu_and_mul.twin(out) if gated else out


@triton.jit(do_not_specialize=["total", "per_token", "held"])
def _grouped_gemm_kernel(
    X, W, Bias, Y, Lines, Experts, total, per_token, held, N, K, x_stride,
    BIAS: tl.constexpr, GATED: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (block of lines of one expert, block of outputs), outputs of one block of lines side by side. What lies
    beyond the lines and the outputs is read from the first line and the last output, and not written."""
    outputs = tl.cdiv(N, BLOCK_N)
    block = tl.program_id(0) // outputs
    n = tl.program_id(0) % outputs * BLOCK_N + tl.arange(0, BLOCK_N)
    expert = tl.load(Experts + block).to(tl.int64)
    line = tl.load(Lines + block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    used = line < total
    if expert < held:
        k = tl.arange(0, BLOCK_K)
        ROWS: tl.constexpr = 2 if GATED else 1
        x = X + (tl.where(used, line, 0) // per_token)[:, None] * x_stride + k[None, :]
        w = W + expert * ROWS * N * K + tl.minimum(n, N - 1)[:, None].to(tl.int64) * K + k[None, :]
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = acc
        for start in range(0, K, BLOCK_K):
            inside = k[None, :] < K - start
            if EVEN_K:
                a = tl.load(x + start)
                b = tl.load(w + start)
            else:
                a = tl.load(x + start, mask=inside, other=0.0)
                b = tl.load(w + start, mask=inside, other=0.0)
            acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
            if GATED:
                if EVEN_K:
                    c = tl.load(w + N * K + start)
                else:
                    c = tl.load(w + N * K + start, mask=inside, other=0.0)
                up = tl.dot(a, tl.trans(c), up, input_precision="ieee")
        if BIAS:
            at = Bias + expert * ROWS * N + tl.minimum(n, N - 1)
            acc += tl.load(at).to(tl.float32)[None, :]
            if GATED:
                up += tl.load(at + N).to(tl.float32)[None, :]
        y = acc.to(Y.dtype.element_ty)
        if GATED:  # rounded wherever silu_and_mul rounds
            gate = y.to(tl.float32)
            act = (gate / (1 + tl.exp(-gate))).to(y.dtype).to(tl.float32)
            y = (act * up.to(y.dtype).to(tl.float32)).to(y.dtype)
        tl.store(Y + line[:, None] * N + n[None, :], y, mask=used[:, None] & (n < N)[None, :])


@dataclass(frozen=True)
class GemmConfig:
    BLOCK_N: int
    BLOCK_K: int
    num_warps: int
    num_stages: int


_TUNED = {  # lines of a block, gated -> the best of benchmarks/kernels/tune_families.py on an H200
    (16, True): (64, 128, 4, 4), (16, False): (128, 128, 8, 3),
    (32, True): (64, 128, 4, 3), (32, False): (128, 64, 4, 4),
    (64, True): (128, 64, 4, 4), (64, False): (256, 64, 8, 3),
    (128, True): (128, 64, 8, 4), (128, False): (256, 64, 8, 3),
}  # fmt: skip


def gemm_config(block: int, gated: bool, x: Tensor) -> GemmConfig:
    """For blocks of so many lines of x."""
    if x.element_size() > 2:
        return GemmConfig(32, 32, 4, 1 if torch.version.hip else 3)
    block_n, block_k, warps, stages = _TUNED[block, gated]
    stage = x.element_size() * block_k * (block + block_n * (2 if gated else 1))
    return GemmConfig(block_n, block_k, warps, min(stages, max(1, shared_memory(x.device) // stage)))


@grouped_gemm.kernel
def _grouped_gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    routing: Routing,
    gated: bool = False,
    config: GemmConfig | None = None,
) -> Tensor:
    if len(routing.ids) == 1:
        return lone_product(x, weight, bias, routing.ids, routing.first, gated)
    total = routing.ids.numel()
    experts, outputs, inputs = weight.shape
    outputs //= 2 if gated else 1
    out = torch.empty(total, outputs, dtype=x.dtype, device=x.device)
    if total:
        lines, block_experts = routing.blocks
        block = routing.block
        config = config or gemm_config(block, gated, x)
        _grouped_gemm_kernel[(len(block_experts) * triton.cdiv(outputs, config.BLOCK_N),)](
            x, weight, x if bias is None else bias, out, lines, block_experts,
            total, total // len(x), experts, outputs, inputs, x.stride(0),
            BIAS=bias is not None, GATED=gated, EVEN_K=inputs % config.BLOCK_K == 0, BLOCK_M=block,
            **vars(config),
        )  # fmt: skip
    return out
