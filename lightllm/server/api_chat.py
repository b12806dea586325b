"""What the endpoints share that answer conversations, whatever their dialect."""

import asyncio
import re
from collections.abc import Sequence, Sized
from contextlib import closing
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import msgspec
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from lightllm.server.api_bodies import in_words_of, without_nulls
from lightllm.server.api_endpoints import GeneratingEndpoints, client_of
from lightllm.server.chat_constraints import after_thoughts, constrained
from lightllm.server.chat_format import Chat, ChatFormat, Prompt
from lightllm.server.core.sampling_params import InvalidParameter, SamplingParams
from lightllm.server.core.server_args import ServerArgs
from lightllm.server.httpserver.chat import ChatRun
from lightllm.server.httpserver.manager import CHARACTERS_PER_TOKEN, HttpServerManager

MAX_MESSAGES = 4096
MAX_TOOLS = 128
FUNCTION_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")

Body = TypeVar("Body", bound=Any)


@dataclass(frozen=True)
class Asked(Generic[Body]):
    """A request that was read. client: who asks, for fair sharing."""

    body: Body
    chat: Chat
    sampling: SamplingParams
    client: str


class ChatEndpoints(GeneratingEndpoints[Asked[Body]]):
    """Reads a body, then answers whole or as a stream.

    A body tells what it asks by `chat()`, how by `sampling(defaults of the model)`, and who asks by `user`.
    tells_stop: the answer tells which stop string ended it.
    """

    tells_stop: ClassVar[bool] = False

    def __init__(self, manager: HttpServerManager, args: ServerArgs, format: ChatFormat):
        super().__init__(manager, args)
        self._format = format

    async def answer(self, request: Request) -> Response:
        body, headers = await self._read_body(request, self.kind)
        asked = Asked(body, body.chat(), body.sampling(self._defaults), client_of(request, body.user))
        return await self._respond(request, asked, body.stream, headers | self._headers())

    async def _start(self, asked: Asked[Body], priority: int = 0) -> closing[ChatRun]:
        """The answers as they come. Raises what HttpServerManager.generate raises, in the dialect's words."""
        sampling = asked.sampling
        stops: list[str] = []
        if self.tells_stop:
            stops = [stop for stop in sampling.stop_sequences if isinstance(stop, str)]
            sampling = replace(sampling, include_stop_str_in_output=True)
        with in_words_of(asked.body.names()):
            chat, constraint = constrained(self._format, asked.chat, sampling)
            prompt = await self._prompt(chat)
            if constraint is not None and self._format.thinks(chat):
                constraint = after_thoughts(self._format, prompt, constraint)
            hides_special = sampling.skip_special_tokens
            if hides_special and self._format.visible_tokens(chat):
                sampling = replace(sampling, skip_special_tokens=False)
            generation = await self._manager.generate(
                prompt.ids, sampling, client=asked.client, priority=priority, constraint=constraint
            )
        return closing(ChatRun(generation, self._format, chat, prompt, hides_special, stops))

    async def _prompt(self, chat: Chat) -> Prompt:
        """Of a conversation, made off the event loop. Raises InvalidParameter."""
        limit = CHARACTERS_PER_TOKEN * self._manager.limits.max_total_tokens
        if chat.template is not None:  # takes its time; in threads that others do not wait for
            return await asyncio.to_thread(self._format.prompt, chat, limit)
        characters = sum(len(str(message.get("content", ""))) for message in chat.messages) + 1000 * len(chat.tools)
        return await self._manager.off_loop(lambda: self._format.prompt(chat, limit), characters)

    def _headers(self) -> dict[str, str]:
        """Of every answer of the dialect."""
        return {}


def check_number(field: str, items: Sized, what: str) -> None:
    """Raises InvalidParameter for too many messages."""
    if len(items) > MAX_MESSAGES:
        raise InvalidParameter(field, f"{len(items)} {what}; at most {MAX_MESSAGES}")


class FunctionDefinition(msgspec.Struct):
    """A tool. parameters: JSON schema of its arguments, which strict calls follow."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Named(Protocol):
    """The choice of one tool."""

    @property
    def name(self) -> str | None: ...


def tool_fields(tools: Sequence[FunctionDefinition], choice: str | Named | None) -> dict[str, Any]:
    """The fields of a `Chat` that tell of its tools. choice: none, auto (as None is), required, or one of them.

    Raises InvalidParameter for too many tools, for names that are none or there twice, for a choice that is not there.
    """
    if len(tools) > MAX_TOOLS:
        raise InvalidParameter("tools", f"{len(tools)} tools; at most {MAX_TOOLS}")
    names = [tool.name for tool in tools]
    for index, found in enumerate(names):
        if not FUNCTION_NAME.fullmatch(found):
            raise InvalidParameter("tools", f"{found!r} is no function name: 1 to 128 letters, digits, _ . -")
        if found in names[:index]:
            raise InvalidParameter("tools", f"{found} is there twice")
    if choice == "required" and not tools:
        raise InvalidParameter("tool_choice", "there are no tools to choose from")
    if not isinstance(choice, str | None):
        if choice.name not in names:
            raise InvalidParameter("tool_choice", f"there is no tool {choice.name!r}")
        choice = f"name:{choice.name}"
    return {
        "tools": [_for_template(tool) for tool in tools],
        "tool_choice": (choice or "auto") if tools else "none",
        "strict_tools": frozenset(tool.name for tool in tools if tool.strict),
    }


def _for_template(tool: FunctionDefinition) -> dict[str, Any]:
    """As chat templates know tools."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": without_nulls(function)}
