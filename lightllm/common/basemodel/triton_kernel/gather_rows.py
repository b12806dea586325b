"""Rows of a table by their number: embeddings, and the angles of positions."""

import triton
import triton.language as tl
from torch import Tensor

from lightllm.common.triton_utils.dependent_launch import dependent_launch, wait_for_inputs
from lightllm.common.triton_utils.dispatch import op


@op
def gather_rows(table: Tensor, index: Tensor) -> Tensor:
    """table [N, R, W] contiguous, index int [T] of rows < R -> [N, T, W]."""
    return table.index_select(1, index)


@triton.jit
def _gather_rows_kernel(
    Table, Index, Out, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Program (line, table, block of its width)."""
    wait_for_inputs(PDL)
    line = tl.program_id(0)
    n = tl.program_id(1).to(tl.int64)
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    row = n * ROWS + tl.load(Index + line)
    values = tl.load(Table + row * WIDTH + at, mask=at < WIDTH)
    tl.store(Out + (n * tl.num_programs(0) + line) * WIDTH + at, values, mask=at < WIDTH)


@gather_rows.kernel
def _gather_rows(table: Tensor, index: Tensor) -> Tensor:
    tables, rows, width = table.shape
    out = table.new_empty(tables, len(index), width)
    block = min(1024, triton.next_power_of_2(width))
    if len(index):
        _gather_rows_kernel[(len(index), tables, triton.cdiv(width, block))](
            table, index, out, ROWS=rows, WIDTH=width, BLOCK=block, num_warps=4, **dependent_launch(index)
        )
    return out
