"""/generate, /generate_stream and / continue one prompt, in LightLLM's shapes or text-generation-inference's."""

from typing import Any, ClassVar, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lightllm.server.api_bodies import without_nulls
from lightllm.server.api_connection import read_object
from lightllm.server.api_endpoints import GeneratingEndpoints, client_of
from lightllm.server.core.sampling_params import InvalidParameter


class Asked(NamedTuple):
    """A body that was read. client: who asks, for fair sharing."""

    body: Any
    client: str


class GenerateEndpoints(GeneratingEndpoints[Asked]):
    """Reads bodies in which null is not given. root_kind: of one whose `stream` says how it is answered."""

    root_kind: ClassVar[type[Any]]

    async def generate(self, request: Request) -> Response:
        return await self._respond(request, await self._read(request, self.kind), stream=False)

    async def generate_stream(self, request: Request) -> Response:
        return await self._respond(request, await self._read(request, self.kind), stream=True)

    async def root(self, request: Request) -> Response:
        asked = await self._read(request, self.root_kind)
        return await self._respond(request, asked, asked.body.stream)

    async def _read(self, request: Request, kind: type[Any]) -> Asked:
        limit = self._manager.limits.max_total_tokens
        fields = without_nulls(await read_object(request, self._args.max_body_size, limit))
        if isinstance(parameters := fields.get("parameters"), dict):
            fields["parameters"] = without_nulls(parameters)
        try:
            body = msgspec.convert(fields, kind, str_keys=True)
        except msgspec.ValidationError as error:
            raise InvalidParameter.of(error) from None
        return Asked(body, client_of(request, self._user(body)))

    def _user(self, body: Any) -> str | None:
        """Whom the body names as the one who asks."""
        return None
