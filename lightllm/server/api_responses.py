"""/v1/responses: the text and tool subset of OpenAI's Responses API. Nothing is stored between requests."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from lightllm.server.api_chat import Asked, ChatEndpoints
from lightllm.server.api_connection import event
from lightllm.server.api_endpoints import new_id
from lightllm.server.api_openai import error_body
from lightllm.server.api_responses_models import (
    InputDetails,
    OutputDetails,
    ResponseAnswer,
    ResponseEvent,
    ResponsesBody,
    ResponseUsage,
)
from lightllm.server.core.sampling_params import SamplingParams
from lightllm.server.httpserver.chat import Answer, CallPart, ChatRun, Part
from lightllm.server.httpserver.generation import RequestFailed

PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}  # of ids
EMPTY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # fields of an item besides its content, and its one part
    "message": ({"role": "assistant"}, {"type": "output_text", "text": "", "annotations": [], "logprobs": []}),
    "reasoning": ({"summary": []}, {"type": "reasoning_text", "text": ""}),
}


class ResponsesApi(ChatEndpoints[ResponsesBody]):
    kind = ResponsesBody
    answers = ResponseAnswer
    events = ResponseEvent

    def _error_event(self, problem: RequestFailed) -> bytes:
        error = error_body(problem).error
        value = {"type": "error", "code": error.code or error.type, "message": error.message, "param": error.param}
        return event(value | {"sequence_number": -1}, "error")

    async def _complete(self, asked: Asked[ResponsesBody]) -> ResponseAnswer:
        writer = _Writer(asked.body, self.name, asked.sampling)
        async for _ in self._written(asked, writer):
            pass
        return writer.response

    def _events(self, asked: Asked[ResponsesBody]) -> AsyncGenerator[bytes, None]:
        return self._written(asked, _Writer(asked.body, self.name, asked.sampling))

    async def _written(self, asked: Asked[ResponsesBody], writer: _Writer) -> AsyncGenerator[bytes, None]:
        with await self._start(asked) as run:
            writer.begin()
            async for parts in run:
                for part in parts:
                    writer.add(part)
                if written := writer.take():
                    yield written
            writer.end(run)
            yield writer.take()


class _Writer:
    """A response as it grows, and the events that tell of it: `take` gives those since the last time."""

    def __init__(self, body: ResponsesBody, model: str, sampling: SamplingParams):
        self._events: list[bytes] = []
        self._number = 0
        self._open: dict[str, Any] | None = None
        self._answer = Answer()
        self._calls_as_told = body.calls_as_told()
        choice = body.tool_choice or "auto"
        text = body.text.format if body.text and body.text.format else None
        self.response = ResponseAnswer(
            id=new_id("resp_"),
            created_at=int(time.time()),
            model=model,
            status="in_progress",
            output=[],
            tools=msgspec.to_builtins(body.tools or []),
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

    def take(self) -> bytes:
        events, self._events = self._events, []
        return b"".join(events)

    def begin(self) -> None:
        self._tell("response.created", response=self.response)
        self._tell("response.in_progress", response=self.response)

    def add(self, part: Part) -> None:
        self._answer.add(part)
        open_call, new_calls = part.calls_around_text
        self._add_calls(open_call)
        if part.reasoning:
            self._write("reasoning", part.reasoning)
        if part.text:
            self._write("message", part.text)
        self._add_calls(new_calls)

    def _add_calls(self, calls: list[CallPart]) -> None:
        for call in calls:
            if call.starts:
                told = self._calls_as_told.get(call.call.name, {"name": call.call.name})
                self._begin_item("function_call", call_id=f"call_{call.call.id}", **told, arguments="")
            if call.arguments:
                self._item["arguments"] += call.arguments
                self._tell_of_item("response.function_call_arguments.delta", delta=call.arguments)

    def end(self, run: ChatRun) -> None:
        response, complete = self.response, self._answer.finish != "length"
        response.status = "completed" if complete else "incomplete"
        self._end_item(response.status)
        response.incomplete_details = None if complete else {"reason": "max_output_tokens"}
        prompt_tokens, output_tokens = len(run.generation.prompt_ids), len(self._answer.tokens)
        response.usage = ResponseUsage(
            prompt_tokens,
            InputDetails(run.generation.cached_tokens),
            output_tokens,
            OutputDetails(self._answer.reasoning_tokens),
            prompt_tokens + output_tokens,
        )
        self._tell(f"response.{response.status}", response=response)

    def _write(self, kind: str, text: str) -> None:
        """Behind what an open item of this kind holds, or into a new one."""
        if self._open is None or self._open["type"] != kind:
            fields, part = EMPTY[kind]
            self._begin_item(kind, **fields, content=[])
            self._item["content"].append(dict(part))
            self._tell_of_item("response.content_part.added", content_index=0, part=part)
        part = self._item["content"][0]
        part["text"] += text
        self._tell_of_item(f"response.{part['type']}.delta", content_index=0, delta=text, logprobs=part.get("logprobs"))

    def _begin_item(self, kind: str, **fields: Any) -> None:
        self._end_item()
        self._open = {"type": kind, "id": new_id(PREFIXES[kind]), "status": "in_progress"} | fields
        self.response.output.append(self._open)
        self._tell("response.output_item.added", output_index=self._index, item=self._open)

    def _end_item(self, status: str = "completed") -> None:
        if self._open is None:
            return
        item = self._open
        item["status"] = status
        if item["type"] == "function_call":
            call = {"arguments": item["arguments"], "name": item["name"]}
            self._tell_of_item("response.function_call_arguments.done", **call)
        else:
            (part,) = item["content"]
            told = {"text": part["text"], "logprobs": part.get("logprobs")}
            self._tell_of_item(f"response.{part['type']}.done", content_index=0, **told)
            self._tell_of_item("response.content_part.done", content_index=0, part=part)
        self._tell("response.output_item.done", output_index=self._index, item=item)
        self._open = None

    @property
    def _index(self) -> int:
        return len(self.response.output) - 1

    @property
    def _item(self) -> dict[str, Any]:
        assert self._open is not None
        return self._open

    def _tell_of_item(self, kind: str, **fields: Any) -> None:
        self._tell(kind, output_index=self._index, item_id=self._item["id"], **fields)

    def _tell(self, kind: str, **fields: Any) -> None:
        self._events.append(event(ResponseEvent(kind, self._number, **fields), kind))
        self._number += 1
