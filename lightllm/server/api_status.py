"""What tells of the server and its model, in no dialect: health, load, metrics, the names of models, profiles."""

import time
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lightllm.server.api_connection import JSON
from lightllm.server.api_endpoints import Endpoints
from lightllm.server.api_models import Health, ModelCard, ModelList, ModelName, Status, TokenLoad
from lightllm.server.core.sampling_params import InvalidParameter
from lightllm.server.core.server_args import ServerArgs
from lightllm.server.httpserver.manager import HttpServerManager
from lightllm.server.httpserver.metrics import CONTENT_TYPE, metrics_page


class StatusApi(Endpoints):
    """metrics: folder in which the fronts of one server keep their counters."""

    def __init__(self, manager: HttpServerManager, args: ServerArgs, metrics: Path):
        super().__init__(manager, args)
        self._metrics = metrics
        self._created = int(time.time())

    async def token_load(self, request: Request) -> Response:
        load = (await self._manager.load()).load
        capacity = self._manager.engine.max_total_token_num
        peak = load.predicted_peak / capacity
        return JSON(
            TokenLoad(
                current_load=load.used_tokens / capacity,
                logical_max_load=peak,
                dynamic_max_load=peak,
                max_total_token_num=capacity,
                **msgspec.structs.asdict(load),
            )
        )

    async def metrics(self, request: Request) -> Response:
        """For Prometheus: of all fronts and of the router."""
        load = (await self._manager.load()).load
        page = metrics_page(self._metrics, load, self._manager.engine.max_total_token_num)
        return Response(page, media_type=CONTENT_TYPE)

    async def health(self, request: Request) -> Response:
        """Passive: no request is sent; bad when closing, or when the engine is silent for long with work in flight."""
        return JSON(Health("Ok")) if await self._manager.healthy() else JSON(Health("Error"), status_code=503)

    async def liveness(self, request: Request) -> Response:
        return JSON(Status("ok"))

    async def readiness(self, request: Request) -> Response:
        return JSON(Status("ok")) if self._manager.accepting else JSON(Status("closing"), status_code=503)

    async def start_profile(self, request: Request) -> Response:
        self._manager.profile(True)
        return JSON(Status("ok"))

    async def stop_profile(self, request: Request) -> Response:
        self._manager.profile(False)
        return JSON(Status("ok"))

    async def server_info(self, request: Request) -> Response:
        """All flags as they are in force but for the keys, and `engine`: what the loaded model can do."""
        return JSON(asdict(replace(self._args, api_key=[])) | {"engine": msgspec.structs.asdict(self._manager.engine)})

    async def model_name(self, request: Request) -> Response:
        return JSON(ModelName(self.name))

    async def models(self, request: Request) -> Response:
        return JSON(ModelList([self._card()], self.name, self.name))

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSON(self._card())

    async def embeddings(self, request: Request) -> Response:
        raise InvalidParameter("model", f"{self.name} generates text; it has no embeddings")

    def _card(self) -> ModelCard:
        created = datetime.fromtimestamp(self._created, UTC).isoformat()
        return ModelCard(self.name, self._created, self._manager.limits.max_total_tokens, created, self.name)
