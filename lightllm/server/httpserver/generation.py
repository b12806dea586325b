"""Generation: the tokens of one request as they come, buffered for a client that may read slowly."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import NamedTuple

import msgspec

from lightllm.server.core.messages import Finish, PromptLogprobs
from lightllm.server.core.sampling_params import SamplingParams


class RequestFailed(Exception):
    """A request that ends without a result: an HTTP status and a reason for the client.

    param: the field at fault. code: a word for programs that some dialects pass on.
    """

    def __init__(self, status: int, reason: str, param: str | None = None, code: str | None = None):
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.param = param
        self.code = code


class Arrival(NamedTuple):
    """When a request had come whole, in seconds of the monotonic clock, and the trace that it says to be a part of."""

    at: float
    traceparent: str


ARRIVAL: ContextVar[Arrival | None] = ContextVar("arrival", default=None)
"""Of the HTTP request that is being answered."""


class Token(msgspec.Struct, gc=False):
    """One generated token.

    sample: which of the n outputs. text: "" while it is held back. finish: NONE but for the last one of the output.
    top: the likeliest tokens and their logprobs, best first. count: tokens of that output up to this one.
    """

    sample: int
    id: int
    text: str
    logprob: float
    finish: Finish
    top: list[tuple[int, float]] | None = None
    count: int = 0


STAGES = ("tokenize", "queue", "prefill", "decode", "detokenize")  # where requests spend their time


class Times(msgspec.Struct):
    """Moments of a request, in seconds of the monotonic clock, which all processes share; 0 while they lie ahead.

    started: the router gave it room. sampled_first, sampled_last: the router had a token of it. first, last: the front
    had one, with its text.
    """

    received: float
    tokenized: float
    started: float = 0.0
    sampled_first: float = 0.0
    sampled_last: float = 0.0
    first: float = 0.0
    last: float = 0.0

    def stages(self) -> dict[str, tuple[float, float]]:
        """Begin and end of every stage that was reached: one begins where the one before it ends."""
        sampled = self.sampled_first, self.sampled_last
        moments = self.received, self.tokenized, self.started, *sampled, self.last
        return {stage: (begin, end) for stage, begin, end in zip(STAGES, moments, moments[1:]) if begin and end}


class Generation:
    """One request in flight; iterating yields lists of all tokens that came since the last look, at least one.

    The engine is never slowed down by a reader: a request runs to its end into this buffer, which its `max_new_tokens`
    bounds. Iteration raises RequestFailed, after the tokens that came before, when the request fails.

    prompt_ids: token ids of the prompt. sampling: the resolved parameters. running: samples that have not ended.
    times: when what happened.
    cached_tokens: of the prompt, how many the first sample found in the prefix cache; known once its first token is.
    traceparent: the trace that the request is a part of, in the words of that header; "" for none.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        times: Times,
        closed: Callable[[Generation], None],
        traceparent: str = "",
    ):
        assert sampling.n is not None, "resolved parameters say how many samples"
        self.prompt_ids = prompt_ids
        self.sampling = sampling
        self.running = sampling.n
        self.cached_tokens = 0
        self.times = times
        self.traceparent = traceparent
        self._closed = closed
        self._reasons: set[str] = set()
        self._counts = [0] * sampling.n
        self._tokens: list[Token] = []
        self._prompt_parts: list[PromptLogprobs] = []
        self._failure: RequestFailed | None = None
        self._news = asyncio.Event()

    def start(self, cached_tokens: int, at: float) -> None:
        """The first sample begins to run."""
        self.cached_tokens = cached_tokens
        self.times.started = at

    def add(self, token: Token, at: float) -> None:
        """The next of its output. at: when the router had it."""
        self._counts[token.sample] += 1
        token.count, times = self._counts[token.sample], self.times
        times.last, times.sampled_last = time.monotonic(), at
        times.first, times.sampled_first = times.first or times.last, times.sampled_first or at
        self._tokens.append(token)
        if token.finish:
            self.running -= 1
            self._reasons.add(token.finish.reason or "")
        self._news.set()

    @property
    def num_output_tokens(self) -> int:
        return sum(self._counts)

    @property
    def outcome(self) -> str:
        """How it ended: stop, length, error with its status, or abandoned by the client."""
        if self._failure is not None:
            return f"error {self._failure.status}"
        return "abandoned" if self.running else "length" if "length" in self._reasons else "stop"

    def add_prompt_logprobs(self, part: PromptLogprobs) -> None:
        self._prompt_parts.append(part)

    def fail(self, failure: RequestFailed) -> None:
        self._failure = failure
        self._news.set()

    def close(self) -> None:
        """Aborts what still runs; nobody reads on."""
        self._closed(self)

    async def prompt_logprobs(self) -> list[dict[int, float] | None]:
        """For each prompt token {id: logprob}: the token itself, then the likeliest ones; None for the first token.

        Empty unless the request asked for it. Waits for the first token of the first sample, which scores the prompt:
        the others may find it in the cache and begin sooner. Raises RequestFailed. Made in a thread: a long prompt
        takes most of a second.
        """
        if self.sampling.prompt_logprobs is None:
            return []
        while not self._counts[0]:
            await self._news_or_failure()
        return await asyncio.to_thread(self._entries)

    def _entries(self) -> list[dict[int, float] | None]:
        entries: list[dict[int, float] | None] = [None] * len(self.prompt_ids)
        for part in self._prompt_parts:
            of_part = part.entries(self.prompt_ids)
            entries[part.start : part.start + len(of_part)] = of_part
        return entries

    async def outputs(self) -> list[list[Token]]:
        """All tokens of each of the n outputs, at their end."""
        outputs: list[list[Token]] = [[] for _ in self._counts]
        async for tokens in self:
            for token in tokens:
                outputs[token.sample].append(token)
        return outputs

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> list[Token]:
        while not self._tokens:
            if not self.running and self._failure is None:
                raise StopAsyncIteration
            await self._news_or_failure()
        tokens, self._tokens = self._tokens, []
        return tokens

    async def _news_or_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._news.clear()
        await self._news.wait()
