"""/v1/chat/completions: conversations answered."""

import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import msgspec
from starlette.requests import Request

from lightllm.server.api_chat import Asked, ChatEndpoints
from lightllm.server.api_connection import event
from lightllm.server.api_endpoints import new_id
from lightllm.server.api_openai import DONE, error_body, usage
from lightllm.server.api_openai_answers import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChunkChoice,
    FunctionDelta,
    MessageDelta,
    TokenLogprob,
    ToolCallDelta,
    TopLogprob,
    Usage,
)
from lightllm.server.api_openai_models import ChatBody, FunctionCall, NamedToolChoice, ToolCall
from lightllm.server.core.sampling_params import InvalidParameter
from lightllm.server.httpserver.chat import TOOL_CALLS, Answer, CallPart, ChatRun, Part
from lightllm.server.httpserver.generation import RequestFailed, Token
from lightllm.server.tokenizer import Tokenizer


class ChatApi(ChatEndpoints[ChatBody]):
    kind = ChatBody
    answers = ChatCompletion
    events = ChatChunk

    async def _read_body(self, request: Request, kind: type[Any]) -> tuple[Any, dict[str, str]]:
        body, headers = await super()._read_body(request, kind)
        if body.chat_template is not None and not self._args.allow_request_chat_template:
            reason = "the server takes none from requests (--allow_request_chat_template)"
            raise InvalidParameter("chat_template", reason)
        return body, headers

    def _error_event(self, problem: RequestFailed) -> bytes:
        return event(error_body(problem))

    async def _complete(self, asked: Asked[ChatBody]) -> ChatCompletion:
        body = asked.body
        with await self._start(asked, body.priority or 0) as run:
            answers = await run.answers()
        size = run.generation.num_output_tokens * (1 + (body.logprobs or 0)) if body.tells_logprobs else 0
        choices = await self._manager.off_loop(
            lambda: [self._choice(index, answer, body) for index, answer in enumerate(answers)], size
        )
        return ChatCompletion(new_id("chatcmpl-"), int(time.time()), self.name, choices, _usage(run, answers))

    def _choice(self, index: int, answer: Answer, body: ChatBody) -> ChatChoice:
        message = AnswerMessage(
            role="assistant",
            content=answer.text if answer.text or not answer.calls else None,
            reasoning_content=answer.reasoning or None,
            tool_calls=[ToolCall(FunctionCall(c.name, c.arguments), c.id) for c in answer.calls] or None,
        )
        logprobs = None
        if body.tells_logprobs:
            logprobs = ChatLogprobs([token_logprob(self._manager.tokenizer, token) for token in answer.tokens])
        return ChatChoice(index, message, logprobs, _told(answer.finish, body))

    async def _events(self, asked: Asked[ChatBody]) -> AsyncGenerator[bytes, None]:
        """A chunk for every token that shows something, those that are there at once in one write."""
        with await self._start(asked, asked.body.priority or 0) as run:
            stream = _ChunkStream(asked.body, self.name, run, self._manager.tokenizer)
            async for parts in run:
                if chunks := [event(chunk) for part in parts for chunk in stream.chunks(part)]:
                    yield b"".join(chunks)
        if stream.tells_usage:
            yield event(stream.usage_chunk())
        yield DONE


class _ChunkStream:
    """The chunks of one streamed request. tells_usage: the last one, without choices, does."""

    def __init__(self, body: ChatBody, model: str, run: ChatRun, tokenizer: Tokenizer):
        self.tells_usage, self._every_usage = body.usage_of_chunks
        self._id = new_id("chatcmpl-")
        self._created = int(time.time())
        self._model = model
        self._run = run
        self._body = body
        self._tokenizer = tokenizer
        self._answers = [Answer() for _ in range(run.generation.sampling.n or 1)]

    def chunks(self, part: Part) -> Iterator[ChatChunk]:
        """What a token shows, each kind and each part of a call in a chunk of its own: many clients read one call of a
        chunk. The last has the logprobs. The finish comes alone."""
        answer = self._answers[part.sample]
        begins = not answer.tokens
        answer.add(part)
        if begins:
            yield self._chunk(ChunkChoice(part.sample, MessageDelta(role="assistant", content="")))
        logprobs = ChatLogprobs([token_logprob(self._tokenizer, part.token)]) if self._body.tells_logprobs else None
        deltas = []
        if part.reasoning:
            deltas.append(MessageDelta(reasoning_content=part.reasoning))
        if part.text:
            deltas.append(MessageDelta(content=part.text))
        deltas += [MessageDelta(tool_calls=[_call_delta(call)]) for call in part.calls]
        if logprobs and not deltas:
            deltas.append(MessageDelta())
        for delta in deltas[:-1]:
            yield self._chunk(ChunkChoice(part.sample, delta))
        for delta in deltas[-1:]:
            yield self._chunk(ChunkChoice(part.sample, delta, logprobs))
        if part.finish:
            yield self._chunk(ChunkChoice(part.sample, MessageDelta(), finish_reason=_told(part.finish, self._body)))

    def usage_chunk(self) -> ChatChunk:
        return ChatChunk(self._id, self._created, self._model, [], _usage(self._run, self._answers))

    def _chunk(self, choice: ChunkChoice) -> ChatChunk:
        told: Usage | msgspec.UnsetType | None = None if self.tells_usage else msgspec.UNSET
        if self._every_usage:
            told = _usage(self._run, self._answers)
        return ChatChunk(self._id, self._created, self._model, [choice], told)


def _told(finish: str, body: ChatBody) -> str:
    """Why an answer ended, as OpenAI tells it: with the call of the tool that the request names it has just stopped."""
    return "stop" if finish == TOOL_CALLS and isinstance(body.tool_choice, NamedToolChoice) else finish


def _call_delta(call: CallPart) -> ToolCallDelta:
    if call.starts:
        return ToolCallDelta(call.index, FunctionDelta(call.arguments, call.call.name), call.call.id, "function")
    return ToolCallDelta(call.index, FunctionDelta(call.arguments))


def _usage(run: ChatRun, answers: list[Answer]) -> Usage:
    reasoning = sum(answer.reasoning_tokens for answer in answers) if run.thinks else None
    return usage([run.generation], sum(len(answer.tokens) for answer in answers), reasoning)


def token_logprob(tokenizer: Tokenizer, token: Token) -> TokenLogprob:
    top = [TopLogprob(tokenizer.token_text(id), logprob, tokenizer.token_bytes(id)) for id, logprob in token.top or []]
    return TokenLogprob(tokenizer.token_text(token.id), token.logprob, tokenizer.token_bytes(token.id), top)
