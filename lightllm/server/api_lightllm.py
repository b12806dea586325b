"""The LightLLM dialect: /generate, /generate_stream, /, /tokens and what tells about the server."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import closing
from dataclasses import asdict
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lightllm.server.api_connection import (
    JSON,
    BodyTooLarge,
    EventStream,
    LingeringClose,
    encode_json,
    parse_object,
    read_body,
    while_connected,
)
from lightllm.server.api_models import (
    ErrorAnswer,
    ErrorDetail,
    GenerateAnswer,
    GenerateBody,
    Health,
    ModelCard,
    ModelList,
    ModelName,
    RootBody,
    Status,
    StreamEvent,
    TokenDetail,
    TokenLoad,
    TokensAnswer,
    TokensBody,
    TopToken,
)
from lightllm.server.core.sampling_params import InvalidParameter
from lightllm.server.core.server_args import ServerArgs
from lightllm.server.httpserver.generation import Generation, RequestFailed, Token
from lightllm.server.httpserver.manager import HttpServerManager
from lightllm.utils.log_utils import init_logger

logger = init_logger(__name__)
RETRY_AFTER = "1"  # seconds; a queue place is free after a request's end, and requests end all the time
Body = TypeVar("Body", GenerateBody, RootBody, TokensBody)


class LightLLMApi:
    """The endpoints; each takes a Request and gives a Response."""

    def __init__(self, manager: HttpServerManager, args: ServerArgs):
        self._manager = manager
        self._args = args
        self._name = args.model_name or (args.model_dir or "").rstrip("/").rpartition("/")[2]
        self._created = int(time.time())

    async def generate(self, request: Request) -> Response:
        return await self._answer(request, await self._body(request, GenerateBody))

    async def generate_stream(self, request: Request) -> Response:
        return self._stream(await self._body(request, GenerateBody))

    async def root(self, request: Request) -> Response:
        body = await self._body(request, RootBody)
        return self._stream(body) if body.stream else await self._answer(request, body)

    async def tokens(self, request: Request) -> Response:
        body = await self._body(request, TokensBody)
        special = body.parameters is None or body.parameters.add_special_tokens
        ids = await while_connected(request.receive, self._manager.tokenize(body.text, special, "text"))
        return JSON(TokensAnswer(len(ids)))

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

    async def health(self, request: Request) -> Response:
        """Passive: no request is sent; bad when closing, or when the engine is silent for long with work in flight."""
        return JSON(Health("Ok")) if self._manager.healthy else JSON(Health("Error"), status_code=503)

    async def liveness(self, request: Request) -> Response:
        return JSON(Status("ok"))

    async def readiness(self, request: Request) -> Response:
        return JSON(Status("ok")) if self._manager.accepting else JSON(Status("closing"), status_code=503)

    async def model_name(self, request: Request) -> Response:
        return JSON(ModelName(self._name))

    async def server_info(self, request: Request) -> Response:
        """All flags as they are in force, and `engine`: what the loaded model can do."""
        return JSON(asdict(self._args) | {"engine": msgspec.structs.asdict(self._manager.engine)})

    async def models(self, request: Request) -> Response:
        return JSON(ModelList([ModelCard(self._name, self._created, self._manager.limits.max_total_tokens)]))

    async def _body(self, request: Request, kind: type[Body]) -> Body:
        body = await read_body(request, self._args.max_body_size << 20)
        content_type = request.headers.get("content-type", "")
        fields = parse_object(body, content_type, self._manager.limits.max_total_tokens)
        if isinstance(fields.get("parameters"), dict):
            fields["parameters"] = {name: value for name, value in fields["parameters"].items() if value is not None}
        try:
            return msgspec.convert(fields, kind, str_keys=True)
        except msgspec.ValidationError as error:
            raise InvalidParameter.of(error) from None

    async def _start(self, body: GenerateBody) -> closing[Generation]:
        if (media := body.multimodal_params) and (media.images or media.audios):
            raise InvalidParameter("multimodal_params", "this model reads text only")
        return closing(await self._manager.generate(body.inputs, body.parameters.sampling()))

    async def _answer(self, request: Request, body: GenerateBody) -> Response:
        return JSON(await while_connected(request.receive, self._complete(body)))

    async def _complete(self, body: GenerateBody) -> GenerateAnswer:
        with await self._start(body) as generation:
            outputs: list[list[Token]] = [[] for _ in range(generation.sampling.n or 1)]
            async for tokens in generation:
                for token in tokens:
                    outputs[token.sample].append(token)
        answer = GenerateAnswer(
            generated_text=["".join([token.text for token in output]) for output in outputs],
            count_output_tokens=_one_or_all([len(output) for output in outputs]),
            finish_reason=_one_or_all([output[-1].finish.reason or "" for output in outputs]),
            prompt_tokens=len(generation.prompt_ids),
            cached_tokens=generation.cached_tokens,
            logprobs=_one_or_all([[token.logprob for token in output] for output in outputs]),
        )
        if generation.sampling.logprobs:
            answer.top_logprobs = _one_or_all([[self._top(token) or [] for token in output] for output in outputs])
        if body.parameters.return_details:
            answer.tokens = _one_or_all([[self._detail(t, generation) for t in output] for output in outputs])
        if generation.sampling.prompt_logprobs is not None:
            answer.prompt_token_ids = list(generation.prompt_ids)
            answer.prompt_logprobs = generation.prompt_logprobs()
        return answer

    def _stream(self, body: GenerateBody) -> Response:
        if (body.parameters.n or body.parameters.best_of or 1) > 1:
            raise InvalidParameter("n", "a stream holds one output; use /generate for more")
        return EventStream(self._events(body))

    async def _events(self, body: GenerateBody) -> AsyncGenerator[bytes, None]:
        """One event per token, those that are there at once in one chunk."""
        started = False
        try:
            with await self._start(body) as generation:
                async for tokens in generation:
                    yield b"".join([_event(self._stream_event(token, generation)) for token in tokens])
                    started = True
        except RequestFailed as failure:
            if not started:
                raise
            yield _event(_error_answer(failure.status, failure.reason))
        except Exception:
            if not started:
                raise
            logger.exception("a stream failed")
            yield _event(_error_answer(500, "internal error"))

    def _stream_event(self, token: Token, generation: Generation) -> StreamEvent:
        detail = self._detail(token, generation)
        return StreamEvent(detail, finished=bool(token.finish), finish_reason=token.finish.reason)

    def _detail(self, token: Token, generation: Generation) -> TokenDetail:
        return TokenDetail(
            id=token.id,
            text=token.text,
            logprob=token.logprob,
            special=self._manager.tokenizer.is_special(token.id),
            count_output_tokens=token.count,
            prompt_tokens=len(generation.prompt_ids),
            cached_tokens=generation.cached_tokens,
            logprobs=self._top(token),
        )

    def _top(self, token: Token) -> list[TopToken] | None:
        if token.top is None:
            return None
        text = self._manager.tokenizer.token_text
        return [TopToken(token_id, text(token_id), logprob) for token_id, logprob in token.top]


def error_response(error: Exception) -> Response:
    """What went wrong, in this dialect's shape."""
    match error:
        case InvalidParameter():
            return JSON(_error_answer(400, str(error), error.field), status_code=400)
        case BodyTooLarge():
            answer = _error_answer(error.status, error.reason)
            return LingeringClose(answer, status_code=error.status, headers={"connection": "close"})
        case RequestFailed():
            headers = {429: {"retry-after": RETRY_AFTER}, 503: {"connection": "close"}}.get(error.status)
            answer = _error_answer(error.status, error.reason)
            return JSON(answer, status_code=error.status, headers=headers)
        case _:
            logger.error("a request failed", exc_info=error)
            return JSON(_error_answer(500, "internal error"), status_code=500)


def not_served(status: int, method: str, path: str) -> Response:
    """A path or method that no endpoint has: 404 or 405."""
    reason = f"there is no {path} here" if status == 404 else f"{path} does not take {method}"
    return JSON(_error_answer(status, reason), status_code=status)


def _error_answer(status: int, message: str, param: str | None = None) -> ErrorAnswer:
    kinds = {429: "rate_limit_error", 500: "server_error", 503: "service_unavailable_error"}
    return ErrorAnswer(ErrorDetail(message, kinds.get(status, "invalid_request_error"), param, status))


def _event(value: Any) -> bytes:
    return b"data: " + encode_json(value) + b"\n\n"


def _one_or_all(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values
