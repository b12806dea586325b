"""HttpServerManager: a prompt in, its tokens out; knows the engine's messages and nothing of HTTP."""

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

import msgspec

from lightllm.server.constraints import Constraint, constraint_of, with_grammar
from lightllm.server.core.channel import AsyncInbox, Outbox
from lightllm.server.core.messages import (
    FRONT_SHIFT,
    AbortRequest,
    Ended,
    EngineInfo,
    GenerateRequest,
    LoadReport,
    LoadRequest,
    ProfileRequest,
    TextBatch,
    pack,
    request_of,
    sample_of,
)
from lightllm.server.core.sampling_params import TOO_LONG, InvalidParameter, SamplingParams
from lightllm.server.core.server_args import ServerArgs
from lightllm.server.httpserver.generation import ARRIVAL, Arrival, Generation, RequestFailed, Times, Token
from lightllm.server.httpserver.metrics import RequestWatch
from lightllm.server.httpserver.tracing import Tracer
from lightllm.server.tokenizer import Tokenizer

CHARACTERS_PER_TOKEN = 8  # a text with more of them than this times the token limit is refused unread
INLINE_SIZE = 4096  # characters or logprobs: less work is done sooner than a thread takes over
OFF_LOOP_THREADS = 4
COMPILER_THREADS = 2  # of grammars; a large one may take seconds
SILENCE_TIMEOUT = 200.0  # seconds without a step, with requests in flight, that mean the engine hangs
LOAD_TIMEOUT = 10.0  # seconds
HEALTH_TIMEOUT = 0.5  # seconds that a probe waits for the router

T = TypeVar("T")


class HttpServerManager:
    """The front's side of the engine.

    engine: what it serves. limits: of one request. accepting: whether requests are taken. `receive` must run as a task.
    """

    def __init__(
        self,
        index: int,
        socket_dir: str,
        engine: EngineInfo,
        tokenizer: Tokenizer,
        args: ServerArgs,
        tracer: Tracer | None = None,
    ):
        self._args = args
        self._watch = RequestWatch(args.request_log, tracer)
        self.engine = engine
        self.tokenizer = tokenizer
        self.limits = engine.limits()
        self._index = index
        self._inbox = AsyncInbox(socket_dir, f"front{index}", (TextBatch, LoadReport))
        self._router = Outbox(socket_dir, "router")
        self._threads = ThreadPoolExecutor(OFF_LOOP_THREADS, thread_name_prefix="off-loop")
        self._compilers = ThreadPoolExecutor(COMPILER_THREADS, thread_name_prefix="compile")
        self._counter = itertools.count(1)
        self._generations: dict[int, Generation] = {}
        self._loads: dict[int, asyncio.Future[LoadReport]] = {}
        self._closed: RequestFailed | None = None
        self._last_sign = time.monotonic()
        self._seen_steps = 0  # when the router was last looked at

    async def healthy(self) -> bool:
        """Whether requests are taken and progress is seen: here, or, where ours only wait, at the router."""
        if self._generations and self._silence() > SILENCE_TIMEOUT / 2:
            await self._look_at_router()
        return self._closed is None and not (self._generations and self._silence() > SILENCE_TIMEOUT)

    def _silence(self) -> float:
        """Seconds since the last sign of progress."""
        return time.monotonic() - self._last_sign

    async def _look_at_router(self) -> None:
        """Steps for other fronts' requests are signs of progress too, and those that compute a long prompt."""
        with suppress(RequestFailed):
            seen = (await self.load(HEALTH_TIMEOUT)).load.steps_total
            if seen != self._seen_steps:
                self._seen_steps, self._last_sign = seen, time.monotonic()

    @property
    def accepting(self) -> bool:
        return self._closed is None

    async def generate(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams,
        usual_new_tokens: int | None = None,
        client: str = "",
        priority: int = 0,
        constraint: Constraint | None = None,
    ) -> Generation:
        """Starts a request, whose tokens the returned Generation yields; it must be closed, which aborts what runs.

        prompt: text, or token ids. usual_new_tokens: bound of an output whose max_new_tokens is not given; None: what
        fits.
        client: who asks, for fair sharing. priority: larger ones go first. constraint: on the output's form, instead of
        one that `sampling` asks for.
        Raises InvalidParameter for what can never be served, RequestFailed while closing.
        """
        self._check_accepting()
        arrival = ARRIVAL.get() or Arrival(time.monotonic(), "")
        prompt_ids = await self._prompt_ids(prompt, sampling.add_special_tokens)
        room = self.limits.max_total_tokens - len(prompt_ids)
        if usual_new_tokens is not None and sampling.max_new_tokens is None and room > 0:
            sampling = msgspec.structs.replace(sampling, max_new_tokens=min(usual_new_tokens, room))
        resolved = sampling.resolve(self.limits, len(prompt_ids))
        if constraint := constraint or constraint_of(resolved):
            resolved = await self._constrained(resolved, constraint)
        self._check_accepting()
        if not self._generations:
            self._last_sign = time.monotonic()
            self._watch.idle()
        request_id = self._index << FRONT_SHIFT | next(self._counter) << 3
        open_ended = sampling.max_new_tokens is None
        columns = pack(prompt_ids, "int32")
        times = Times(arrival.at, time.monotonic())
        self._router.send(GenerateRequest(request_id, columns, resolved, open_ended, client, priority))

        def closed(generation: Generation) -> None:
            self._abort(request_id)
            self._watch.ended(request_id, client, generation)

        generation = self._generations[request_id] = Generation(
            prompt_ids, resolved, times, closed, arrival.traceparent
        )
        return generation

    async def _constrained(self, resolved: SamplingParams, constraint: Constraint) -> SamplingParams:
        """With the constraint checked, off the loop."""
        if not self.tokenizer.serves_grammars:
            raise InvalidParameter(constraint.field, "this checkpoint has no tokenizer.json, which grammars need")
        loop, backend = asyncio.get_running_loop(), self._args.grammar_backend
        return await loop.run_in_executor(self._compilers, with_grammar, resolved, constraint, backend)

    async def tokenize(self, text: str, add_special_tokens: bool = True, field: str = "inputs") -> list[int]:
        """Token ids of a text, off the event loop; raises InvalidParameter for `field` if it is hopelessly long."""
        limit = CHARACTERS_PER_TOKEN * self.limits.max_total_tokens
        if len(text) > limit:
            raise InvalidParameter(
                field,
                f"{len(text)} characters cannot fit the limit of {self.limits.max_total_tokens} tokens; "
                f"texts longer than {limit} characters are not read",
                TOO_LONG,
            )
        return await self.off_loop(lambda: self.tokenizer.encode(text, add_special_tokens), len(text))

    async def off_loop(self, work: Callable[[], T], size: int) -> T:
        """The result of work on so many characters or logprobs: in a thread, unless it is done sooner."""
        if size <= INLINE_SIZE:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def load(self, timeout: float = LOAD_TIMEOUT) -> LoadReport:
        """What the router does at this moment; raises RequestFailed if it does not say so within `timeout` seconds."""
        self._check_accepting()
        ticket = next(self._counter)
        report = self._loads[ticket] = asyncio.get_running_loop().create_future()
        try:
            self._router.send(LoadRequest(self._index, ticket))
            return await asyncio.wait_for(report, timeout)
        except TimeoutError:
            raise RequestFailed(503, f"the router did not answer within {timeout:g} s") from None
        finally:
            del self._loads[ticket]

    def profile(self, on: bool) -> None:
        """Begins a trace of the workers' steps, or ends it."""
        self._router.send(ProfileRequest(on))

    def refuse(self, reason: str) -> None:
        """From now on new requests get a 503 with this reason; those in flight go on."""
        self._closed = RequestFailed(503, reason)

    def end_all(self, reason: str) -> None:
        """Ends every request with a 503 and takes no more."""
        self.refuse(reason)
        for request_id, generation in list(self._generations.items()):
            self._abort(request_id)
            generation.fail(RequestFailed(503, reason))
        for report in self._loads.values():
            if not report.done():
                report.set_exception(RequestFailed(503, reason))

    async def receive(self) -> None:
        """Hands out what the engine sends, for ever."""
        while True:
            for message in await self._inbox.receive():
                if isinstance(message, TextBatch):
                    self._deliver(message)
                elif isinstance(message, LoadReport):
                    report = self._loads.get(message.ticket)
                    if report is not None and not report.done():
                        report.set_result(message)

    def _check_accepting(self) -> None:
        if self._closed is not None:
            raise RequestFailed(self._closed.status, self._closed.reason)

    async def _prompt_ids(self, prompt: str | Sequence[int], add_special_tokens: bool) -> Sequence[int]:
        prompt_ids = await self.tokenize(prompt, add_special_tokens) if isinstance(prompt, str) else prompt
        if 0 < len(prompt_ids) < self.limits.max_total_tokens:  # a longer one is refused by its length, unread
            for token_id in (min(prompt_ids), max(prompt_ids)):
                if not 0 <= token_id < self.limits.vocab_size:
                    last = self.limits.vocab_size - 1
                    raise InvalidParameter("inputs", f"token id {token_id} is not in the vocabulary of ids 0..{last}")
        return prompt_ids

    def _abort(self, request_id: int) -> None:
        if self._generations.pop(request_id, None) is not None:
            self._router.send(AbortRequest(request_id))

    def _deliver(self, batch: TextBatch) -> None:
        self._last_sign = time.monotonic()
        if batch.tokens:
            self._watch.step(bool(self._generations))
        for part in batch.prompt:
            if (generation := self._generations.get(request_of(part.owner))) and sample_of(part.owner) == 0:
                generation.add_prompt_logprobs(part)
        for start in batch.started:
            sequence_id = start.sequence_id
            if (generation := self._generations.get(request_of(sequence_id))) and sample_of(sequence_id) == 0:
                generation.start(start.cached_tokens, start.at)
        for sequence_id, token_id, text, logprob, finish, top in batch.rows():
            request_id = request_of(sequence_id)
            if generation := self._generations.get(request_id):
                token = Token(sample_of(sequence_id), token_id, text, logprob, finish, top)
                generation.add(token, batch.at)
                if not generation.running:
                    del self._generations[request_id]
        for ended in batch.ended:
            self._end(ended)

    def _end(self, ended: Ended) -> None:
        """One sequence that was refused or failed fails its request; the others of n are aborted."""
        request_id = request_of(ended.sequence_id)
        if generation := self._generations.get(request_id):
            self._abort(request_id)
            generation.fail(RequestFailed(ended.status or 503, ended.reason or "the request was aborted"))
