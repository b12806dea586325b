"""/v1/responses: the text and tool subset of OpenAI's Responses API. Nothing is stored between requests."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from lightllm.server.api_bodies import sampling_of, words_of
from lightllm.server.api_chat import Asked, ChatEndpoints, check_number, tool_fields
from lightllm.server.api_connection import event
from lightllm.server.api_openai import check_stream_options, error_body, new_id
from lightllm.server.api_responses_models import (
    IDLE_FIELDS,
    NO_LOGPROBS,
    REFUSED,
    InputDetails,
    InputItem,
    InputPart,
    OutputDetails,
    ResponseAnswer,
    ResponseEvent,
    ResponsesBody,
    ResponseUsage,
)
from lightllm.server.chat_format import Chat
from lightllm.server.core.sampling_params import InvalidParameter, SamplingParams
from lightllm.server.httpserver.chat import Answer, CallPart, ChatRun, Part
from lightllm.server.httpserver.generation import RequestFailed

THOUGHT = {"role", "reasoning_content"}  # a message that holds nothing else
WORDS = words_of(ResponsesBody) | {"inputs": "input", "messages": "input", "guided_json": "text"}


class ResponsesApi(ChatEndpoints[ResponsesBody]):
    kind = ResponsesBody
    answers = ResponseAnswer
    events = ResponseEvent
    idle = IDLE_FIELDS
    refused = REFUSED
    words = WORDS

    def _chat(self, body: ResponsesBody) -> Chat:
        return chat_of(body)

    def _error_event(self, problem: RequestFailed) -> bytes:
        error = error_body(problem).error
        value = {"type": "error", "code": error.code or error.type, "message": error.message, "param": error.param}
        return event(value | {"sequence_number": -1}, "error")

    def _sampling(self, body: ResponsesBody) -> SamplingParams:
        return sampling_of(body, self._defaults, guided_json=_schema(body))

    async def _complete(self, asked: Asked[ResponsesBody]) -> ResponseAnswer:
        writer = _Writer(asked.body, self.name, asked.sampling)
        async for _ in self._written(asked, writer):
            pass
        return writer.response

    def _events(self, asked: Asked[ResponsesBody]) -> AsyncGenerator[bytes, None]:
        return self._written(asked, _Writer(asked.body, self.name, asked.sampling))

    async def _written(self, asked: Asked[ResponsesBody], writer: _Writer) -> AsyncGenerator[bytes, None]:
        with await self._start(asked) as run:
            written = writer.begin()
            async for parts in run:
                for part in parts:
                    written += writer.add(part)
                if written:
                    yield b"".join(written)
                written = []
            yield b"".join(writer.end(run))


class _Writer:
    """A response as it grows, and the events that tell of it."""

    def __init__(self, body: ResponsesBody, model: str, sampling: SamplingParams):
        self._number = -1
        self._open: dict[str, Any] | None = None
        self._call: int | None = None
        self._answer = Answer()
        choice = body.tool_choice or "auto"
        text = body.text.format if body.text and body.text.format else None
        self.response = ResponseAnswer(
            id=new_id("resp_"),
            created_at=int(time.time()),
            model=model,
            status="in_progress",
            output=[],
            tools=[tool | {"strict": bool(tool["strict"])} for tool in msgspec.to_builtins(body.tools or [])],
            tool_choice=msgspec.to_builtins(choice),
            parallel_tool_calls=body.parallel_tool_calls is not False,
            instructions=body.instructions,
            max_output_tokens=body.max_new_tokens,
            temperature=sampling.temperature,
            top_p=1.0 if sampling.top_p is None else sampling.top_p,
            text={"format": msgspec.to_builtins(text) if text else {"type": "text"}},
            reasoning={"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            user=body.user,
        )

    def begin(self) -> list[bytes]:
        return [self._event(kind, response=self.response) for kind in ("response.created", "response.in_progress")]

    def add(self, part: Part) -> list[bytes]:
        self._answer.add(part)
        events = []
        if part.reasoning:
            events += self._ensure("reasoning", {"summary": [], "content": []}, {"type": "reasoning_text", "text": ""})
            events.append(self._delta("response.reasoning_text.delta", part.reasoning, content_index=0))
        if part.text:
            empty = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            events += self._ensure("message", {"role": "assistant", "content": []}, empty)
            events.append(self._delta("response.output_text.delta", part.text, content_index=0, logprobs=[]))
        for call in part.calls:
            events += self._add_call(call)
        return events

    def end(self, run: ChatRun) -> list[bytes]:
        complete = self._answer.finish != "length"
        events = self._close("completed" if complete else "incomplete")
        prompt_tokens, output_tokens = len(run.generation.prompt_ids), len(self._answer.tokens)
        response = self.response
        response.status = "completed" if complete else "incomplete"
        response.incomplete_details = None if complete else {"reason": "max_output_tokens"}
        response.usage = ResponseUsage(
            prompt_tokens,
            InputDetails(run.generation.cached_tokens),
            output_tokens,
            OutputDetails(self._answer.reasoning_tokens),
            prompt_tokens + output_tokens,
        )
        return [*events, self._event(f"response.{response.status}", response=response)]

    def _add_call(self, call: CallPart) -> list[bytes]:
        events = []
        if call.starts:
            events += self._close()
            self._call = call.index
            fields = {"call_id": f"call_{call.call.id}", "name": call.call.name, "arguments": ""}
            events += self._start_item("function_call", "fc_", fields)
        if call.arguments:
            events.append(self._delta("response.function_call_arguments.delta", call.arguments))
        return events

    def _ensure(self, kind: str, fields: dict[str, Any], part: dict[str, Any]) -> list[bytes]:
        """Events that end another item and begin one with one part of content."""
        if self._open is not None and self._open["type"] == kind:
            return []
        events = [*self._close(), *self._start_item(kind, {"message": "msg_", "reasoning": "rs_"}[kind], fields)]
        self._item["content"].append(part)
        return [*events, self._item_event("response.content_part.added", content_index=0, part=part)]

    def _start_item(self, kind: str, prefix: str, fields: dict[str, Any]) -> list[bytes]:
        self._open = {"type": kind, "id": new_id(prefix), "status": "in_progress"} | fields
        self.response.output.append(self._open)
        return [self._event("response.output_item.added", output_index=self._index, item=self._open)]

    def _close(self, status: str = "completed") -> list[bytes]:
        item, events = self._open, []
        if item is None:
            return []
        item["status"] = status
        if item["type"] == "function_call":
            call = {"arguments": item["arguments"], "name": item["name"]}
            events.append(self._item_event("response.function_call_arguments.done", **call))
        else:
            (part,) = item["content"]
            told: dict[str, Any] = {"text": part["text"]} | ({"logprobs": []} if item["type"] == "message" else {})
            events.append(self._item_event(f"response.{part['type']}.done", content_index=0, **told))
            events.append(self._item_event("response.content_part.done", content_index=0, part=part))
        events.append(self._event("response.output_item.done", output_index=self._index, item=item))
        self._open = None
        return events

    @property
    def _index(self) -> int:
        return len(self.response.output) - 1

    @property
    def _item(self) -> dict[str, Any]:
        assert self._open is not None
        return self._open

    def _delta(self, kind: str, delta: str, **fields: Any) -> bytes:
        item = self._item
        if item["type"] == "function_call":
            item["arguments"] += delta
        else:
            item["content"][0]["text"] += delta
        return self._item_event(kind, delta=delta, **fields)

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, output_index=self._index, item_id=self._item["id"], **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return event(ResponseEvent(kind, self._number, **fields), kind)


def _schema(body: ResponsesBody) -> dict[str, Any] | None:
    form = body.text.format if body.text else None
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": "object"}
    if form.schema is None:
        raise InvalidParameter("text", "schema is required for the format json_schema")
    return form.schema


def chat_of(body: ResponsesBody) -> Chat:
    """What a body asks to be answered, in the words of the chat dialect. Raises InvalidParameter."""
    check_stream_options(body)
    if "message.output_text.logprobs" in (body.include or ()):
        raise InvalidParameter("include", NO_LOGPROBS)
    messages = [{"role": "system", "content": body.instructions}] if body.instructions else []
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        check_number("input", body.input, "items")
        for index, item in enumerate(body.input):
            _add_item(messages, item, f"input[{index}]")
    if not any(message["role"] in ("user", "tool") and message["content"] for message in messages):
        raise InvalidParameter("input", "holds nothing to answer")
    effort = {"reasoning_effort": body.reasoning.effort} if body.reasoning and body.reasoning.effort else {}
    return Chat(
        messages=messages,
        **tool_fields(body.tools or [], body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        variables=effort,
    )


def _add_item(messages: list[dict[str, Any]], item: InputItem, where: str) -> None:
    """Calls of one answer become one message; thoughts go with the message that follows them."""
    match item.type:
        case "message":
            if item.role is None or item.content is None:
                raise InvalidParameter("input", f"{where} needs role and content")
            message = {"role": item.role, "content": _text(item.content, where)}
            if item.role == "assistant" and messages and messages[-1].keys() == THOUGHT:
                message |= {"reasoning_content": messages.pop()["reasoning_content"]}
            messages.append(message)
        case "reasoning":
            if thoughts := _text(item.content or "", where):
                messages.append({"role": "assistant", "reasoning_content": thoughts})
        case "function_call":
            if item.call_id is None or item.name is None:
                raise InvalidParameter("input", f"{where} needs call_id and name")
            function = {"name": item.name, "arguments": item.arguments or "{}"}
            call = {"id": item.call_id.removeprefix("call_"), "type": "function", "function": function}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant"})
            messages[-1].setdefault("tool_calls", []).append(call)
        case "function_call_output":
            if item.call_id is None or item.output is None:
                raise InvalidParameter("input", f"{where} needs call_id and output")
            result = {"role": "tool", "tool_call_id": item.call_id.removeprefix("call_")}
            messages.append(result | {"content": _text(item.output, where)})


def _text(content: str | list[InputPart], where: str) -> str:
    if isinstance(content, str):
        return content
    for part in content:
        if part.text is None and part.refusal is None:
            raise InvalidParameter("input", f"{where} holds a part of the type {part.type}; this model reads text only")
    return "".join([part.text or part.refusal or "" for part in content])
