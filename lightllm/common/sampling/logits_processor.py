"""The chain that changes logits before the draw: bias, penalties, length decay, masks (order: docs/api.md)."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightllm.common.basemodel.triton_kernel.apply_penalty import apply_penalty
from lightllm.common.sampling.sampling_batch import RowSampling, RowStart, SamplingTable
from lightllm.common.sampling.transfer import to_device

LARGEST_FACTOR = 1e30  # a float32 that stays finite times any logit of sane size


class Line(NamedTuple):
    """A sampled row whose logits are processed. at: its line of the logits. output_index: tokens before this one."""

    at: int
    row: int
    output_index: int
    settings: RowSampling


class LogitsProcessor(ABC):
    """A link of the chain: who asks for it and what it does to logits each must say, the rest only those that keep
    state. `lines` are those that ask, at least one."""

    @abstractmethod
    def asked_by(self, settings: RowSampling) -> bool:
        """Whether a row with these settings asks for it. Rows that ask for none are drawn without the chain."""

    def start(self, starts: Sequence[RowStart]) -> None:
        """Sequences start or resume on their rows, those among them that do not ask."""
        return

    @abstractmethod
    def __call__(self, logits: Tensor, lines: Sequence[Line]) -> None:
        """Changes logits float32 [S, V] in place, only in these lines."""

    def observe(self, tokens: Tensor, lines: Sequence[Line]) -> None:
        """tokens int32 [S] were sampled."""
        return


def _flat(logits: Tensor, lines: Sequence[Line], ids: Callable[[RowSampling], np.ndarray]) -> np.ndarray:
    """Positions in the flattened logits of each line's ids, int64."""
    return np.concatenate([line.at * logits.shape[1] + ids(line.settings) for line in lines])


class LogitBias(LogitsProcessor):
    """Adds a request's bias to the logits of the ids it names."""

    def asked_by(self, settings: RowSampling) -> bool:
        return len(settings.bias_ids) > 0

    def __call__(self, logits: Tensor, lines: Sequence[Line]) -> None:
        where = to_device(_flat(logits, lines, lambda s: s.bias_ids), logits.device)
        bias = to_device(np.concatenate([line.settings.bias_values for line in lines]), logits.device)
        logits.view(-1).index_add_(0, where, bias)


class Penalties(LogitsProcessor):
    """Repetition, presence and frequency penalties over counts int32 [max_rows + 1, V], made when first asked for."""

    def __init__(self, table: SamplingTable, vocab_size: int):
        self._table = table
        self._vocab_size = vocab_size
        self._counts: Tensor | None = None

    def asked_by(self, settings: RowSampling) -> bool:
        return (settings.repetition, settings.presence, settings.frequency) != (1.0, 0.0, 0.0)

    def start(self, starts: Sequence[RowStart]) -> None:
        for start in starts:
            if self.asked_by(start.sampling):
                ids = to_device(start.token_ids.astype(np.int64), self._table.device)
                prompt, output = ids[: start.prompt_len], ids[start.prompt_len :]
                counts = self.counts[start.row].zero_().index_fill_(0, prompt, 1)
                counts.index_add_(0, output, torch.full_like(output, 2, dtype=torch.int32))

    @property
    def counts(self) -> Tensor:
        """2 * (occurrences in the output) + (1 if in the prompt)."""
        if self._counts is None:
            shape = (len(self._table.settings), self._vocab_size)
            self._counts = torch.zeros(shape, dtype=torch.int32, device=self._table.device)
        return self._counts

    def __call__(self, logits: Tensor, lines: Sequence[Line]) -> None:
        where, rows = self._indices(lines)
        all_lines = len(lines) == len(logits)
        chosen = logits if all_lines else logits.index_select(0, where)
        apply_penalty(chosen, rows, self.counts, *self._table.penalty_columns)
        if not all_lines:
            logits.index_copy_(0, where, chosen)

    def observe(self, tokens: Tensor, lines: Sequence[Line]) -> None:
        where, rows = self._indices(lines)
        seen = rows * self._vocab_size + tokens.index_select(0, where)
        self.counts.view(-1).index_add_(0, seen, torch.full_like(seen, 2, dtype=torch.int32))

    def _indices(self, lines: Sequence[Line]) -> tuple[Tensor, Tensor]:
        """(lines, rows), int64 on the device."""
        both = to_device(np.array([line[:2] for line in lines], dtype=np.int64).T, self._table.device)
        return both[0], both[1]


class LengthDecay(LogitsProcessor):
    """transformers' ExponentialDecayLengthPenalty: past `start` output tokens, stop ids gain |logit| (factor^n - 1)."""

    def asked_by(self, settings: RowSampling) -> bool:
        return settings.length_decay[1] != 1.0 and len(settings.stop_ids) > 0

    def __call__(self, logits: Tensor, lines: Sequence[Line]) -> None:
        if lines := [line for line in lines if line.output_index > line.settings.length_decay[0]]:
            factors = [np.full(len(s.stop_ids), self._factor(i, s), np.float32) for _, _, i, s in lines]
            where = to_device(_flat(logits, lines, lambda s: s.stop_ids), logits.device)
            factor = to_device(np.concatenate(factors), logits.device)
            logits.view(-1).index_add_(0, where, logits.view(-1).index_select(0, where).abs() * factor)

    @staticmethod
    def _factor(output_index: int, settings: RowSampling) -> float:
        start, factor = settings.length_decay
        with np.errstate(over="ignore"):
            return min(float(np.float64(factor) ** (output_index - start)) - 1, LARGEST_FACTOR)


class AllowedTokens(LogitsProcessor):
    """Masks all but the allowed ids."""

    def asked_by(self, settings: RowSampling) -> bool:
        return len(settings.allowed_ids) > 0

    def __call__(self, logits: Tensor, lines: Sequence[Line]) -> None:
        where = to_device(_flat(logits, lines, lambda s: s.allowed_ids), logits.device)
        masked = to_device(np.array([line.at for line in lines], dtype=np.int64), logits.device)
        allowed = logits.view(-1).index_select(0, where)
        logits.index_fill_(0, masked, -torch.inf)
        logits.view(-1).index_copy_(0, where, allowed)


class MinNewTokens(LogitsProcessor):
    """Masks the stop ids of the tokens before the `min_new_tokens`-th."""

    def asked_by(self, settings: RowSampling) -> bool:
        return settings.min_new_tokens > 1

    def __call__(self, logits: Tensor, lines: Sequence[Line]) -> None:
        if lines := [line for line in lines if line.output_index + 1 < line.settings.min_new_tokens]:
            where = to_device(_flat(logits, lines, lambda s: s.stop_ids), logits.device)
            logits.view(-1).index_fill_(0, where, -torch.inf)


def default_processors(table: SamplingTable, vocab_size: int) -> list[LogitsProcessor]:
    """In the order in which they run."""
    return [LogitBias(), Penalties(table, vocab_size), LengthDecay(), AllowedTokens(), MinNewTokens()]
