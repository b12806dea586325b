"""What the endpoints of all dialects share: the model that they answer for, and how an answer gets to its client."""

import hashlib
from abc import abstractmethod
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from lightllm.common.basemodel.config_reader import ConfigError, read_json
from lightllm.server.api_connection import JSON, EventStream, while_connected
from lightllm.server.api_errors import problem_of
from lightllm.server.core.sampling_params import InvalidParameter, RequestLimits, SamplingParams
from lightllm.server.core.server_args import ServerArgs
from lightllm.server.httpserver.generation import RequestFailed
from lightllm.server.httpserver.manager import HttpServerManager

MAX_USER = 256  # characters of a name that messages, logs and the scheduler carry

Asked = TypeVar("Asked")


def client_of(request: Request, user: str | None) -> str:
    """Who asks, for fair sharing: the API key's number and the user whom the request names; a digest of long names."""
    user = user or ""
    if len(user) > MAX_USER:
        user = hashlib.sha256(user.encode()).hexdigest()
    return f"{request.scope.get('api_key', '')}/{user}".strip("/")


class Endpoints:
    """name: of the model, as clients know it."""

    def __init__(self, manager: HttpServerManager, args: ServerArgs):
        assert args.model_dir is not None and args.model_name is not None, "the launcher resolves both"
        self._manager = manager
        self._args = args
        self.name = args.model_name
        self._defaults = _sampling_defaults(Path(args.model_dir))

    def _check_model(self, asked: str | None) -> None:
        """Raises RequestFailed 404 for any other name; none means the one model, as any does to TGI's clients."""
        if asked is not None and not self._args.use_tgi_api and asked not in (self.name, self._args.model_dir):
            reason = f"the model {asked!r} is not served here; the model is {self.name!r}"
            raise RequestFailed(404, reason, "model", "model_not_found")


def _sampling_defaults(model_dir: Path) -> dict[str, Any]:
    """What the checkpoint recommends, for dialects whose users expect it; else a temperature of 1.

    Raises ConfigError for a recommendation that would be refused in a request.
    """
    path = model_dir / "generation_config.json"
    config = read_json(path) if path.exists() else {}
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    found = {"temperature": 1.0} | {name: config[name] for name in names if config.get(name) is not None}
    try:
        SamplingParams(**found).resolve(RequestLimits(max_total_tokens=2, vocab_size=1), prompt_len=1)
    except InvalidParameter as error:
        raise ConfigError(f"{path}: {error}") from None
    return found


class GeneratingEndpoints(Endpoints, Generic[Asked]):
    """Answer requests that were read, `Asked`, whole or as a stream.

    kind: of the body. answers, events: what comes back, whole and as a stream.
    """

    kind: ClassVar[type[Any]]
    answers: ClassVar[type[Any]]
    events: ClassVar[type[Any]]

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
    def _error_event(self, problem: RequestFailed) -> bytes:
        """The last event of a stream that fails."""
