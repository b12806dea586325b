"""`lightllm chat` and `lightllm generate`: a model in the terminal, by a running server or an own one."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any, TextIO

from lightllm.server.core.server_args import ServerArgs

CHATML_END = "<|im_end|>"
HELP = "/reset forgets the conversation, /system TEXT sets the system prompt, /exit leaves; Ctrl-C stops an answer"
SILENCE = 600.0  # seconds without a token after which a server counts as lost
STARTING = 0.2  # seconds between two looks at a server that starts
LOG_LINES = 8  # of a server that failed to start
Message = dict[str, str]
Template = Callable[[list[Message]], str]


class TerminalError(Exception):
    """What the person at the terminal is told, in one line."""


def chat(url: str | None, args: ServerArgs, system: str | None, parameters: dict[str, Any]) -> None:
    """A conversation over stdin and stdout until /exit or the end of input.

    url: a running server; None starts one with `args` and stops it at the end.
    parameters: of each request, as /generate takes them.
    Ends the process with one line on stderr and exit code 1 if there is no server or it goes away.
    """
    with _one_line_errors("chat"), _server(url, args) as server:
        _converse(Conversation(server, _template(server), system, parameters))


def generate(prompt: str, url: str | None, args: ServerArgs, parameters: dict[str, Any]) -> None:
    """Prints the continuation of one prompt, by a running server (url) or by the model in this process.

    Ends the process with one line on stderr and exit code 1 if that is not possible.
    """
    with _one_line_errors("generate"):
        texts = _generate_here(prompt, args, parameters) if url is None else _generate_at(url, prompt, parameters)
        print("\n".join(texts))


def _generate_at(url: str, prompt: str, parameters: dict[str, Any]) -> list[str]:
    with closing(_request(url, "/generate", {"inputs": prompt, "parameters": parameters})) as answer:
        return json.load(answer)["generated_text"]


def _generate_here(prompt: str, args: ServerArgs, parameters: dict[str, Any]) -> list[str]:
    from lightllm.llm import LLM
    from lightllm.server.core.sampling_params import SamplingParams

    (result,) = LLM(**asdict(args)).generate([prompt], SamplingParams(**parameters), use_tqdm=False)
    if failed := [output.error for output in result.outputs if output.error]:
        raise TerminalError(failed[0])
    return [output.text for output in result.outputs]


class Conversation:
    """The messages so far, and the template that makes a prompt of them.

    template: the model's chat template, or None for ChatML.
    """

    def __init__(self, url: str, template: Template | None, system: str | None, parameters: dict[str, Any]):
        self._url = url
        self._template = template
        self._parameters = parameters
        self.system = system
        self.messages: list[Message] = []

    def answer(self, text: str) -> Iterator[str]:
        """Pieces of the answer; what was yielded is remembered, also when the answer is cut short.

        A question that cannot be served is forgotten again.
        """
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        try:
            for piece in _stream(self._url, self._body()):
                pieces.append(piece)
                yield piece
        finally:
            if pieces:
                self.messages.append({"role": "assistant", "content": "".join(pieces)})
            else:
                self.messages.pop()

    def _body(self) -> dict[str, Any]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        messages = [*system, *self.messages]
        if self._template is None:
            return {"inputs": chatml(messages), "parameters": {"stop_sequences": [CHATML_END]} | self._parameters}
        prompt = self._template(messages)
        return {"inputs": prompt, "parameters": {"add_special_tokens": False} | self._parameters}


def chatml(messages: list[Message]) -> str:
    """A prompt in the ChatML format that ends where the answer begins."""
    turns = [f"<|im_start|>{message['role']}\n{message['content']}{CHATML_END}\n" for message in messages]
    return "".join(turns) + "<|im_start|>assistant\n"


def _converse(conversation: Conversation) -> None:
    interactive = sys.stdin.isatty()
    if interactive:
        with suppress(ImportError):
            import readline  # noqa: F401  # input() then has a history and editing keys
        print(HELP)
    while True:
        try:
            text = input("> " if interactive else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            print("\n(/exit or Ctrl-D leaves)")
            continue
        command, _, rest = text.partition(" ")
        match command:
            case "":
                continue
            case "/exit":
                return
            case "/reset":
                conversation.messages.clear()
            case "/system":
                conversation.system = rest.strip() or None
            case _ if command.startswith("/"):
                print(HELP)
            case _:
                _show(conversation.answer(text))


def _show(pieces: Iterator[str]) -> None:
    try:
        with closing(pieces):  # type: ignore[type-var]
            for piece in pieces:
                print(piece, end="", flush=True)
    except KeyboardInterrupt:
        print(" (stopped)", end="")
    except Refused as error:
        print(error, file=sys.stderr)
    print()


class Refused(TerminalError):
    """The server is well but did not serve this request, or not to its end."""


def _stream(url: str, body: dict[str, Any]) -> Iterator[str]:
    """Texts of the events of /generate_stream. Raises Refused for an error event."""
    with closing(_request(url, "/generate_stream", body)) as answer:
        for line in answer:
            if line.startswith(b"data:"):
                event = json.loads(line[5:])
                if "error" in event:
                    raise Refused(event["error"]["message"])
                yield event["token"]["text"]


def _request(url: str, path: str, body: dict[str, Any] | None = None) -> http.client.HTTPResponse:
    """The answer of status 200. Raises Refused with the server's reason, TerminalError if it cannot be reached."""
    data = None if body is None else json.dumps(body).encode()
    url = url if "://" in url else f"http://{url}"
    try:
        request = urllib.request.Request(url.rstrip("/") + path, data, {"Content-Type": "application/json"})
        return urllib.request.urlopen(request, timeout=SILENCE)
    except urllib.error.HTTPError as error:
        with closing(error):
            raise Refused(_reason(error)) from None
    except (urllib.error.URLError, ValueError) as error:
        raise TerminalError(f"no server at {url}: {getattr(error, 'reason', error)}") from None


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return json.load(error)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        return f"HTTP {error.code} {error.reason}"


def _template(url: str) -> Template | None:
    """The chat template of the model that a server serves, if it is on this machine and has one."""
    with closing(_request(url, "/get_server_info")) as answer:
        info = json.load(answer)
    model_dir = Path(info["model_dir"])
    if not model_dir.is_dir():
        return None
    from lightllm.server.chat_template import ChatTemplate
    from lightllm.server.tokenizer_config import TokenizerConfig

    config = TokenizerConfig.read(model_dir)
    source = config.chat_templates.get("default")
    if source is None:
        return None
    template = ChatTemplate(source)
    return lambda messages: template.render(messages, variables=config.special_tokens)


@contextmanager
def _one_line_errors(command: str) -> Iterator[None]:
    try:
        yield
    except (TerminalError, ImportError, OSError, ValueError, http.client.HTTPException) as error:
        sys.exit(f"lightllm {command}: {error}")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


@contextmanager
def _server(url: str | None, args: ServerArgs) -> Iterator[str]:
    """The URL of a server: the given one, or one that lives as long as this context."""
    if url is not None:
        yield url
        return
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        port = _free_port()
        command = [sys.executable, "-m", "lightllm.server.api_server", *_flags(args, host="127.0.0.1", port=port)]
        # A session of its own: Ctrl-C stops an answer, not the server.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        before = {number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGHUP)}
        try:
            own = f"http://127.0.0.1:{port}"
            _wait_ready(own, process, log)
            yield own
        finally:
            process.terminate()
            process.wait()
            for number, handler in before.items():
                signal.signal(number, handler)


def _leave(number: int, _frame: Any) -> None:
    sys.exit(128 + number)


def _wait_ready(url: str, process: subprocess.Popen, log: TextIO) -> None:
    print("loading the model ...", end="", file=sys.stderr, flush=True)
    while process.poll() is None:
        with suppress(TerminalError), closing(_request(url, "/readiness")):
            print(" ready", file=sys.stderr)
            return
        time.sleep(STARTING)
    log.seek(0)
    print(file=sys.stderr)
    raise TerminalError("the server did not start:\n" + "".join(log.readlines()[-LOG_LINES:]).rstrip())


def _flags(args: ServerArgs, **overrides: Any) -> list[str]:
    """The command line that gives these arguments, defaults left out."""
    flags: list[str] = []
    for field in fields(ServerArgs):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        value = overrides.get(field.name, getattr(args, field.name))
        if value == default:
            continue
        match value:
            case bool():
                flags.append(f"--{field.name}")
            case list():
                flags += [f"--{field.name}", *map(str, value)]
            case _:
                flags += [f"--{field.name}", str(value)]
    return flags


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]
