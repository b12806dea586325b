"""Sampler: logits to one token per row, with its logprob."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightllm.common.basemodel.triton_kernel.sampling import sample
from lightllm.common.sampling.logits_processor import Line, LogitsProcessor, default_processors
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
    drawn: Tensor  # int32 [2, S]: tokens, and the bits of their logprobs float32: log_softmax of the raw logits
    top: TopTokens | None

    @property
    def tokens(self) -> Tensor:
        return self.drawn[0]

    @property
    def logprobs(self) -> Tensor:
        return self.drawn[1].view(torch.float32)


class Sampler:
    """Processors, then one draw."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device):
        self.table = SamplingTable(max_rows, device)
        self._processors = default_processors(self.table, vocab_size)
        self._asking = np.zeros(max_rows + 1, dtype=bool)  # rows that ask for a processor

    def add(self, processor: LogitsProcessor) -> None:
        """A processor that comes after all others."""
        self._processors.append(processor)

    def start(self, starts: Sequence[RowStart]) -> None:
        """Rows start or resume; settings of the rows' former sequences are forgotten."""
        if not starts:
            return
        self.table.set(starts)
        for start in starts:
            self._asking[start.row] = any(processor.asked_by(start.sampling) for processor in self._processors)
        for processor in self._processors:
            processor.start(starts)

    def only_draws(self, rows: np.ndarray) -> bool:
        """Whether these rows want nothing but `draw`."""
        return not (self._asking[rows].any() or self.table.top_logprobs[rows].any())

    def draw(self, logits: Tensor, rows: Tensor, output_index: Tensor) -> Tensor:
        """logits [S, V], rows int, output_index int32 [S] on the device -> `Sampled.drawn`; launches only."""
        return sample(logits, rows, output_index, *self.table.draw_columns)

    def __call__(self, logits: Tensor, batch: SamplingBatch) -> Sampled:
        """logits [S, V], left as they are -> one token per line."""
        table, rows = self.table, batch.rows
        chosen = logits = logits.contiguous()
        asking = self._asking[rows].nonzero()[0].tolist()
        lines = [Line(i, int(rows[i]), int(batch.output_index[i]), table.of(rows[i])) for i in asking]
        lines_of = {
            p: asked for p in self._processors if (asked := [line for line in lines if p.asked_by(line.settings)])
        }
        if lines:
            chosen = logits.to(torch.float32, copy=True)
            for processor, asked in lines_of.items():
                processor(chosen, asked)
        sampled = Sampled(self.draw(chosen, batch.device_rows, batch.device_output_index), self._top(logits, rows))
        if lines:
            for processor, asked in lines_of.items():
                processor.observe(sampled.tokens, asked)
            logits = logits.float()
            raw = logits.gather(1, sampled.tokens[:, None].long()).squeeze(1) - logits.logsumexp(-1)
            sampled.logprobs.copy_(raw)
        return sampled

    def _top(self, logits: Tensor, rows: np.ndarray) -> TopTokens | None:
        counts = self.table.top_logprobs[rows]
        lines = counts.nonzero()[0].tolist()
        if not lines:
            return None
        asked = logits if len(lines) == len(logits) else torch.stack([logits[line] for line in lines])
        values, ids = asked.float().log_softmax(-1).topk(min(int(counts.max()), logits.shape[1]), -1)
        return TopTokens(lines, counts[lines].tolist(), ids, values)
