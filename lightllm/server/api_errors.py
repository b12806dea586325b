"""What can go wrong with a request, and its HTTP answer; the body has the shape of the request's dialect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from starlette.responses import Response

from lightllm.server.api_connection import JSON, BodyTooLarge, LingeringClose
from lightllm.server.core.sampling_params import InvalidParameter
from lightllm.server.httpserver.generation import RequestFailed
from lightllm.utils.log_utils import init_logger

logger = init_logger(__name__)
RETRY_AFTER = "1"  # seconds; a queue place is free after a request's end, and requests end all the time


class Problem(msgspec.Struct, frozen=True):
    """status: of HTTP. param: the field at fault. code: a word for programs that some dialects pass on."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None


class ModelNotFound(RequestFailed):
    def __init__(self, asked: str, served: str):
        super().__init__(404, f"the model {asked!r} is not served here; the model is {served!r}")


class WrongKey(RequestFailed):
    def __init__(self) -> None:
        super().__init__(401, "a valid API key is required: Authorization: Bearer KEY, or x-api-key: KEY")


Shape = Callable[[Problem], Any]
"""How a dialect tells a problem."""


def problem_of(error: Exception) -> Problem:
    """An unforeseen error is logged and told as such; its text stays here."""
    match error:
        case InvalidParameter():
            return Problem(400, str(error), error.field)
        case ModelNotFound():
            return Problem(404, error.reason, "model", "model_not_found")
        case WrongKey():
            return Problem(401, error.reason, None, "invalid_api_key")
        case RequestFailed():
            return Problem(error.status, error.reason)
    logger.error("a request failed", exc_info=error)
    return Problem(500, "internal error")


def error_response(error: Exception, shape: Shape) -> Response:
    problem = problem_of(error)
    body = shape(problem)
    if isinstance(error, BodyTooLarge):
        return LingeringClose(body, status_code=problem.status, headers={"connection": "close"})
    headers = {
        401: {"www-authenticate": 'Bearer, Basic realm="LightLLM"'},
        429: {"retry-after": RETRY_AFTER},
        503: {"connection": "close"},
    }
    return JSON(body, status_code=problem.status, headers=headers.get(problem.status))
