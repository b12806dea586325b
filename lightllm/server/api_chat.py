"""What the endpoints share that answer conversations, whatever their dialect."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from lightllm.server.api_bodies import in_words_of, read_as
from lightllm.server.api_connection import JSON, EventStream, while_connected
from lightllm.server.api_endpoints import Endpoints, client_of
from lightllm.server.api_errors import Problem, events_until_error
from lightllm.server.chat_format import Chat, ChatFormat
from lightllm.server.core.sampling_params import SamplingParams
from lightllm.server.core.server_args import ServerArgs
from lightllm.server.httpserver.chat import ChatRun, start_chat
from lightllm.server.httpserver.manager import HttpServerManager

Body = TypeVar("Body", bound=Any)


@dataclass(frozen=True)
class Asked(Generic[Body]):
    """A request that was read. client: who asks, for fair sharing."""

    body: Body
    chat: Chat
    sampling: SamplingParams
    client: str


class ChatEndpoints(Endpoints, Generic[Body]):
    """Reads a body, then answers whole or as a stream.

    kind: of the body. idle: its fields that change nothing. words: what we call a field -> what the dialect calls it.
    tells_stop: the answer tells which stop string ended it.
    """

    kind: ClassVar[type[Any]]
    idle: ClassVar[tuple[str, ...]]
    words: ClassVar[dict[str, str]]
    tells_stop: ClassVar[bool] = False

    def __init__(self, manager: HttpServerManager, args: ServerArgs, format: ChatFormat):
        super().__init__(manager, args)
        self._format = format

    async def answer(self, request: Request) -> Response:
        body: Body
        body, headers = await self._read(request, self.kind)
        chat = self._chat(body)
        with in_words_of(self._words(body)):
            sampling = self._sampling(body)
        asked: Asked[Body] = Asked(body, chat, sampling, client_of(request, self._user(body)))
        headers |= self._headers()
        if body.stream:
            return EventStream(events_until_error(self._events(asked), self._error_event), headers)
        return JSON(await while_connected(request.receive, self._complete(asked)), headers=headers)

    async def _read(self, request: Request, kind: type[Any]) -> tuple[Any, dict[str, str]]:
        """The body, for a model that is served here, and the headers of its answer."""
        limit = self._manager.limits.max_total_tokens
        body, headers = await read_as(request, kind, self._args, limit, self.idle)
        self._check_model(body.model)
        return body, headers

    async def _start(self, asked: Asked[Body], priority: int = 0) -> closing[ChatRun]:
        with in_words_of(self._words(asked.body)):
            run = await start_chat(
                self._manager, self._format, asked.chat, asked.sampling, asked.client, priority, self.tells_stop
            )
        return closing(run)

    def _words(self, body: Body) -> dict[str, str]:
        return self.words

    def _headers(self) -> dict[str, str]:
        """Of every answer of the dialect."""
        return {}

    @abstractmethod
    def _chat(self, body: Body) -> Chat:
        """What a body asks to be answered. Raises InvalidParameter."""

    @abstractmethod
    def _sampling(self, body: Body) -> SamplingParams: ...

    @abstractmethod
    def _user(self, body: Body) -> str | None:
        """Whom the body names as the one who asks."""

    @abstractmethod
    async def _complete(self, asked: Asked[Body]) -> Any:
        """The whole answer."""

    @abstractmethod
    def _events(self, asked: Asked[Body]) -> AsyncGenerator[bytes, None]:
        """The chunks of a stream."""

    @abstractmethod
    def _error_event(self, problem: Problem) -> bytes:
        """The last event of a stream that fails."""
