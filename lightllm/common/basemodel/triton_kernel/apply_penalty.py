"""Repetition, presence and frequency penalties on the logits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightllm.common.triton_utils.dispatch import op


@op
def apply_penalty(logits: Tensor, rows: Tensor, counts: Tensor, *tables: Tensor) -> None:
    """Penalise logits float32 [S, V] in place; line s belongs to row rows[s] of counts [R, V] and of the tables [R]:
    repetition, presence, frequency and input_penalty.

    counts int32 is 2 * (occurrences in the output) + (1 if the token is in the prompt). Repetition (l / r if l > 0 else
    l * r) applies to tokens of prompt and output. Then n = occurrences in the output, plus 1 for a token of the prompt
    where input_penalty is set (counts holds a flag, so a prompt token counts once however often it occurs), and
    l -= presence * (n > 0) + frequency * n.
    """
    rows = rows.long()
    count = counts.index_select(0, rows)
    repeated, once, each, in_prompt = (table.index_select(0, rows)[:, None] for table in tables)
    penalised = torch.where(logits > 0, logits / repeated, logits * repeated)
    n = (count >> 1) + (count & in_prompt.to(torch.int32))
    logits.copy_(torch.where(count > 0, penalised, logits) - (once * (n > 0) + each * n))


@triton.jit(do_not_specialize=["Rows"])
def _apply_penalty_kernel(
    Logits, Rows, Counts, Repetition, Presence, Frequency, InputPenalty, logits_stride, counts_stride, vocab,
    BLOCK: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = token < vocab
    row = tl.load(Rows + line).to(tl.int64)
    repetition = tl.load(Repetition + row)
    at = Logits + line * logits_stride + token
    logit = tl.load(at, mask=mask, other=0.0)
    count = tl.load(Counts + row * counts_stride + token, mask=mask, other=0)
    penalised = tl.where(logit > 0, tl.div_rn(logit, tl.zeros_like(logit) + repetition), logit * repetition)
    logit = tl.where(count > 0, penalised, logit)
    n = (count >> 1) + (count & tl.load(InputPenalty + row).to(tl.int32))
    once = tl.where(n > 0, tl.load(Presence + row), 0.0)
    tl.store(at, logit - (once + tl.load(Frequency + row) * n.to(tl.float32)), mask=mask)


@apply_penalty.kernel
def _apply_penalty(logits: Tensor, rows: Tensor, counts: Tensor, *tables: Tensor) -> None:
    lines, vocab = logits.shape
    if lines == 0:
        return
    _apply_penalty_kernel[(lines, triton.cdiv(vocab, 1024))](
        logits, rows, counts, *tables, logits.stride(0), counts.stride(0), vocab, BLOCK=1024, num_warps=4
    )
