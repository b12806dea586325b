"""What all dialects share that speak of models by name, and the paths that tell of the model."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response

from lightllm.server.api_connection import JSON
from lightllm.server.api_errors import ModelNotFound
from lightllm.server.api_models import ModelCard, ModelList
from lightllm.server.core.sampling_params import InvalidParameter
from lightllm.server.core.server_args import ServerArgs
from lightllm.server.generation_defaults import sampling_defaults
from lightllm.server.httpserver.manager import HttpServerManager


def served_name(args: ServerArgs) -> str:
    """Of the model, as clients know it."""
    assert args.model_dir is not None, "the launcher resolves model_dir"
    return args.model_name or args.model_dir.rstrip("/").rpartition("/")[2]


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


def client_of(request: Request, user: str | None) -> str:
    """Who asks, for fair sharing: the API key's number and the user that the request names."""
    return f"{request.scope.get('api_key', '')}/{user or ''}".strip("/")


class ModelsApi(Endpoints):
    """/v1/models, and what this server has no model for."""

    def __init__(self, manager: HttpServerManager, args: ServerArgs):
        super().__init__(manager, args)
        self._created = int(time.time())

    async def models(self, request: Request) -> Response:
        return JSON(ModelList([self._card()]))

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSON(self._card())

    async def embeddings(self, request: Request) -> Response:
        raise InvalidParameter("model", f"{self.name} generates text; it has no embeddings")

    def _card(self) -> ModelCard:
        return ModelCard(self.name, self._created, self._manager.limits.max_total_tokens)
