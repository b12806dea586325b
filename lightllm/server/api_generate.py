"""/generate, /generate_stream and / continue one prompt, in LightLLM's shapes or text-generation-inference's."""

from abc import abstractmethod
from typing import Any, ClassVar, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lightllm.server.api_connection import read_object
from lightllm.server.api_endpoints import GeneratingEndpoints, client_of
from lightllm.server.core.sampling_params import InvalidParameter


class Asked(NamedTuple):
    """A body that was read. client: who asks, for fair sharing."""

    body: Any
    client: str


class GenerateEndpoints(GeneratingEndpoints[Asked]):
    """root_kind: of a body whose `stream` says how it is answered."""

    root_kind: ClassVar[type[Any]]

    async def generate(self, request: Request) -> Response:
        return await self._respond(request, await self._read(request, self.kind), stream=False)

    async def generate_stream(self, request: Request) -> Response:
        return await self._respond(request, await self._read(request, self.kind), stream=True)

    async def root(self, request: Request) -> Response:
        asked = await self._read(request, self.root_kind)
        return await self._respond(request, asked, asked.body.stream)

    async def _read(self, request: Request, kind: type[Any]) -> Asked:
        fields = await read_object(request, self._args.max_body_size, self._manager.limits.max_total_tokens)
        try:
            body = msgspec.convert(self._given(fields), kind, str_keys=True)
        except msgspec.ValidationError as error:
            raise InvalidParameter.of(error) from None
        return Asked(body, client_of(request, self._user(body)))

    @abstractmethod
    def _given(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields of a body without those whose null means not given."""

    def _user(self, body: Any) -> str | None:
        """Whom the body names as the one who asks."""
        return None
