"""/v1/completions: prompts continued."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lightllm.server.api_bodies import check_stream_options, in_words_of
from lightllm.server.api_connection import event
from lightllm.server.api_endpoints import GeneratingEndpoints, client_of, new_id
from lightllm.server.api_openai import DONE, error_body, merged, usage
from lightllm.server.api_openai_answers import Completion, CompletionChoice, CompletionLogprobs, Usage
from lightllm.server.api_openai_models import COMPLETION_TOKENS, CompletionBody
from lightllm.server.core.messages import Finish
from lightllm.server.core.sampling_params import InvalidParameter, SamplingParams
from lightllm.server.detokenization.text_stream import open_stream
from lightllm.server.httpserver.generation import Generation, RequestFailed, Token
from lightllm.server.tokenizer import Tokenizer


class CompletionsApi(GeneratingEndpoints["_Run"]):
    kind = CompletionBody
    answers = events = Completion

    async def answer(self, request: Request) -> Response:
        body, headers = await self._read_body(request, CompletionBody)
        check_stream_options(body)
        if body.best_of not in (None, body.n or 1):
            raise InvalidParameter("best_of", f"must equal n, which is {body.n or 1}: every output is returned")
        run = _Run(body, self.name, client_of(request, body.user), body.prompts(), body.sampling(self._defaults))
        return await self._respond(request, run, body.stream, headers)

    def _error_event(self, problem: RequestFailed) -> bytes:
        return event(error_body(problem))

    async def _start(self, run: _Run, stack: ExitStack) -> None:
        with in_words_of(run.body.names()):
            for prompt in run.prompts:
                generation = await self._manager.generate(
                    prompt, run.sampling, COMPLETION_TOKENS, run.client, run.body.priority or 0
                )
                stack.callback(generation.close)
                run.generations.append(generation)
                await asyncio.sleep(0)  # to tokenize 256 prompts takes a second, in which others go on
        run.choices = [
            _Choice(number * (generation.sampling.n or 1) + sample, self._manager.tokenizer, run.body)
            for number, generation in enumerate(run.generations)
            for sample in range(generation.sampling.n or 1)
        ]

    async def _complete(self, run: _Run) -> Completion:
        with ExitStack() as stack:
            await self._start(run, stack)
            async for number, tokens in merged(run.generations):
                await run.echo(number)
                for token in tokens:
                    run.add(number, token)
        return run.chunk([choice.take() for choice in run.choices], with_usage=True)

    async def _events(self, run: _Run) -> AsyncGenerator[bytes, None]:
        last_usage, every_usage = run.body.usage_of_chunks
        with ExitStack() as stack:
            await self._start(run, stack)
            async with aclosing(merged(run.generations)) as news:  # type: ignore[type-var]
                async for number, tokens in news:
                    await run.echo(number)
                    grown = (run.add(number, token) for token in tokens)
                    chunks = [event(run.chunk([c.take()], every_usage)) for c in grown if c.has_news]
                    if chunks:
                        yield b"".join(chunks)
        if last_usage:
            yield event(run.chunk([], with_usage=True))
        yield DONE


@dataclass
class _Run:
    """One request: its prompts, their generations, and n choices of each."""

    body: CompletionBody
    model: str
    client: str
    prompts: list[str | list[int]]
    sampling: SamplingParams
    id: str = field(default_factory=lambda: new_id("cmpl-"))
    created: int = field(default_factory=lambda: int(time.time()))
    generations: list[Generation] = field(default_factory=list)
    choices: list[_Choice] = field(default_factory=list)
    echoed: set[int] = field(default_factory=set)

    def add(self, number: int, token: Token) -> _Choice:
        """A token of one prompt; the choice that it belongs to."""
        choice = self._choices_of(number)[token.sample]
        choice.add(token)
        return choice

    async def echo(self, number: int) -> None:
        """Puts a prompt before its choices, once, if it was asked for."""
        if not self.body.echo or number in self.echoed:
            return
        self.echoed.add(number)
        prompt, generation = self.prompts[number], self.generations[number]
        entries = await generation.prompt_logprobs() if self.body.logprobs is not None else None
        first, *others = self._choices_of(number)
        text = prompt if isinstance(prompt, str) else None
        await asyncio.to_thread(first.echo, text, generation.prompt_ids, entries)  # a long one takes most of a second
        for choice in others:
            choice.begin_as(first)

    def _choices_of(self, number: int) -> list[_Choice]:
        samples = self.generations[number].sampling.n or 1
        return self.choices[number * samples : (number + 1) * samples]

    def chunk(self, choices: list[CompletionChoice], with_usage: bool) -> Completion:
        told: Usage | msgspec.UnsetType | None = None if self.body.usage_of_chunks[0] else msgspec.UNSET
        if with_usage:
            told = usage(self.generations, sum(choice.num_tokens for choice in self.choices))
        return Completion(self.id, self.created, self.model, choices, told)


class _Choice:
    """One choice as it grows; `take` gives what came since the last time."""

    def __init__(self, index: int, tokenizer: Tokenizer, body: CompletionBody):
        self.num_tokens = 0
        self._index = index
        self._tokenizer = tokenizer
        self._top = body.logprobs
        self._drops_output = body.max_new_tokens == 0
        self._skips_special = body.skip_special_tokens is not False
        self._text = ""
        self._offset = 0
        self._logprobs = CompletionLogprobs()
        self._finish: str | None = None

    @property
    def has_news(self) -> bool:
        return bool(self._text or self._finish or self._logprobs.tokens)

    def echo(self, prompt: str | None, ids, entries: list[dict[int, float] | None] | None) -> None:
        """The prompt, as text of the choice. entries: logprobs of its tokens, if they are asked for."""
        hidden = self._tokenizer.special_ids if self._skips_special else frozenset()
        stream = open_stream(self._tokenizer, [], hidden, True)
        texts = [stream.feed(id) if id not in hidden else "" for id in ids]
        texts[-1] += stream.flush()
        if entries is None:
            self._append(prompt if prompt is not None else "".join(texts))
            return
        for id, text, entry in zip(ids, texts, entries, strict=True):
            top = None if entry is None else [(other, logprob) for other, logprob in entry.items() if other != id]
            self._add_logprob(id, text, None if entry is None else entry[id], top)
            self._append(text)

    def begin_as(self, other: _Choice) -> None:
        """With all that the other has so far."""
        self._text, self._offset = other._text, other._offset
        self._logprobs = CompletionLogprobs(*map(list, msgspec.structs.astuple(other._logprobs)))

    def add(self, token: Token) -> None:
        self._finish = token.finish.reason
        if self._drops_output:
            self._finish = Finish.LENGTH.reason
            return
        self.num_tokens += 1
        if self._top is not None:
            self._add_logprob(token.id, token.text, token.logprob, token.top or [])
        self._append(token.text)

    def _append(self, text: str) -> None:
        self._text += text
        self._offset += len(text)

    def _add_logprob(self, id: int, text: str, logprob: float | None, top: list[tuple[int, float]] | None) -> None:
        self._logprobs.tokens.append(text)
        self._logprobs.token_logprobs.append(logprob)
        self._logprobs.text_offset.append(self._offset)
        if top is None or logprob is None:
            self._logprobs.top_logprobs.append(None)
            return
        # Half characters may share a text: the likeliest of them stands for it.
        by_text: dict[str, float] = {}
        for other, value in sorted([*top, (id, logprob)], key=lambda pair: -pair[1]):
            by_text.setdefault(self._tokenizer.token_text(other), value)
        self._logprobs.top_logprobs.append(by_text)

    def take(self) -> CompletionChoice:
        logprobs = self._logprobs if self._top is not None else None
        choice = CompletionChoice(self._index, self._text, logprobs, self._finish)
        self._text, self._logprobs = "", CompletionLogprobs()
        return choice
