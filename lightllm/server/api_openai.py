"""What the endpoints of the OpenAI dialect share: its errors, its streams, the model that a request names."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lightllm.server.api_connection import JSON, encode_json
from lightllm.server.api_errors import ModelNotFound, Problem
from lightllm.server.api_models import ModelCard, ModelList
from lightllm.server.api_openai_models import CompletionDetails, OpenAIError, OpenAIErrorDetail, TokenDetails, Usage
from lightllm.server.core.sampling_params import InvalidParameter
from lightllm.server.core.server_args import ServerArgs
from lightllm.server.generation_defaults import sampling_defaults
from lightllm.server.httpserver.generation import Generation, Token
from lightllm.server.httpserver.manager import HttpServerManager

DONE = b"data: [DONE]\n\n"
NAMES = {
    "stop_sequences": "stop",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "add_spaces_between_special_tokens": "spaces_between_special_tokens",
}
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


def told(problem: Problem) -> OpenAIError:
    """A problem in this dialect's shape."""
    kind = KINDS.get(problem.status, "invalid_request_error")
    return OpenAIError(OpenAIErrorDetail(problem.message, kind, problem.param, problem.code))


def event(value: Any) -> bytes:
    return b"data: " + encode_json(value) + b"\n\n"


class OpenAIEndpoints:
    """The model under its name, and what is the same for all requests."""

    def __init__(self, manager: HttpServerManager, args: ServerArgs):
        assert args.model_dir is not None, "the launcher resolves model_dir"
        self._manager = manager
        self._args = args
        self.name = args.model_name or args.model_dir.rstrip("/").rpartition("/")[2]
        self._created = int(time.time())
        self._defaults = sampling_defaults(args.model_dir)

    async def models(self, request: Request) -> Response:
        return JSON(ModelList([self._card()]))

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSON(self._card())

    async def embeddings(self, request: Request) -> Response:
        raise InvalidParameter("model", f"{self.name} generates text; it has no embeddings")

    def _card(self) -> ModelCard:
        return ModelCard(self.name, self._created, self._manager.limits.max_total_tokens)

    def _check_model(self, asked: str | None) -> None:
        """Raises ModelNotFound for any other name; none at all means the one model."""
        if asked is not None and asked not in (self.name, self._args.model_dir):
            raise ModelNotFound(asked, self.name)

    def _client(self, request: Request, user: str | None) -> str:
        """Who asks, for fair sharing: the API key's number and the `user` field."""
        return f"{request.scope.get('api_key', '')}/{user or ''}".strip("/")


def new_id(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(12)}"


def usage(generations: Sequence[Generation], completion_tokens: int, reasoning_tokens: int | None = None) -> Usage:
    """reasoning_tokens: of the completion; None for models without thoughts."""
    prompt_tokens = sum(len(generation.prompt_ids) for generation in generations)
    return Usage(
        prompt_tokens,
        completion_tokens,
        prompt_tokens + completion_tokens,
        TokenDetails(sum(generation.cached_tokens for generation in generations)),
        None if reasoning_tokens is None else CompletionDetails(reasoning_tokens),
    )


async def merged(generations: Sequence[Generation]) -> AsyncIterator[tuple[int, list[Token]]]:
    """(number of the generation, its next tokens) of several, as they come; the first failure is raised."""
    if len(generations) == 1:
        async for tokens in generations[0]:
            yield 0, tokens
        return
    queue: asyncio.Queue[tuple[int, list[Token] | Exception | None]] = asyncio.Queue()

    async def read(number: int, generation: Generation) -> None:
        try:
            async for tokens in generation:
                queue.put_nowait((number, tokens))
            queue.put_nowait((number, None))
        except Exception as error:
            queue.put_nowait((number, error))

    readers = [asyncio.create_task(read(*numbered)) for numbered in enumerate(generations)]
    try:
        running = len(readers)
        while running:
            number, news = await queue.get()
            if isinstance(news, Exception):
                raise news
            if news is None:
                running -= 1
            else:
                yield number, news
    finally:
        for reader in readers:
            reader.cancel()
