"""The messages between the processes: msgspec structs, columnar, never pickle.

A step is one message for all its requests. A column is the raw bytes of a one-dimensional array (`int32`, `int64`,
`float32`): encoding 256 objects costs half a millisecond, encoding the same as columns microseconds. `pack` and
`unpack` turn arrays into columns and back; `unpack` gives a read-only view.

Ids. A request id is an int64 whose top bits hold the number of the front that made it and whose low three bits are 0.
Sample i of its n outputs is the *sequence* `request_id | i`; everything past the front speaks of sequences.
"""

import math
from collections.abc import Iterator, Sequence
from enum import IntEnum

import msgspec
import numpy as np

from lightllm.server.core.sampling_params import RequestLimits, SamplingParams

FRONT_SHIFT = 48
SAMPLE_MASK = 7


def request_of(sequence_id: int) -> int:
    return sequence_id & ~SAMPLE_MASK


def sample_of(sequence_id: int) -> int:
    return sequence_id & SAMPLE_MASK


def front_of(sequence_id: int) -> int:
    return sequence_id >> FRONT_SHIFT


def pack(values, dtype) -> bytes:
    """One-dimensional values as the raw bytes of `dtype`."""
    return np.ascontiguousarray(values, dtype=dtype).tobytes()


def unpack(column: bytes, dtype) -> np.ndarray:
    """A read-only array over the bytes of a column."""
    return np.frombuffer(column, dtype=dtype)


class Finish(IntEnum):
    """Why a sequence ended; NONE while it runs."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4

    @property
    def reason(self) -> str | None:
        return self.name.lower() if self else None


FINISHES = tuple(Finish)  # by value: a look-up is faster than Finish(value)


class Message(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Base of all messages; the tag is the class name."""


class EngineInfo(Message, frozen=True):
    """What the loaded model and its KV pool can do; rank 0 tells the launcher, which tells every other process."""

    model_type: str
    dtype: str
    device: str
    vocab_size: int
    eos_token_ids: list[int]
    max_total_token_num: int  # KV rows in the pool
    max_req_total_len: int  # prompt + output tokens of one request: the context, or less by flag
    running_max_req_size: int  # sequences that run at once
    prefix_reusable: bool = True  # whether a request may use the KV rows of another one's prefix

    @property
    def on_gpu(self) -> bool:
        return self.device != "CPU"

    def limits(self) -> RequestLimits:
        """What one request may ask for."""
        max_total_tokens = min(self.max_req_total_len, self.max_total_token_num)
        return RequestLimits(max_total_tokens, self.vocab_size, tuple(self.eos_token_ids))


class GenerateRequest(Message, frozen=True):
    """front -> router. `sampling` is resolved; `sampling.n` sequences are started."""

    id: int
    prompt_ids: bytes  # int32
    sampling: SamplingParams
    open_ended: bool  # max_new_tokens was not given
    client: str = ""  # who asks, for fair sharing; "" for everybody who does not say
    priority: int = 0  # larger ones go first


class AbortRequest(Message, frozen=True):
    """front -> router: the client has gone; ends every sequence of the request."""

    id: int


class StopRequest(Message, frozen=True):
    """detokenizer -> router: a stop string matched; the sequence keeps its first `kept` output tokens."""

    sequence_id: int
    kept: int


class NewRow(Message, frozen=True):
    """A sequence that starts (or resumes) on a row of the worker's tables.

    Its first positions may be in the KV cache already, in the slots `cached`; its first chunk begins behind them.
    """

    row: int
    sequence_id: int
    token_ids: bytes  # int32: prompt and, on resume, the output so far
    prompt_len: int  # so that a resume does not count output as prompt
    sampling: SamplingParams
    cached: bytes = b""  # int32: the slots of positions 0...


class StepPlan(Message, frozen=True):
    """router -> every worker rank: one forward. Decode rows come first, then chunks.

    Row i computes `lengths[i]` tokens at positions `starts[i]`..., written to its next `lengths[i]` entries of `slots`.
    A decode row (i < num_decode) has length 1 and feeds the last token sampled for its row, which only the device may
    know yet; a chunk feeds ids of its `NewRow`. Where `samples[i]` is 1 the row's last logits are sampled. Rows in
    `ended` are free before `new_rows` are set up.
    """

    step: int
    num_decode: int
    rows: bytes  # int32
    starts: bytes  # int32
    lengths: bytes  # int32
    samples: bytes  # uint8
    slots: bytes  # int32, sum(lengths)
    ended: bytes  # int32
    new_rows: list[NewRow]


class CompileRequest(Message, frozen=True):
    """router -> every worker rank: a grammar is compiled beside the steps, and kept until it is forgotten."""

    key: int
    grammar: str


class ForgetRequest(Message, frozen=True):
    """router -> every worker rank: no request has the grammar any more."""

    key: int


class Compiled(Message, frozen=True):
    """worker -> router, of every rank: the grammar may be used, unless it cannot: then `failure` says why."""

    key: int
    failure: str


class TopLogprobs(Message, frozen=True):
    """The most likely tokens at one place, best first."""

    index: int  # into the columns of the message that carries it
    ids: bytes  # int32
    logprobs: bytes  # float32

    def pairs(self) -> list[tuple[int, float]]:
        """(id, logprob) of those that are possible at all."""
        return _possible(_pairs(self.ids, self.logprobs))


def _pairs(ids: bytes, logprobs: bytes) -> list[tuple[int, float]]:
    return list(zip(unpack(ids, "int32").tolist(), unpack(logprobs, "float32").tolist(), strict=True))


def _possible(pairs: list[tuple[int, float]]) -> list[tuple[int, float]]:
    return [pair for pair in pairs if math.isfinite(pair[1])]


class PromptLogprobs(Message, frozen=True):
    """log P(prompt[i] | prompt[:i]) for the positions start..., and the `k` best of each position, flattened."""

    owner: int  # row in a StepResult, sequence id in a TokenBatch or TextBatch
    start: int
    logprobs: bytes  # float32 [m]
    top_ids: bytes  # int32 [m * k]
    top_logprobs: bytes  # float32 [m * k]

    def entries(self, prompt_ids: Sequence[int]) -> list[dict[int, float]]:
        """For each position {id: logprob}: the prompt's token first, then the k likeliest."""
        logprobs, pairs = unpack(self.logprobs, "float32").tolist(), _pairs(self.top_ids, self.top_logprobs)
        k = len(pairs) // max(1, len(logprobs))
        return [
            {prompt_ids[self.start + i]: logprob} | dict(_possible(pairs[i * k : (i + 1) * k]))
            for i, logprob in enumerate(logprobs)
        ]


class StepResult(Message, frozen=True):
    """worker rank 0 -> router: the sampled token of each row with `samples`, in the plan's order."""

    step: int
    rows: bytes  # int32
    tokens: bytes  # int32
    logprobs: bytes  # float32: log_softmax of the raw logits
    top: list[TopLogprobs]
    prompt: list[PromptLogprobs]
    failed: list[tuple[int, str]]  # (row, reason): nothing was computed, the row's sequence ends with an error
    device_seconds: float = 0.0  # for which the GPU was at it, 0 on a CPU
    refused: list[tuple[int, str]] = []  # (row, reason): computed, but what the row's request asks for cannot be done


class NewSequence(Message, frozen=True):
    """What the detokenizer needs to know of a sequence, sent with or before its first token."""

    sequence_id: int
    prompt_tail: bytes  # int32: the last ids of the prompt, context for the first characters
    sampling: SamplingParams


class Started(Message, frozen=True):
    """A sequence that begins to run; told once, however often it pauses. Moments are those of the monotonic clock."""

    sequence_id: int
    cached_tokens: int  # of the prompt, found in the prefix cache
    at: float


class Ended(Message, frozen=True):
    """A sequence that ends without a token: refused, failed or aborted."""

    sequence_id: int
    finish: int
    status: int  # the HTTP status that fits: 400, 429, 500, 503; 0 for an abort
    reason: str


class StepTokens(Message, frozen=True):
    """The tokens of one step, and what begins and ends with it. Columns have a row for each token."""

    sequence_ids: bytes  # int64
    tokens: bytes  # int32
    logprobs: bytes  # float32
    finishes: bytes  # uint8: Finish
    top: list[TopLogprobs]
    prompt: list[PromptLogprobs]
    started: list[Started]
    ended: list[Ended]
    at: float  # when the router had the tokens


class TokenBatch(StepTokens, frozen=True):
    """router -> detokenizer."""

    new: list[NewSequence]


class TextBatch(StepTokens, frozen=True):
    """detokenizer -> one front."""

    texts: list[str]  # "" while it is held back

    def rows(self) -> Iterator[tuple[int, int, str, float, Finish, list[tuple[int, float]] | None]]:
        """(sequence id, token, text, logprob, finish, likeliest tokens if asked for) of each token."""
        top = {likeliest.index: likeliest.pairs() for likeliest in self.top}
        columns = (
            unpack(self.sequence_ids, "int64").tolist(),
            unpack(self.tokens, "int32").tolist(),
            self.texts,
            unpack(self.logprobs, "float32").tolist(),
            map(FINISHES.__getitem__, self.finishes),
        )
        for index, row in enumerate(zip(*columns, strict=True)):
            yield *row, top.get(index)


class Load(msgspec.Struct, array_like=True, frozen=True):
    """The router at one moment, and sums since its start; in KV tokens and in sequences."""

    used_tokens: int = 0  # held by sequences; a prefix that they share counts once
    cached_tokens: int = 0  # in the prefix cache alone: freed when somebody needs them
    used_peak: int = 0  # the most that was used since the last moment at which nothing ran
    predicted_peak: int = 0  # of the running sequences, from now on
    running: int = 0
    waiting: int = 0  # with the paused ones
    paused: int = 0
    admitted_total: int = 0
    pauses_total: int = 0
    prompt_tokens_total: int = 0  # of the admitted
    cached_prompt_tokens_total: int = 0  # of these, found in the prefix cache
    output_tokens_total: int = 0
    ended_output_tokens_total: int = 0  # of sequences that came to their end
    predicted_output_tokens_total: int = 0  # of the same sequences, as expected at their admission
    device_seconds_total: float = 0.0  # for which the GPU was at a step
    steps_total: int = 0  # whose results have come


class ProfileRequest(Message, frozen=True):
    """front -> router -> every worker: from here on steps are traced, or the trace ends and is written."""

    on: bool


class LoadRequest(Message, frozen=True):
    """front -> router: asks for a `LoadReport`; answered between two steps, also while nothing runs."""

    front: int
    ticket: int


class LoadReport(Message, frozen=True):
    """router -> the front that asked."""

    ticket: int
    load: Load
