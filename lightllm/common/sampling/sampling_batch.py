"""What sampling knows of a row, and which rows of a step are sampled."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightllm.common.sampling.transfer import to_device_at_once

NUMBERS = np.dtype([("seed", np.int64), ("floats", np.float32, 6), ("ints", np.int32, 4)])  # of a row


@dataclass(frozen=True)
class RowSampling:
    """One sequence's settings; every value is concrete, ids are below the vocabulary size.

    temperature 0 is greedy, top_k <= 0, top_p 1 and min_p 0 are off. `length_decay` is (start, factor) of
    transformers' ExponentialDecayLengthPenalty. The `stop_ids` are not sampled before the
    `min_new_tokens`-th token.
    `grammar` is what the text must match, "" for anything.
    `top_logprobs` is how many likeliest tokens are reported beside the sampled one.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    sample_index: int
    repetition: float
    presence: float
    frequency: float
    input_penalty: bool
    bias_ids: np.ndarray  # int64
    bias_values: np.ndarray  # float32
    allowed_ids: np.ndarray  # int64, empty: all
    stop_ids: np.ndarray  # int64
    min_new_tokens: int
    length_decay: tuple[int, float]
    top_logprobs: int
    grammar: str = ""


@dataclass(frozen=True)
class RowStart:
    """A sequence that starts or resumes on `row`; token_ids int32 are its prompt and, on resume, its output so far."""

    row: int
    token_ids: np.ndarray
    prompt_len: int
    sampling: RowSampling


@dataclass(frozen=True)
class SamplingBatch:
    """The sampled rows of one step, S lines in the order of the logits."""

    rows: np.ndarray  # int32 [S], on the host
    output_index: np.ndarray  # int32 [S], on the host: tokens that the row has generated before this one
    device_rows: Tensor  # int32 [S]: other types would have the draw's kernels compiled again
    device_output_index: Tensor  # int32 [S]


class SamplingTable:
    """The settings of all rows: objects and flags on the host, numeric columns [max_rows + 1] on the device.

    `last_token` holds the last sampled token of each row, from which its decode steps feed.
    """

    def __init__(self, max_rows: int, device: torch.device):
        rows = max_rows + 1
        self.device = device
        self.settings: list[RowSampling | None] = [None] * rows
        self.top_logprobs = np.zeros(rows, dtype=np.int32)
        # All columns but last_token in one buffer, so that rows are set by one copy and one kernel.
        self._numbers = torch.zeros(12 * rows, dtype=torch.int32, device=device)
        self._first = np.array([0, 1, *range(2 * rows, 12 * rows, rows)])  # where the words of row 0 are
        self._stride = np.array([2, 2, *[1] * 10])  # from there to those of the next row
        seed, floats, ints = self._numbers.split((2 * rows, 6 * rows, 4 * rows))
        self.seed = seed.view(torch.int64)
        self.floats = floats.view(torch.float32).view(6, rows)
        self.ints = ints.view(4, rows)
        self.prompt_len = self.ints[3]
        self.last_token = torch.zeros(rows, dtype=torch.int64, device=device)

    def set(self, starts: Sequence[RowStart]) -> None:
        """Fills the columns of rows that start."""
        for start in starts:
            s = self.settings[start.row] = start.sampling
            self.top_logprobs[start.row] = s.top_logprobs
        settings = [start.sampling for start in starts]
        rows = np.array([start.row for start in starts])[:, None]
        numbers = np.array(
            [
                (
                    s.seed,
                    (s.temperature, s.top_p, s.min_p, s.repetition, s.presence, s.frequency),
                    (s.top_k, s.sample_index, s.input_penalty, start.prompt_len),
                )
                for s, start in zip(settings, starts)
            ],
            dtype=NUMBERS,
        )
        index = (self._first + self._stride * rows).reshape(-1)
        (index_on_device,), (words,) = to_device_at_once([index], [numbers.view(np.int32)], self.device)
        self._numbers.index_copy_(0, index_on_device, words)

    def of(self, row: int) -> RowSampling:
        settings = self.settings[row]
        assert settings is not None, f"row {row} was never started"
        return settings

    @property
    def penalty_columns(self) -> tuple[Tensor, ...]:
        """(repetition, presence, frequency, input_penalty), each by row."""
        return *self.floats[3:], self.ints[2]

    @property
    def draw_columns(self) -> tuple[Tensor, ...]:
        """(temperature, top_k, top_p, min_p, seed, sample_index, last_token), each by row."""
        temperature, top_p, min_p, *_ = self.floats
        top_k, sample_index, *_ = self.ints
        return temperature, top_k, top_p, min_p, self.seed, sample_index, self.last_token
