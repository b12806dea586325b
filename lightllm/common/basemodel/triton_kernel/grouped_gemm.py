"""Products of lines with the experts that they are routed to: one launch for all experts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from lightllm.common.triton_utils.dispatch import op

BLOCK_M = 16  # lines of one program; one expert each
FEW_LINES = 64  # up to here each line is a block of its own: nothing is sorted


@dataclass(frozen=True)
class Routing:
    """Which experts each token goes to: ids int64 [T, k] in 0...experts - 1; others are not held here, and give zeros.

    A line is one choice of one token: line t * k + j is choice j of token t.
    """

    ids: torch.Tensor
    experts: int

    @cached_property
    def blocks(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(lines int32 [blocks * BLOCK_M], expert int32 [blocks]): lines by expert, padded with the number of lines."""
        flat = self.ids.reshape(-1)
        absent = (flat < 0) | (flat >= self.experts)
        flat = flat.masked_fill(absent, self.experts)
        n = len(flat)
        if n <= FEW_LINES:
            lines = torch.full((n, BLOCK_M), n, dtype=torch.int32, device=flat.device)
            lines[:, 0] = torch.arange(n, device=flat.device)
            return lines.view(-1), flat.int()
        blocks = min(n, triton.cdiv(n, BLOCK_M) + self.experts)
        counts = torch.zeros(self.experts + 1, dtype=torch.int64, device=flat.device)
        counts.scatter_add_(0, flat, torch.ones_like(flat))
        padded = (counts + BLOCK_M - 1) // BLOCK_M * BLOCK_M
        padded[self.experts] = 0
        ends = padded.cumsum(0)
        order = flat.argsort(stable=True)
        expert = flat[order]
        place = torch.arange(n, device=flat.device) - (counts.cumsum(0) - counts)[expert] + (ends - padded)[expert]
        place = place.masked_fill(expert == self.experts, blocks * BLOCK_M)  # behind the end
        lines = torch.full((blocks * BLOCK_M + 1,), n, dtype=torch.int32, device=flat.device)
        lines.scatter_(0, place, order.int())
        first = torch.arange(blocks, device=flat.device) * BLOCK_M
        return lines[:-1], torch.searchsorted(ends[: self.experts], first, right=True).int()


@op
def grouped_gemm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, routing: Routing) -> torch.Tensor:
    """x [T, K], or [T * k, K] with a line for each choice; weight [experts, N, K], bias [experts, N] -> [T * k, N]."""
    flat = routing.ids.reshape(-1)
    out = x.new_zeros(len(flat), weight.shape[1])
    per_token = len(flat) // max(1, len(x))
    for expert in range(routing.experts):
        lines = (flat == expert).nonzero().squeeze(1)
        if len(lines):
            part = None if bias is None else bias[expert]
            out[lines] = F.linear(x[lines // per_token], weight[expert], part)
    return out


@triton.jit
def _grouped_gemm_kernel(
    X, W, Bias, Y, Lines, Experts, lines_total, x_stride,
    PER_TOKEN: tl.constexpr, E: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (block of lines of one expert, block of outputs)."""
    expert = tl.load(Experts + tl.program_id(0)).to(tl.int64)
    if expert < E:
        line = tl.load(Lines + tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        used = line < lines_total
        x = X + (line // PER_TOKEN)[:, None] * x_stride + k[None, :]
        w = W + expert * N * K + n[:, None] * K + k[None, :]
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, K, BLOCK_K):
            inside = k[None, :] < K - start
            a = tl.load(x + start, mask=used[:, None] & inside, other=0.0)
            b = tl.load(w + start, mask=(n < N)[:, None] & inside, other=0.0)
            acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
        if BIAS:
            acc += tl.load(Bias + expert * N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        y = Y + line[:, None] * N + n[None, :]
        tl.store(y, acc.to(Y.dtype.element_ty), mask=used[:, None] & (n < N)[None, :])


@grouped_gemm.kernel
def _grouped_gemm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, routing: Routing) -> torch.Tensor:
    total = routing.ids.numel()
    experts, outputs, inputs = weight.shape
    out = torch.zeros(total, outputs, dtype=x.dtype, device=x.device)
    if total:
        lines, block_experts = routing.blocks
        block_n = 64
        _grouped_gemm_kernel[(len(block_experts), triton.cdiv(outputs, block_n))](
            *(x, weight, x if bias is None else bias, out, lines, block_experts, total, x.stride(0)),
            PER_TOKEN=total // len(x),
            E=experts,
            N=outputs,
            K=inputs,
            BIAS=bias is not None,
            BLOCK_M=BLOCK_M,
            BLOCK_N=block_n,
            BLOCK_K=128 if x.element_size() == 2 else 32,
            num_warps=4,
            num_stages=1 if torch.version.hip else 3,
        )
    return out
