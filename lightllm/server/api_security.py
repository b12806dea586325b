"""Who may ask: API keys on every path but liveness."""

import base64
import hmac
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from lightllm.server.api_errors import Shape, error_response
from lightllm.server.httpserver.generation import RequestFailed

OPEN_PATHS = ("/liveness",)
WRONG_KEY = RequestFailed(
    401, "a valid API key is required: Authorization: Bearer KEY, or x-api-key: KEY", code="invalid_api_key"
)


class KeyGuard:
    """Lets requests through that bring one of the keys; all others get a 401 in their dialect's shape.

    A key comes as `Authorization: Bearer KEY`, as `x-api-key: KEY`, or, for browsers, as the password of
    `Authorization: Basic`. The scope of a request that passes says as `api_key` which key it was.
    """

    def __init__(self, app: ASGIApp, keys: list[str], shape_of: Callable[[str], Shape]):
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._shape_of = shape_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            number = self._number(Headers(scope=scope))
            if number is None:
                response = error_response(WRONG_KEY, self._shape_of(scope["path"]))
                return await response(scope, receive, send)
            scope["api_key"] = f"key{number}"
        await self._app(scope, receive, send)

    def _number(self, headers: Headers) -> int | None:
        """Which key it is; every key is compared, each in a time that does not tell where it differs."""
        offered = _offered(headers)
        equal = [hmac.compare_digest(offered, key) for key in self._keys]
        return equal.index(True) if True in equal else None


def _offered(headers: Headers) -> bytes:
    scheme, _, value = headers.get("authorization", "").partition(" ")
    value = value.strip()
    if scheme.lower() == "bearer":
        return value.encode("latin-1")  # the bytes that came
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).partition(b":")[2]
        except ValueError:
            return b""
    return headers.get("x-api-key", "").encode("latin-1")
