"""The process of one HTTP front: its routes, its listener, its part in the launcher's commands."""

import asyncio
import resource
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

from lightllm import __version__
from lightllm.server import api_anthropic, api_lightllm, api_models, api_openai, api_pages, api_tgi
from lightllm.server.api_anthropic import MessagesApi
from lightllm.server.api_anthropic_models import CountBody, TokenCount
from lightllm.server.api_chat import ChatEndpoints
from lightllm.server.api_connection import Answering, Endpoint
from lightllm.server.api_errors import Shape, error_response
from lightllm.server.api_generate import GenerateEndpoints
from lightllm.server.api_lightllm import LightLLMApi
from lightllm.server.api_openai_chat import ChatApi
from lightllm.server.api_openai_completions import CompletionsApi
from lightllm.server.api_protocol import BoundedProtocol
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
    """answer, event: what comes back, whole and as a stream. shape: of problems, if not that of the path.

    media: type of an answer that is not JSON.
    """

    path: str
    methods: tuple[str, ...]
    endpoint: Endpoint
    body: type | None = None
    answer: type | None = None
    event: type | None = None
    shape: Shape | None = None
    media: str = "application/json"

    @property
    def problem_shape(self) -> Shape:
        return self.shape or shape_of(self.path)


def routes(manager: HttpServerManager, args: ServerArgs, metrics: Path) -> list[Route]:
    """Every path that is served."""
    status = StatusApi(manager, args, metrics)
    own = LightLLMApi(manager, args)
    format = ChatFormat(manager.tokenizer, args)
    messages = MessagesApi(manager, args, format)
    get, post, both = ("GET",), ("POST",), ("GET", "POST")
    profile = [
        Route("/start_profile", post, status.start_profile, answer=api_models.Status),
        Route("/stop_profile", post, status.stop_profile, answer=api_models.Status),
    ]
    return [
        *(_generate_routes(TgiApi(manager, args), api_tgi.error_body) if args.use_tgi_api else _generate_routes(own)),
        *(profile if args.profile_dir else ()),
        Route("/tokens", both, own.tokens, api_models.TokensBody, api_models.TokensAnswer),
        Route("/token_load", get, status.token_load, answer=api_models.TokenLoad),
        Route("/health", get, status.health, answer=api_models.Health),
        Route("/healthz", get, status.health, answer=api_models.Health),
        Route("/liveness", both, status.liveness, answer=api_models.Status),
        Route("/readiness", both, status.readiness, answer=api_models.Status),
        Route("/chat", get, api_pages.chat, media="text/html"),
        Route("/dashboard", get, api_pages.dashboard, media="text/html"),
        Route("/metrics", get, status.metrics, media="text/plain"),
        Route("/get_model_name", both, status.model_name, answer=api_models.ModelName),
        Route("/get_server_info", both, status.server_info),
        Route("/v1/models", get, status.models, answer=api_models.ModelList),
        Route("/v1/models/{name:path}", get, status.model, answer=api_models.ModelCard),
        _dialect_route("/v1/completions", CompletionsApi(manager, args)),
        _dialect_route("/v1/chat/completions", ChatApi(manager, args, format)),
        _dialect_route("/v1/responses", ResponsesApi(manager, args, format)),
        Route("/v1/embeddings", post, status.embeddings),
        _dialect_route("/v1/messages", messages),
        Route("/v1/messages/count_tokens", post, messages.count_tokens, CountBody, TokenCount),
    ]


def _generate_routes(api: GenerateEndpoints, shape: Shape | None = None) -> list[Route]:
    post = ("POST",)
    return [
        Route("/generate", post, api.generate, api.kind, api.answers, shape=shape),
        Route("/generate_stream", post, api.generate_stream, api.kind, None, api.events, shape=shape),
        Route("/", post, api.root, api.root_kind, api.answers, api.events, shape=shape),
    ]


def _dialect_route(path: str, api: CompletionsApi | ChatEndpoints) -> Route:
    return Route(path, ("POST",), api.answer, api.kind, api.answers, api.events)


def shape_of(path: str) -> Shape:
    """How the dialect that a path belongs to tells problems."""
    path = path.lstrip("/")
    if path.startswith("v1/messages"):
        return api_anthropic.error_body
    return api_openai.error_body if path.startswith("v1/") else api_lightllm.error_body


def build_app(manager: HttpServerManager, args: ServerArgs, metrics: Path) -> FastAPI:
    """metrics: folder in which the fronts of one server keep their counters; it need not exist for a single one."""
    app = FastAPI(title="LightLLM", version=__version__, redirect_slashes=False)
    table = routes(manager, args, metrics)
    for route in table:
        app.router.add_route(route.path, _application(route), route.methods)
    app.add_exception_handler(HTTPException, _on_http_error)
    if args.api_key:
        app.add_middleware(KeyGuard, keys=args.api_key, shape_of=shape_of)
    if args.allowed_origins:
        app.add_middleware(CORSMiddleware, allow_origins=args.allowed_origins, allow_methods=["*"], allow_headers=["*"])
    description = _openapi(app, table)
    # FastAPI's documented way to describe other routes than its own; what is set as openapi_schema it makes anew.
    app.openapi = lambda: description  # type: ignore[method-assign]
    return app


def _application(route: Route) -> Any:
    def count(status: int) -> None:
        HTTP.labels(route.path, status).inc()

    return Answering(route.endpoint, partial(error_response, shape=route.problem_shape), count)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, status = request.url.path, error.status_code
    reason = f"there is no {path} here" if status == 404 else f"{path} does not take {request.method}"
    answer = error_response(RequestFailed(status, reason), shape_of(path))
    answer.headers.update(error.headers or {})  # at 405 the methods that are taken
    return answer


def _openapi(app: FastAPI, table: list[Route]) -> dict[str, Any]:
    """What programs read at /openapi.json."""
    kinds = {k for route in table for k in (route.body, route.answer, route.event, _error_kind(route)) if k}
    _, schemas = msgspec.json.schema_components(sorted(kinds, key=lambda kind: kind.__name__), ref_template=SCHEMA)
    description = get_openapi(title=app.title, version=app.version, routes=[])
    for route in table:
        for method in route.methods:
            name = f"{method.lower()}_{route.path.strip('/').replace('/', '_') or 'root'}"
            path = description["paths"].setdefault(route.path.replace(":path}", "}"), {})
            path[method.lower()] = {"operationId": name} | _described(route)
    return description | {"components": {"schemas": schemas}}


def _described(route: Route) -> dict[str, Any]:
    def content(kind: type | None) -> dict[str, Any]:
        return {"application/json": {"schema": _reference(kind)}} if kind else {}

    answers = content(route.answer)
    if route.event:  # OpenAPI 3.2's way to describe the events of a stream
        data = {"type": "string", "contentMediaType": "application/json", "contentSchema": _reference(route.event)}
        answers["text/event-stream"] = {"itemSchema": {"type": "object", "properties": {"data": data}}}
    answer = {"description": "OK", "content": answers or {route.media: {}}}
    error = {"description": "An error", "content": content(_error_kind(route))}
    described: dict[str, Any] = {"responses": {"200": answer, "default": error}}
    if route.body:
        described["requestBody"] = {"required": True, "content": content(route.body)}
    if "{name" in route.path:
        described["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    return described


def _reference(kind: type) -> dict[str, str]:
    return {"$ref": SCHEMA.format(name=kind.__name__)}


def _error_kind(route: Route) -> type:
    return type(route.problem_shape(RequestFailed(400, "")))


class Listener(uvicorn.Server):
    """uvicorn without its signal handlers: the launcher's commands come through the control pipe."""

    def __init__(self, app: FastAPI, on_listening: Callable[[], None]):
        self._on_listening = on_listening
        super().__init__(
            uvicorn.Config(
                app,
                http=BoundedProtocol,
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
    tracer = Tracer(args.otlp_traces_endpoint, args.model_name) if args.otlp_traces_endpoint else None
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
    assert args.model_dir is not None, "the launcher resolves it"
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a shell's 1024 are fewer than the queue has places
    if 0 <= most < args.max_queue and child.config["index"] == 0:
        told = "connections beyond %d of a front will be reset (ulimit -Hn), where --max_queue takes %d"
        logger.warning(told, most, args.max_queue)
    uvloop.run(_serve(child, args, load_tokenizer(args.model_dir, args.trust_remote_code)))
