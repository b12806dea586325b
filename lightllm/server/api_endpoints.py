"""What the endpoints of all dialects share: the model that they answer for, and how an answer gets to its client."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator
from typing import Any, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from lightllm.server.api_connection import JSON, EventStream, while_connected
from lightllm.server.api_errors import ModelNotFound, Problem, problem_of
from lightllm.server.core.server_args import ServerArgs
from lightllm.server.generation_defaults import sampling_defaults
from lightllm.server.httpserver.manager import HttpServerManager

Asked = TypeVar("Asked")


def served_name(args: ServerArgs) -> str:
    """Of the model, as clients know it."""
    assert args.model_dir is not None, "the launcher resolves model_dir"
    return args.model_name or args.model_dir.rstrip("/").rpartition("/")[2]


def client_of(request: Request, user: str | None) -> str:
    """Who asks, for fair sharing: the API key's number and the user that the request names."""
    return f"{request.scope.get('api_key', '')}/{user or ''}".strip("/")


class Endpoints:
    """name: of the model, as clients know it."""

    def __init__(self, manager: HttpServerManager, args: ServerArgs):
        assert args.model_dir is not None, "the launcher resolves model_dir"
        self._manager = manager
        self._args = args
        self.name = served_name(args)
        self._defaults = sampling_defaults(args.model_dir)

    def _check_model(self, asked: str | None) -> None:
        """Raises ModelNotFound for any other name; none at all means the one model."""
        if asked is not None and asked not in (self.name, self._args.model_dir):
            raise ModelNotFound(asked, self.name)


class GeneratingEndpoints(Endpoints, Generic[Asked]):
    """Answer requests that were read, `Asked`, whole or as a stream."""

    async def _respond(
        self, request: Request, asked: Asked, stream: bool | None, headers: dict[str, str] | None = None
    ) -> Response:
        if stream:
            return EventStream(self._events(asked), lambda error: self._error_event(problem_of(error)), headers)
        return JSON(await while_connected(request.receive, self._complete(asked)), headers=headers)

    @abstractmethod
    async def _complete(self, asked: Asked) -> Any:
        """The whole answer."""

    @abstractmethod
    def _events(self, asked: Asked) -> AsyncGenerator[bytes, None]:
        """The chunks of a stream."""

    @abstractmethod
    def _error_event(self, problem: Problem) -> bytes:
        """The last event of a stream that fails."""
