"""`lightllm chat`, `generate` and `bench`: a model in the terminal, by a running server or an own one."""

import http.client
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlsplit

from tqdm import tqdm

from lightllm.server.bench_serving import BenchFailed, Load, file_can_be_written, summary
from lightllm.server.core.server_args import ServerArgs, flag
from lightllm.server.workloads import SETS, Request
from lightllm.utils.net_utils import bind

HELP = (
    "/reset forgets the conversation, /system TEXT sets the system prompt, /save FILE writes the conversation, /exit "
    "leaves; Ctrl-C stops an answer"
)
HISTORY = os.path.expanduser("~/.lightllm_history")  # as it is for a user without a home
SILENCE = 600.0  # seconds without a token after which a server counts as lost
STARTING = 0.2  # seconds between two looks at a server that starts
LOG_LINES = 8  # of a server that failed to start
LOOPBACK = ("localhost", "127.0.0.1", "::1")
NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
WARM_UP: list[Request] = [(16, 8)] * 4
Message = dict[str, str]


class TerminalError(Exception):
    """What the person at the terminal is told, in one line."""


@dataclass(frozen=True)
class OutputOptions:
    """What `chat` and `generate` may ask of every output; a field is a flag."""

    max_new_tokens: int | None = flag(None, "output tokens at most")
    temperature: float | None = flag(None, "0 takes the likeliest token")
    seed: int | None = flag(None, "the same seed gives the same text")

    def parameters(self) -> dict[str, Any]:
        """Of /generate."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def chat(url: str | None, args: ServerArgs, system: str | None, wishes: OutputOptions) -> None:
    """A conversation over stdin and stdout until /exit or the end of input.

    url: a running server; None starts one with `args` and stops it at the end.
    Ends the process with one line on stderr and exit code 1 if there is no server or it goes away.
    """
    with _one_line_errors("chat"), _server(url, args) as server:
        _converse(Conversation(server, _key(args), system, wishes))


def generate(prompt: str, url: str | None, args: ServerArgs, wishes: OutputOptions) -> None:
    """Prints the continuation of one prompt, by a running server (url) or by the model in this process.

    Ends the process with one line on stderr and exit code 1 if that is not possible.
    """
    with _one_line_errors("generate"):
        if url is None:
            texts = _generate_here(prompt, args, wishes.parameters())
        else:
            body = {"inputs": prompt, "parameters": wishes.parameters()}
            texts = _answer(url, _key(args), "/generate", body)["generated_text"]
        print("\n".join(texts))


@dataclass(frozen=True)
class BenchOptions:
    """A load, and the bounds of goodput; a field is a flag."""

    api: str = flag("lightllm", "dialect of the requests", choices=["lightllm", "openai"])
    set: str = flag("sharegpt", "lengths of prompts and outputs", choices=list(SETS))
    requests: int | None = flag(None, "how many; default: all of the set, or 64")
    prompt_tokens: int | None = flag(None, "of every prompt, instead of a set")
    output_tokens: int = flag(128, "of every output, with it")
    vocab_size: int | None = flag(None, "prompts are of ids below it; default: what the server tells")
    rate: float = flag(0.0, "requests a second; 0: all at once")
    concurrency: int = flag(0, "how many run at most; 0: all")
    schema: Path | None = flag(None, "file with a JSON schema that outputs must match")
    most_ttft: float = flag(1000.0, "ms to the first token, for goodput")
    most_tpot: float = flag(50.0, "ms a token, for goodput")
    json: Path | None = flag(None, "where to write the results")

    def workload(self) -> list[Request]:
        """Raises ValueError for numbers that leave nothing to measure, and where results cannot be written."""
        leasts = dict(requests=1, prompt_tokens=1, output_tokens=1, vocab_size=4, concurrency=0)
        for name, least in leasts.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"--{name} must be at least {least}, not {value}")
        if not 0 <= self.rate < math.inf:
            raise ValueError(f"--rate must be 0 or more, not {self.rate}")
        if self.json and not file_can_be_written(self.json):
            raise ValueError(f"--json {self.json} cannot be written")
        if self.prompt_tokens is not None:
            return [(self.prompt_tokens, self.output_tokens)] * (self.requests or 64)
        return SETS[self.set](self.requests) if self.requests else SETS[self.set]()


def bench(url: str | None, args: ServerArgs, options: BenchOptions) -> None:
    """Measures a running server (url), or one of its own with `args`, and prints a line for each number.

    Ends the process with one line on stderr and exit code 1 if a request fails.
    """
    with _one_line_errors("bench"):
        requests = options.workload()
        wishes = {"guided_json": options.schema.read_text(encoding="utf-8")} if options.schema else {}
    with _one_line_errors("bench"), _server(url, args) as server:
        vocab_size = options.vocab_size or _vocab_size(server, _key(args))
        load = Load(server, vocab_size, options.api, _key(args), **wishes)
        load.run(WARM_UP)
        with tqdm(total=len(requests), desc="requests", disable=None, leave=False) as bar:  # at a terminal alone
            streams = load.run(requests, options.rate, options.concurrency, bar.update)
        result = summary(*streams, options.most_ttft, options.most_tpot)
        for name, value in result.items():
            print(f"{name:20} {value:12.5g}")
        if options.json:
            known = {name: None if math.isnan(value) else value for name, value in result.items()}  # JSON has no NaN
            options.json.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def _vocab_size(url: str, key: str) -> int:
    try:
        return _answer(url, key, "/get_server_info")["engine"]["vocab_size"]
    except (Refused, ValueError) as error:
        why = str(error)
    except (LookupError, TypeError):
        why = "no LightLLM's answer"
    raise TerminalError(f"{why} at {url}/get_server_info; --vocab_size says how many ids a model has")


def _key(args: ServerArgs) -> str:
    """The API key that a server wants; "" for none."""
    return next(iter(args.api_key), "")


def _answer(url: str, key: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    with closing(_request(url, key, path, body)) as answer:
        return json.load(answer)


def _generate_here(prompt: str, args: ServerArgs, parameters: dict[str, Any]) -> list[str]:
    from lightllm.llm import LLM
    from lightllm.server.core.sampling_params import SamplingParams

    (result,) = LLM(**asdict(args)).generate([prompt], SamplingParams(**parameters), use_tqdm=False)
    if failed := [output.error for output in result.outputs if output.error]:
        raise TerminalError(failed[0])
    return [output.text for output in result.outputs]


class Conversation:
    """The messages so far."""

    def __init__(self, url: str, key: str, system: str | None, wishes: OutputOptions):
        self._url, self._key = url, key
        given = {"stream": True, "temperature": 0.0} | wishes.parameters()
        self._options = {"max_tokens" if name == "max_new_tokens" else name: value for name, value in given.items()}
        self.system = system
        self.messages: list[Message] = []

    def answer(self, text: str) -> Iterator[str]:
        """Pieces of the answer; what was yielded is remembered, also when the answer is cut short.

        A question that cannot be served is forgotten again.
        """
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        try:
            for piece in _stream(self._url, self._key, {"messages": self.told()} | self._options):
                pieces.append(piece)
                yield piece
        finally:
            if pieces:
                self.messages.append({"role": "assistant", "content": "".join(pieces)})
            else:
                self.messages.pop()

    def told(self) -> list[Message]:
        """All messages, the system prompt first."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.messages]


def _converse(conversation: Conversation) -> None:
    interactive = sys.stdin.isatty()
    if interactive:
        _open_history()
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
            case "/save":
                _save(conversation, rest.strip())
            case _ if command.startswith("/"):
                print(HELP)
            case _:
                _show(conversation.answer(text))


def _open_history() -> None:
    """input() has editing keys, and remembers what was typed, also from earlier conversations."""
    with suppress(ImportError):
        import atexit
        import readline

        with suppress(OSError):
            readline.read_history_file(HISTORY)
        atexit.register(_save_history, readline)


def _save_history(readline: Any) -> None:
    with suppress(OSError):
        readline.set_history_length(1000)
        readline.write_history_file(HISTORY)


def _save(conversation: Conversation, name: str) -> None:
    if not name:
        print(HELP)
        return
    try:
        Path(name).write_text(json.dumps(conversation.told(), ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        print(f"{name}: {error.strerror}", file=sys.stderr)


def _show(pieces: Iterator[str]) -> None:
    printed = markdown(pieces) if sys.stdout.isatty() else pieces
    try:
        with closing(pieces):  # type: ignore[type-var]
            for piece in printed:
                print(piece, end="", flush=True)
    except KeyboardInterrupt:
        print(f"{PLAIN} (stopped)" if sys.stdout.isatty() else " (stopped)", end="")
    except Refused as error:
        print(error, file=sys.stderr)
    print()


PLAIN = "\x1b[0m"
STYLES = {"```": "\x1b[36m", "`": "\x1b[36m", "**": "\x1b[1m"}


def markdown(pieces: Iterator[str]) -> Iterator[str]:
    """Text with code and bold shown in colours of the terminal, as it comes; the signs stay where they are."""
    pending, opened = "", ""
    for piece in pieces:
        pending += piece
        whole = pending.rstrip("`*")  # what may be the beginning of a longer sign waits
        shown, pending = pending[: len(whole)], pending[len(whole) :]
        styled, opened = _styled(shown, opened)
        yield styled
    yield _styled(pending, opened)[0] + PLAIN


def _styled(text: str, opened: str) -> tuple[str, str]:
    """The text with styles, and the sign that is open behind it."""
    parts = re.split(r"(```|`|\*\*)", text)
    for place, sign in enumerate(parts):
        if sign not in STYLES or (opened and sign != opened):
            continue
        parts[place] = sign + PLAIN if opened else STYLES[sign] + sign
        opened = "" if opened else sign
    return "".join(parts), opened


class Refused(TerminalError):
    """The server is well but did not serve this request, or not to its end."""


def _stream(url: str, key: str, body: dict[str, Any]) -> Iterator[str]:
    """Texts of a streamed answer, thoughts included. Raises Refused for an error event."""
    with closing(_request(url, key, "/v1/chat/completions", body)) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[len(b"data: ") :])
            if "error" in event:
                raise Refused(event["error"]["message"])
            for choice in event["choices"]:
                if text := choice["delta"].get("reasoning_content", "") + choice["delta"].get("content", ""):
                    yield text


def _request(url: str, key: str, path: str, body: dict[str, Any] | None = None) -> http.client.HTTPResponse:
    """The answer of status 200. Raises Refused with the server's reason, TerminalError if it cannot be reached."""
    data = None if body is None else json.dumps(body).encode()
    url = url if "://" in url else f"http://{url}"
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    try:
        request = urllib.request.Request(url.rstrip("/") + path, data, headers)
        opens = NO_PROXY.open if urlsplit(url).hostname in LOOPBACK else urllib.request.urlopen
        return opens(request, timeout=SILENCE)
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


@contextmanager
def _one_line_errors(command: str) -> Iterator[None]:
    try:
        yield
    except (TerminalError, BenchFailed, ImportError, OSError, ValueError, http.client.HTTPException) as error:
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
        with bind("127.0.0.1", 0) as listener:
            port = listener.getsockname()[1]
        command = [sys.executable, "-m", "lightllm.server.api_server", *_flags(args, host="127.0.0.1", port=port)]
        # A session of its own: Ctrl-C stops an answer, not the server.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        before = {number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGHUP)}
        try:
            own = f"http://127.0.0.1:{port}"
            _wait_ready(own, _key(args), process, log)
            yield own
        finally:
            process.terminate()
            process.wait()
            for number, handler in before.items():
                signal.signal(number, handler)


def _leave(number: int, _frame: Any) -> None:
    sys.exit(128 + number)


def _wait_ready(url: str, key: str, process: subprocess.Popen, log: TextIO) -> None:
    print("loading the model ...", end="", file=sys.stderr, flush=True)
    while process.poll() is None:
        with suppress(TerminalError), closing(_request(url, key, "/readiness")):
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
        value = overrides.get(field.name, getattr(args, field.name))
        if value == getattr(ServerArgs(), field.name):
            continue
        match value:
            case bool():
                flags.append(f"--{field.name}")
            case list():
                flags += [f"--{field.name}", *map(str, value)]
            case _:
                flags += [f"--{field.name}", str(value)]
    return flags
