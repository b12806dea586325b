"""What a decode step reads, made on the device from three numbers a line and the tables by row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightllm.common.triton_utils.dispatch import op


@op
def prepare_decode(
    columns: Tensor, last_token: Tensor, prompt_lens: Tensor, req_table: Tensor
) -> tuple[Tensor, Tensor]:
    """columns int32 [3 or 4, T]: row, position and KV slot of each line, and its id if that is not -1
    -> (ids int64 [T], lens int32 [3, T]).

    Sets req_table[row, position] = slot (int32 [R, length], contiguous). Other ids are last_token[row] (int64 [R]).
    lens are kv_lens = position + 1, rope_lens = max(prompt_lens[row], kv_lens) and
    output_index = kv_lens - prompt_lens[row]. Rows and positions are distinct together, except for padding's.
    """
    rows, positions, slots = columns[:3]
    req_table[rows.long(), positions.long()] = slots
    kv_lens, prompt_len = positions + 1, prompt_lens.index_select(0, rows)
    lens = torch.stack((kv_lens, torch.maximum(kv_lens, prompt_len), kv_lens - prompt_len))
    ids = last_token.index_select(0, rows)
    return ids if len(columns) == 3 else torch.where(columns[3] < 0, ids, columns[3]), lens


@triton.jit(do_not_specialize=["lines"])
def _prepare_decode_kernel(
    Columns, LastToken, PromptLens, Table, Ids, Lens, lines, table_stride, GIVEN: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    line = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = line < lines
    row = tl.load(Columns + line, mask=mask, other=0).to(tl.int64)
    position = tl.load(Columns + lines + line, mask=mask, other=0)
    slot = tl.load(Columns + 2 * lines + line, mask=mask, other=0)
    tl.store(Table + row * table_stride + position, slot, mask=mask)
    token = tl.load(LastToken + row, mask=mask, other=0)
    if GIVEN:
        given = tl.load(Columns + 3 * lines + line, mask=mask, other=0)
        token = tl.where(given < 0, token, given.to(tl.int64))
    tl.store(Ids + line, token, mask=mask)
    prompt_len = tl.load(PromptLens + row, mask=mask, other=0)
    tl.store(Lens + line, position + 1, mask=mask)
    tl.store(Lens + lines + line, tl.maximum(position + 1, prompt_len), mask=mask)
    tl.store(Lens + 2 * lines + line, position + 1 - prompt_len, mask=mask)


@prepare_decode.kernel
def _prepare_decode(
    columns: Tensor, last_token: Tensor, prompt_lens: Tensor, req_table: Tensor
) -> tuple[Tensor, Tensor]:
    lines = columns.shape[1]
    ids = torch.empty(lines, dtype=torch.int64, device=columns.device)
    lens = torch.empty_like(columns[:3])
    _prepare_decode_kernel[(triton.cdiv(lines, 128),)](
        columns, last_token, prompt_lens, req_table, ids, lens, lines, req_table.stride(0),
        GIVEN=len(columns) == 4, BLOCK=128,
        num_warps=4,
    )  # fmt: skip
    return ids, lens
