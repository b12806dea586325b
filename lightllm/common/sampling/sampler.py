"""Sampler: logits to one token per row, with its logprob."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightllm.common.basemodel.triton_kernel.sampling import sample
from lightllm.common.sampling.logits_processor import default_processors
from lightllm.common.sampling.sampling_batch import RowStart, SamplingBatch, SamplingTable


@dataclass(frozen=True)
class TopTokens:
    """The k likeliest tokens of some lines, best first; k is the most that any of them asks for."""

    lines: list[int]
    counts: list[int]  # how many each line asks for
    ids: Tensor  # int64 [lines, k]
    logprobs: Tensor  # float32 [lines, k]


@dataclass(frozen=True)
class Sampled:
    tokens: Tensor  # int64 [S]
    logprobs: Tensor  # float32 [S]: log_softmax of the raw logits
    top: TopTokens | None


class Sampler:
    """Processors, then one draw. A batch of greedy rows without wishes is one argmax."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device):
        self._table = SamplingTable(max_rows, device)
        self._processors = default_processors(self._table, vocab_size)

    def start(self, starts: Sequence[RowStart]) -> None:
        """Rows start or resume; settings of the rows' former sequences are forgotten."""
        self._table.set(starts)
        for processor in self._processors:
            processor.start(starts)

    def __call__(self, logits: Tensor, batch: SamplingBatch) -> Sampled:
        """logits float32 [S, V], left as they are -> one token per line."""
        table, rows = self._table, batch.rows
        chosen = logits = logits.contiguous()
        asking = table.processed[rows].nonzero()[0].tolist()
        lines = [(i, int(rows[i]), int(batch.output_index[i]), table.of(rows[i])) for i in asking]
        if lines:
            chosen = logits.clone()
            for processor in self._processors:
                processor(chosen, lines)
        if table.random[rows].any():
            tokens = sample(chosen, *table.draw_columns(batch.device_rows), batch.device_output_index)
        else:
            tokens = chosen.argmax(-1)
        if lines:
            for processor in self._processors:
                processor.observe(tokens, lines)
        logprobs = logits.log_softmax(-1)
        return Sampled(tokens, logprobs.gather(1, tokens[:, None]).squeeze(1), self._top(logprobs, rows))

    def _top(self, logprobs: Tensor, rows) -> TopTokens | None:
        counts = self._table.top_logprobs[rows]
        lines = counts.nonzero()[0].tolist()
        if not lines:
            return None
        asked = logprobs if len(lines) == len(logprobs) else torch.stack([logprobs[line] for line in lines])
        values, ids = asked.topk(min(int(counts.max()), logprobs.shape[1]), -1)
        return TopTokens(lines, counts[lines].tolist(), ids, values)
