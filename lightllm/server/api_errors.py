"""What can go wrong with a request, and its HTTP answer; the body has the shape of the request's dialect."""

from collections.abc import Callable
from typing import Any

from starlette.responses import Response

from lightllm.server.api_connection import JSON, LingeringClose
from lightllm.server.core.sampling_params import InvalidParameter
from lightllm.server.httpserver.generation import RequestFailed
from lightllm.utils.log_utils import init_logger

logger = init_logger(__name__)
MAX_TOLD = 1000  # characters of a reason
RETRY_AFTER = "1"  # seconds; a queue place is free after a request's end, and requests end all the time
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}

Shape = Callable[[RequestFailed], Any]
"""How a dialect tells a problem."""


def kind_of(problem: RequestFailed) -> str:
    """The type of an error in the words of OpenAI."""
    return KINDS.get(problem.status, "invalid_request_error")


def problem_of(error: Exception) -> RequestFailed:
    """What is told of it, which is short, whatever of a request it quotes."""
    problem = _cause_of(error)
    return RequestFailed(problem.status, _short(problem.reason), problem.param and _short(problem.param), problem.code)


def _short(text: str) -> str:
    """Its two ends if it is long."""
    return text if len(text) <= MAX_TOLD else f"{text[: MAX_TOLD // 2]} ... {text[-MAX_TOLD // 2 :]}"


def _cause_of(error: Exception) -> RequestFailed:
    """An unforeseen error is logged and told as such; its text stays here."""
    match error:
        case RequestFailed():
            return error
        case InvalidParameter():
            return RequestFailed(400, str(error), error.field, error.code)
        case RecursionError():
            return RequestFailed(400, "the body is nested too deeply")
    logger.error("a request failed", exc_info=error)
    return RequestFailed(500, "internal error")


def error_response(error: Exception, shape: Shape) -> Response:
    problem = problem_of(error)
    body = shape(problem)
    if problem.status == 413:
        return LingeringClose(body, status_code=problem.status, headers={"connection": "close"})
    headers = {
        401: {"www-authenticate": 'Bearer, Basic realm="LightLLM"'},
        429: {"retry-after": RETRY_AFTER},
        408: {"connection": "close"},
        503: {"connection": "close"},
    }
    return JSON(body, status_code=problem.status, headers=headers.get(problem.status))
