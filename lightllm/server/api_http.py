"""The process of one HTTP front: its routes, its listener, its part in the launcher's commands."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import uvicorn
import uvloop
from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from lightllm.server import api_anthropic, api_lightllm, api_models, api_openai, api_pages
from lightllm.server import api_anthropic_models as anthropic
from lightllm.server import api_openai_answers as openai
from lightllm.server import api_openai_models as openai_bodies
from lightllm.server import api_responses_models as responses
from lightllm.server import api_tgi as tgi
from lightllm.server.api_anthropic import MessagesApi
from lightllm.server.api_connection import Answering, Endpoint
from lightllm.server.api_endpoints import served_name
from lightllm.server.api_errors import Problem, Shape, error_response
from lightllm.server.api_lightllm import LightLLMApi
from lightllm.server.api_openai_chat import ChatApi
from lightllm.server.api_openai_completions import CompletionsApi
from lightllm.server.api_responses import ResponsesApi
from lightllm.server.api_security import KeyGuard
from lightllm.server.api_status import StatusApi
from lightllm.server.api_tgi import TgiApi
from lightllm.server.chat_format import ChatFormat
from lightllm.server.core.messages import EngineInfo
from lightllm.server.core.server_args import ServerArgs
from lightllm.server.httpserver.generation import RequestFailed
from lightllm.server.httpserver.manager import HttpServerManager
from lightllm.server.httpserver.metrics import HTTP
from lightllm.server.httpserver.tracing import Tracer
from lightllm.server.tokenizer import Tokenizer, load_tokenizer
from lightllm.utils.log_utils import init_logger, set_log_level
from lightllm.utils.net_utils import adopt
from lightllm.utils.process_utils import Child

logger = init_logger(__name__)

METRICS_FOLDER = "metrics"  # below the socket folder
KEEP_ALIVE = 75  # seconds that an idle connection stays open
FAILED_LINGER = 1.0  # seconds that a failed front answers 503 before it closes
CLOSE_TIMEOUT = 2.0  # seconds for the last bytes to be read, after every request has ended
SCHEMA = "#/components/schemas/{name}"


class Route(NamedTuple):
    """event: what a stream of the endpoint sends, where there is one. shape: of problems, if not that of the path.

    media: type of an answer that is not JSON.
    """

    path: str
    methods: tuple[str, ...]
    endpoint: Endpoint
    answer: type | None = None
    body: type | None = None
    event: type | None = None
    shape: Shape | None = None
    media: str | None = None

    @property
    def problem_shape(self) -> Shape:
        return self.shape or shape_of(self.path)


def routes(manager: HttpServerManager, args: ServerArgs, metrics: Path) -> list[Route]:
    """Every path that is served."""
    status = StatusApi(manager, args, metrics)
    own = LightLLMApi(manager, args)
    format = ChatFormat(manager.tokenizer, args)
    chat = ChatApi(manager, args, format)
    messages = MessagesApi(manager, args, format)
    both = ("GET", "POST")
    return [
        *_generate_routes(TgiApi(manager, args) if args.use_tgi_api else own),
        *(_profile_routes(status) if args.profile_dir else ()),
        Route("/tokens", both, own.tokens, api_models.TokensAnswer, api_models.TokensBody),
        Route("/token_load", ("GET",), status.token_load, api_models.TokenLoad),
        Route("/health", ("GET",), status.health, api_models.Health),
        Route("/healthz", ("GET",), status.health, api_models.Health),
        Route("/liveness", both, status.liveness, api_models.Status),
        Route("/readiness", both, status.readiness, api_models.Status),
        Route("/chat", ("GET",), api_pages.chat, media="text/html"),
        Route("/dashboard", ("GET",), api_pages.dashboard, media="text/html"),
        Route("/metrics", ("GET",), status.metrics, media="text/plain"),
        Route("/get_model_name", both, status.model_name, api_models.ModelName),
        Route("/get_server_info", both, status.server_info),
        Route("/v1/models", ("GET",), status.models, api_models.ModelList),
        Route("/v1/models/{name:path}", ("GET",), status.model, api_models.ModelCard),
        Route(
            "/v1/completions",
            ("POST",),
            CompletionsApi(manager, args).completions,
            openai.Completion,
            openai_bodies.CompletionBody,
        ),
        Route(
            "/v1/chat/completions",
            ("POST",),
            chat.answer,
            openai.ChatCompletion,
            openai_bodies.ChatBody,
            openai.ChatChunk,
        ),
        Route(
            "/v1/responses",
            ("POST",),
            ResponsesApi(manager, args, format).answer,
            responses.ResponseAnswer,
            responses.ResponsesBody,
            responses.ResponseEvent,
        ),
        Route("/v1/embeddings", ("POST",), status.embeddings),
        Route(
            "/v1/messages",
            ("POST",),
            messages.answer,
            anthropic.MessageAnswer,
            anthropic.MessagesBody,
            anthropic.MessageEvent,
        ),
        Route("/v1/messages/count_tokens", ("POST",), messages.count_tokens, anthropic.TokenCount, anthropic.CountBody),
    ]


def _generate_routes(api: LightLLMApi | TgiApi) -> list[Route]:
    post = ("POST",)
    if isinstance(api, TgiApi):
        kinds = (tgi.TgiAnswer, tgi.TgiBody, tgi.TgiEvent, tgi.told)
        ends = {"/generate": api.generate, "/generate_stream": api.generate_stream, "/": api.root}
        return [Route(path, post, endpoint, *kinds) for path, endpoint in ends.items()]
    answer, body, event = api_models.GenerateAnswer, api_models.GenerateBody, api_models.StreamEvent
    return [
        Route("/generate", post, api.generate, answer, body),
        Route("/generate_stream", post, api.generate_stream, None, body, event),
        Route("/", post, api.root, answer, api_models.RootBody, event),
    ]


def _profile_routes(api: StatusApi) -> list[Route]:
    ends = {"/start_profile": api.start_profile, "/stop_profile": api.stop_profile}
    return [Route(path, ("POST",), endpoint, api_models.Status) for path, endpoint in ends.items()]


def shape_of(path: str) -> Shape:
    """How the dialect that a path belongs to tells problems."""
    path = path.lstrip("/")
    if path.startswith("v1/messages"):
        return api_anthropic.told
    return api_openai.told if path.startswith("v1/") else api_lightllm.told


def build_app(manager: HttpServerManager, args: ServerArgs, metrics: Path) -> FastAPI:
    """metrics: folder in which the fronts of one server keep their counters; it need not exist for a single one."""
    app = FastAPI(title="LightLLM", redirect_slashes=False)
    table = routes(manager, args, metrics)
    for route in table:
        for method in route.methods:
            app.add_api_route(
                route.path,
                _answering(route.endpoint, route.path, route.problem_shape),
                methods=[method],
                response_model=None,
                operation_id=f"{method.lower()}_{route.path.strip('/').replace('/', '_') or 'root'}",
                openapi_extra=_described(route),
            )
        if "GET" in route.methods:  # load balancers like to ask for the head alone
            answer = _answering(route.endpoint, route.path, route.problem_shape)
            app.add_api_route(route.path, answer, methods=["HEAD"], response_model=None, include_in_schema=False)
    app.add_exception_handler(HTTPException, _on_http_error)
    if args.api_key:
        app.add_middleware(KeyGuard, keys=args.api_key, shape_of=shape_of)
    if args.allowed_origins:
        app.add_middleware(CORSMiddleware, allow_origins=args.allowed_origins, allow_methods=["*"], allow_headers=["*"])
    app.openapi = partial(_openapi, app, table)  # type: ignore[method-assign]
    return app


def _answering(endpoint: Endpoint, path: str, shape: Shape) -> Endpoint:
    def count(status: int) -> None:
        HTTP.labels(path, status).inc()

    async def answer(request: Request) -> Response:
        return Answering(endpoint, request, partial(error_response, shape=shape), count)

    return answer


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, status = request.url.path, error.status_code
    reason = f"there is no {path} here" if status == 404 else f"{path} does not take {request.method}"
    return error_response(RequestFailed(status, reason), shape_of(path))


def _described(route: Route) -> dict[str, Any]:
    def schema(kind: type) -> dict[str, Any]:
        return {"$ref": SCHEMA.format(name=kind.__name__)}

    def content(kind: type | None) -> dict[str, Any]:
        return {"application/json": {"schema": schema(kind)}} if kind else {}

    error = {"description": "An error", "content": content(_error_kind(route))}
    answers = {route.media: {}} if route.media else content(route.answer)
    if route.event:  # OpenAPI 3.2's way to describe the events of a stream
        data = {"type": "string", "contentMediaType": "application/json", "contentSchema": schema(route.event)}
        answers["text/event-stream"] = {"itemSchema": {"type": "object", "properties": {"data": data}}}
    answer = {"description": "OK", "content": answers}
    body: dict[str, Any] = {"requestBody": {"required": True, "content": content(route.body)}} if route.body else {}
    if "{name" in route.path:
        body["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    return body | {"responses": {"200": answer, "default": error}}


def _error_kind(route: Route) -> type:
    return type(route.problem_shape(Problem(400, "")))


def _openapi(app: FastAPI, table: list[Route]) -> dict[str, Any]:
    if app.openapi_schema is None:
        kinds = {k for route in table for k in (route.answer, route.body, route.event, _error_kind(route)) if k}
        _, components = msgspec.json.schema_components(
            sorted(kinds, key=lambda kind: kind.__name__), ref_template=SCHEMA
        )
        app.openapi_schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        app.openapi_schema.setdefault("components", {})["schemas"] = components
    return app.openapi_schema


class Listener(uvicorn.Server):
    """uvicorn without its signal handlers: the launcher's commands come through the control pipe."""

    def __init__(self, app: FastAPI, on_listening: Callable[[], None]):
        self._on_listening = on_listening
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                access_log=False,
                log_config=None,
                timeout_keep_alive=KEEP_ALIVE,
                server_header=False,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_listening()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def close(self, timeout: float) -> None:
        """No more connections; those open may finish their answer within `timeout` seconds, then `serve` returns."""
        self.config.timeout_graceful_shutdown = timeout  # type: ignore[assignment]
        self.should_exit = True


class Front:
    """Serves one loaded engine and obeys the launcher: serve, drain, failed."""

    def __init__(self, manager: HttpServerManager, app: FastAPI, listen_fd: int, on_listening: Callable[[], None]):
        self._manager = manager
        self._listener = Listener(app, on_listening)
        self._listen_fd = listen_fd

    async def run(self, commands: asyncio.Queue[dict[str, Any]]) -> None:
        """Returns when the listener has closed, or before it was opened at any other command than serve."""
        if "serve" not in await commands.get():
            return
        async with asyncio.TaskGroup() as tasks:
            receiving = tasks.create_task(self._manager.receive())
            obeying = tasks.create_task(self._obey(commands))
            await self._listener.serve(sockets=[adopt(self._listen_fd)])
            receiving.cancel()
            obeying.cancel()

    async def _obey(self, commands: asyncio.Queue[dict[str, Any]]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            match await commands.get():
                case {"drain": seconds}:
                    self._manager.refuse("the server is shutting down")
                    self._listener.close(seconds + CLOSE_TIMEOUT)
                    loop.call_later(seconds, self._manager.end_all, "the server shut down before the request ended")
                case {"failed": reason}:
                    self._manager.end_all(f"the engine failed: {reason}")
                    loop.call_later(FAILED_LINGER, self._listener.close, CLOSE_TIMEOUT)


async def _serve(child: Child, args: ServerArgs, tokenizer: Tokenizer) -> None:
    tracer = Tracer(args.otlp_traces_endpoint, served_name(args)) if args.otlp_traces_endpoint else None
    commands: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    asyncio.get_running_loop().add_reader(child.control_fd, lambda: commands.put_nowait(child.receive()))
    command = await commands.get()
    if "engine" in command:
        engine = EngineInfo(**command["engine"])
        socket_dir = child.config["socket_dir"]
        manager = HttpServerManager(child.config["index"], socket_dir, engine, tokenizer, args, tracer)
        child.ready()
        app = build_app(manager, args, Path(socket_dir, METRICS_FOLDER))
        await Front(manager, app, child.config["listen_fd"], child.ready).run(commands)
    if tracer is not None:
        await asyncio.to_thread(tracer.close)


def main(child: Child) -> None:
    """A front process: config keys `args`, `socket_dir`, `index`, `listen_fd`."""
    args = ServerArgs(**child.config["args"])
    set_log_level(args.log_level)
    assert args.model_dir is not None, "the launcher resolves model_dir"
    uvloop.run(_serve(child, args, load_tokenizer(args.model_dir, args.trust_remote_code)))
