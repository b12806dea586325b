"""The Anthropic dialect: /v1/messages and /v1/messages/count_tokens."""

import json
import secrets
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lightllm.server.api_anthropic_models import (
    IDLE_FIELDS,
    REFUSED,
    AnswerBlock,
    AnswerUsage,
    AnthropicError,
    AnthropicErrorDetail,
    Block,
    CountBody,
    Message,
    MessageAnswer,
    MessageEvent,
    MessagesBody,
    TextBlock,
    ThinkingBlock,
    TokenCount,
    ToolUseBlock,
)
from lightllm.server.api_bodies import sampling_of, words_of
from lightllm.server.api_chat import Asked, ChatEndpoints, check_number, tool_fields
from lightllm.server.api_connection import JSON, event, while_connected
from lightllm.server.api_errors import KINDS as KINDS_OF_OPENAI
from lightllm.server.chat_format import Chat
from lightllm.server.core.sampling_params import InvalidParameter, SamplingParams
from lightllm.server.httpserver.chat import TOOL_CALLS, Answer, Call, Part, chat_prompt
from lightllm.server.httpserver.generation import RequestFailed

WORDS = words_of(MessagesBody) | {"inputs": "messages", "guided_json": "output_config"}
KINDS = KINDS_OF_OPENAI | {413: "request_too_large", 500: "api_error", 503: "overloaded_error"}
STOP_REASONS = {"length": "max_tokens", "stop": "end_turn", TOOL_CALLS: "tool_use"}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
CALL_ID = "toolu_"
TEXT = {"role", "content"}  # a message that holds nothing else


def error_body(problem: RequestFailed) -> AnthropicError:
    """A problem in the shape of this dialect."""
    return AnthropicError(AnthropicErrorDetail(KINDS.get(problem.status, "invalid_request_error"), problem.reason))


class MessagesApi(ChatEndpoints[MessagesBody]):
    kind = MessagesBody
    answers = MessageAnswer
    events = MessageEvent
    idle = IDLE_FIELDS
    refused = REFUSED
    words = WORDS
    tells_stop = True

    async def count_tokens(self, request: Request) -> Response:
        body, headers = await self._read(request, CountBody)
        prompt = await while_connected(request.receive, chat_prompt(self._manager, self._format, chat_of(body)))
        return JSON(TokenCount(len(prompt.ids)), headers=headers)

    def _headers(self) -> dict[str, str]:
        return {"request-id": f"req_{secrets.token_hex(12)}"}

    def _chat(self, body: MessagesBody) -> Chat:
        return chat_of(body)

    def _user(self, body: MessagesBody) -> str | None:
        return body.metadata.user_id if body.metadata else None

    def _error_event(self, problem: RequestFailed) -> bytes:
        return _event(error_body(problem))

    def _sampling(self, body: MessagesBody) -> SamplingParams:
        return sampling_of(body, self._defaults, guided_json=body.schema)

    async def _complete(self, asked: Asked[MessagesBody]) -> MessageAnswer:
        with await self._start(asked) as run:
            (answer,) = await run.answers()
        content: list[AnswerBlock] = [ThinkingBlock(answer.reasoning)] if answer.reasoning else []
        content += [TextBlock(answer.text)] if answer.text else []
        content += [_tool_use(call) for call in answer.calls]
        usage = AnswerUsage(len(run.generation.prompt_ids), len(answer.tokens))
        return MessageAnswer(_message_id(), self.name, content, _stop_reason(answer), answer.stop, usage)

    async def _events(self, asked: Asked[MessagesBody]) -> AsyncGenerator[bytes, None]:
        """message_start, then for each block start, deltas and stop, then message_delta and message_stop."""
        answer, blocks = Answer(), _Blocks()
        with await self._start(asked) as run:
            usage = AnswerUsage(len(run.generation.prompt_ids), 0)
            message = MessageAnswer(_message_id(), self.name, [], None, None, usage)
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
        events = []
        if part.reasoning:
            events += self._ensure("thinking", ThinkingBlock(""))
            events.append(self._delta({"type": "thinking_delta", "thinking": part.reasoning}))
        if part.text:
            events += self._ensure("text", TextBlock(""))
            events.append(self._delta({"type": "text_delta", "text": part.text}))
        for call in part.calls:
            events += self._ensure(call.index, ToolUseBlock(CALL_ID + call.call.id, call.call.name, {}))
            if call.arguments:
                events.append(self._delta({"type": "input_json_delta", "partial_json": call.arguments}))
        return events

    def close(self) -> list[bytes]:
        if self._open is None:
            return []
        events = []
        if self._open == "thinking":
            events.append(self._delta({"type": "signature_delta", "signature": ""}))
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


def _message_id() -> str:
    return f"msg_{secrets.token_hex(12)}"


def _stop_reason(answer: Answer) -> str:
    return "stop_sequence" if answer.stop is not None else STOP_REASONS[answer.finish]


def _tool_use(call: Call) -> ToolUseBlock:
    """Arguments that are no JSON, because the model broke off or wrote nonsense, are told as none."""
    try:
        arguments = msgspec.json.decode(call.arguments)
    except (ValueError, RecursionError):
        arguments = {}
    return ToolUseBlock(CALL_ID + call.id, call.name, arguments)


def chat_of(body: CountBody) -> Chat:
    """What a body asks to be answered, in the words of the OpenAI dialect. Raises InvalidParameter."""
    if not body.messages:
        raise InvalidParameter("messages", "is empty")
    check_number("messages", body.messages, "messages")
    if all(message.role != "user" for message in body.messages):
        raise InvalidParameter("messages", "holds nothing to answer: none is of the user")
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _text(body.system, "system")})
    for index, message in enumerate(body.messages):
        for part in _messages_of(message, f"messages[{index}]"):
            _add(messages, part)
    choice = body.tool_choice
    return Chat(
        messages=messages,
        **_tools(body),
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        continues=messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1],
        variables=_variables(body),
    )


def _add(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Texts of one role that follow one another are one turn, as this dialect has it: many templates want turns."""
    last = messages[-1] if messages else {}
    if last.keys() == message.keys() == TEXT and last["role"] == message["role"]:
        last["content"] += f"\n\n{message['content']}"
    else:
        messages.append(message)


def _variables(body: CountBody) -> dict[str, Any]:
    """For the chat template."""
    variables: dict[str, Any] = {}
    if body.thinking is not None:
        variables["enable_thinking"] = body.thinking.type != "disabled"
    if body.output_config is not None and body.output_config.effort is not None:
        variables["reasoning_effort"] = body.output_config.effort
    return variables


def _messages_of(message: Message, where: str) -> list[dict[str, Any]]:
    """One message of theirs: results of tools are messages of their own, before the text."""
    if isinstance(message.content, str):
        if message.role == "user" and not message.content:
            raise InvalidParameter("messages", f"the content of {where} is empty")
        return [{"role": message.role, "content": message.content}]
    if not message.content or all(block.type == "text" and not block.text for block in message.content):
        raise InvalidParameter("messages", f"the content of {where} is empty")
    results = [_result(block, where) for block in message.content if block.type == "tool_result"]
    calls = [_call(block, where) for block in message.content if block.type == "tool_use"]
    thoughts = "".join([block.thinking or "" for block in message.content if block.type == "thinking"])
    told = ("tool_result", "tool_use", "thinking", "redacted_thinking")
    rest = [block for block in message.content if block.type not in told]
    own: dict[str, Any] = {"role": message.role, "content": _text(rest, where)}
    if calls:
        own["tool_calls"] = calls
    if thoughts:
        own["reasoning_content"] = thoughts
    return [*results, *([own] if rest or calls or not results else [])]


def _text(content: str | Sequence[Block], where: str) -> str:
    return content if isinstance(content, str) else "".join([_text_of(block, where) for block in content])


def _text_of(block: Block, where: str) -> str:
    if block.type == "text" and block.text is not None:
        return block.text
    if block.type == "document" and (block.source or {}).get("type") == "text":
        return str((block.source or {}).get("data", ""))
    raise InvalidParameter("messages", f"{where} holds a block of the type {block.type}; this model reads text only")


def _result(block: Block, where: str) -> dict[str, Any]:
    if block.tool_use_id is None:
        raise InvalidParameter("messages", f"{where} holds a tool_result without tool_use_id")
    try:
        content = _text(msgspec.convert(block.content or "", str | list[Block]), where)
    except msgspec.ValidationError:
        reason = f"{where} holds a tool_result whose content is neither text nor blocks"
        raise InvalidParameter("messages", reason) from None
    text = f"Error: {content}" if block.is_error else content
    return {"role": "tool", "content": text, "tool_call_id": block.tool_use_id.removeprefix(CALL_ID)}


def _call(block: Block, where: str) -> dict[str, Any]:
    if block.id is None or block.name is None:
        raise InvalidParameter("messages", f"{where} holds a tool_use without id or name")
    arguments = json.dumps(block.input or {}, ensure_ascii=False)
    function = {"name": block.name, "arguments": arguments}
    return {"id": block.id.removeprefix(CALL_ID), "type": "function", "function": function}


def _tools(body: CountBody) -> dict[str, Any]:
    """The fields of a `Chat` that tell of its tools."""
    tools, choice = body.tools or [], body.tool_choice
    for tool in tools:
        if tool.type not in (None, "custom") or tool.parameters is None:
            raise InvalidParameter("tools", f"{tool.name} is of the type {tool.type}; only custom tools are known")
    if choice is None or choice.type == "tool":
        return tool_fields(tools, choice)
    if choice.type == "auto" and not tools:
        raise InvalidParameter("tool_choice", "there are no tools to choose from")
    return tool_fields(tools, CHOICES[choice.type])
