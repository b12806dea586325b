"""The Anthropic dialect: /v1/messages and /v1/messages/count_tokens."""

from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lightllm.server.api_anthropic_models import (
    CALL_ID,
    SIGNATURE,
    AnswerBlock,
    AnswerUsage,
    AnthropicError,
    AnthropicErrorDetail,
    CountBody,
    MessageAnswer,
    MessageEvent,
    MessagesBody,
    TextBlock,
    ThinkingBlock,
    TokenCount,
    ToolUseBlock,
)
from lightllm.server.api_chat import Asked, ChatEndpoints
from lightllm.server.api_connection import JSON, event, while_connected
from lightllm.server.api_endpoints import new_id
from lightllm.server.api_errors import KINDS as KINDS_OF_OPENAI
from lightllm.server.httpserver.chat import TOOL_CALLS, Answer, Call, CallPart, Part
from lightllm.server.httpserver.generation import RequestFailed

KINDS = KINDS_OF_OPENAI | {413: "request_too_large", 500: "api_error", 503: "overloaded_error"}
STOP_REASONS = {"length": "max_tokens", "stop": "end_turn", TOOL_CALLS: "tool_use"}


def error_body(problem: RequestFailed) -> AnthropicError:
    return AnthropicError(AnthropicErrorDetail(KINDS.get(problem.status, "invalid_request_error"), problem.reason))


class MessagesApi(ChatEndpoints[MessagesBody]):
    kind = MessagesBody
    answers = MessageAnswer
    events = MessageEvent
    tells_stop = True

    async def count_tokens(self, request: Request) -> Response:
        body, headers = await self._read_body(request, CountBody)
        prompt = await while_connected(request.receive, self._prompt(body.chat()))
        return JSON(TokenCount(len(prompt.ids)), headers=headers)

    def _headers(self) -> dict[str, str]:
        return {"request-id": new_id("req_")}

    def _error_event(self, problem: RequestFailed) -> bytes:
        return _event(error_body(problem))

    async def _complete(self, asked: Asked[MessagesBody]) -> MessageAnswer:
        with await self._start(asked) as run:
            (answer,) = await run.answers()
        content: list[AnswerBlock] = [ThinkingBlock(answer.reasoning)] if answer.reasoning else []
        content += [TextBlock(answer.text)] if answer.text else []
        content += [_tool_use(call) for call in answer.calls]
        usage = AnswerUsage(len(run.generation.prompt_ids), len(answer.tokens))
        return MessageAnswer(new_id("msg_"), self.name, content, _stop_reason(answer), answer.stop, usage)

    async def _events(self, asked: Asked[MessagesBody]) -> AsyncGenerator[bytes, None]:
        """message_start, then for each block start, deltas and stop, then message_delta and message_stop."""
        answer, blocks = Answer(), _Blocks()
        with await self._start(asked) as run:
            usage = AnswerUsage(len(run.generation.prompt_ids), 0)
            message = MessageAnswer(new_id("msg_"), self.name, [], None, None, usage)
            start = _event(MessageEvent("message_start", message=message))
            async for parts in run:
                written = [start]
                start = b""
                for part in parts:
                    answer.add(part)
                    written += blocks.add(part)
                if chunk := b"".join(written):
                    yield chunk
        delta = {"stop_reason": _stop_reason(answer), "stop_sequence": answer.stop}
        ending = MessageEvent("message_delta", delta=delta, usage={"output_tokens": len(answer.tokens)})
        yield b"".join([*blocks.close(), _event(ending), _event(MessageEvent("message_stop"))])


class _Blocks:
    """The content blocks of a stream: one is open at a time."""

    def __init__(self) -> None:
        self._index = -1
        self._open: str | int | None = None  # text, thinking, or the number of a call

    def add(self, part: Part) -> list[bytes]:
        open_call, new_calls = part.calls_around_text
        events = self._add_calls(open_call)
        if part.reasoning:
            events += self._ensure("thinking", ThinkingBlock("", ""))
            events.append(self._delta({"type": "thinking_delta", "thinking": part.reasoning}))
        if part.text:
            events += self._ensure("text", TextBlock(""))
            events.append(self._delta({"type": "text_delta", "text": part.text}))
        return events + self._add_calls(new_calls)

    def _add_calls(self, calls: list[CallPart]) -> list[bytes]:
        events = []
        for call in calls:
            events += self._ensure(call.index, ToolUseBlock(CALL_ID + call.call.id, call.call.name, {}))
            if call.arguments:
                events.append(self._delta({"type": "input_json_delta", "partial_json": call.arguments}))
        return events

    def close(self) -> list[bytes]:
        if self._open is None:
            return []
        events = []
        if self._open == "thinking":
            events.append(self._delta({"type": "signature_delta", "signature": SIGNATURE}))
        self._open = None
        return [*events, _event(MessageEvent("content_block_stop", self._index))]

    def _ensure(self, block: str | int, content: AnswerBlock) -> list[bytes]:
        if self._open == block:
            return []
        events = self.close()
        self._index += 1
        self._open = block
        start = MessageEvent("content_block_start", self._index, content_block=content)
        return [*events, _event(start)]

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event(MessageEvent("content_block_delta", self._index, delta=delta))


def _event(value: MessageEvent | AnthropicError) -> bytes:
    return event(value, value.type)


def _stop_reason(answer: Answer) -> str:
    return "stop_sequence" if answer.stop is not None else STOP_REASONS[answer.finish]


def _tool_use(call: Call) -> ToolUseBlock:
    """Arguments that are no JSON, because the model broke off or wrote nonsense, are told as none."""
    try:
        arguments = msgspec.json.decode(call.arguments)
    except (ValueError, RecursionError):
        arguments = {}
    return ToolUseBlock(CALL_ID + call.id, call.name, arguments)
