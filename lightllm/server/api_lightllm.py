"""The LightLLM dialect: /generate, /generate_stream, /, /tokens and what tells about the server."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lightllm.server.api_connection import JSON, EventStream, encode_json, read_object, while_connected
from lightllm.server.api_endpoints import client_of, served_name
from lightllm.server.api_errors import Problem, events_until_error
from lightllm.server.api_models import (
    ErrorAnswer,
    ErrorDetail,
    GenerateAnswer,
    GenerateBody,
    Health,
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
from lightllm.server.httpserver.generation import Generation, Token
from lightllm.server.httpserver.manager import HttpServerManager
from lightllm.server.httpserver.metrics import CONTENT_TYPE, metrics_page

Body = TypeVar("Body", GenerateBody, RootBody, TokensBody)


class LightLLMApi:
    """The endpoints; each takes a Request and gives a Response."""

    def __init__(self, manager: HttpServerManager, args: ServerArgs, metrics: Path):
        self._manager = manager
        self._metrics = metrics
        self._args = args
        self._name = served_name(args)

    async def generate(self, request: Request) -> Response:
        return await self._answer(request, await self._body(request, GenerateBody))

    async def generate_stream(self, request: Request) -> Response:
        return self._stream(request, await self._body(request, GenerateBody))

    async def root(self, request: Request) -> Response:
        body = await self._body(request, RootBody)
        return self._stream(request, body) if body.stream else await self._answer(request, body)

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

    async def model_name(self, request: Request) -> Response:
        return JSON(ModelName(self._name))

    async def server_info(self, request: Request) -> Response:
        """All flags as they are in force but for the keys, and `engine`: what the loaded model can do."""
        return JSON(asdict(replace(self._args, api_key=[])) | {"engine": msgspec.structs.asdict(self._manager.engine)})

    async def _body(self, request: Request, kind: type[Body]) -> Body:
        fields = await read_object(request, self._args.max_body_size, self._manager.limits.max_total_tokens)
        if isinstance(fields.get("parameters"), dict):
            fields["parameters"] = {name: value for name, value in fields["parameters"].items() if value is not None}
        try:
            return msgspec.convert(fields, kind, str_keys=True)
        except msgspec.ValidationError as error:
            raise InvalidParameter.of(error) from None

    async def _start(self, request: Request, body: GenerateBody) -> closing[Generation]:
        if (media := body.multimodal_params) and (media.images or media.audios):
            raise InvalidParameter("multimodal_params", "this model reads text only")
        asked = body.parameters
        client = client_of(request, asked.user)
        return closing(
            await self._manager.generate(body.inputs, asked.sampling(), client=client, priority=asked.priority)
        )

    async def _answer(self, request: Request, body: GenerateBody) -> Response:
        return JSON(await while_connected(request.receive, self._complete(request, body)))

    async def _complete(self, request: Request, body: GenerateBody) -> GenerateAnswer:
        with await self._start(request, body) as generation:
            outputs: list[list[Token]] = [[] for _ in range(generation.sampling.n or 1)]
            async for tokens in generation:
                for token in tokens:
                    outputs[token.sample].append(token)
        prompt_logprobs = await generation.prompt_logprobs()
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
            answer.prompt_logprobs = prompt_logprobs
        return answer

    def _stream(self, request: Request, body: GenerateBody) -> Response:
        if (body.parameters.n or body.parameters.best_of or 1) > 1:
            raise InvalidParameter("n", "a stream holds one output; use /generate for more")
        return EventStream(events_until_error(self._events(request, body), lambda problem: _event(told(problem))))

    async def _events(self, request: Request, body: GenerateBody) -> AsyncGenerator[bytes, None]:
        """One event per token, those that are there at once in one chunk."""
        with await self._start(request, body) as generation:
            async for tokens in generation:
                yield b"".join([_event(self._stream_event(token, generation)) for token in tokens])

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


def told(problem: Problem) -> ErrorAnswer:
    """A problem in this dialect's shape."""
    kinds = {
        401: "authentication_error",
        429: "rate_limit_error",
        500: "server_error",
        503: "service_unavailable_error",
    }
    kind = kinds.get(problem.status, "invalid_request_error")
    return ErrorAnswer(ErrorDetail(problem.message, kind, problem.param, problem.status))


def _event(value: Any) -> bytes:
    return b"data: " + encode_json(value) + b"\n\n"


def _one_or_all(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values
