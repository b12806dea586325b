"""`lightllm chat`, `generate` and `bench` as a person at a terminal sees them."""

import json
import math
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from support.checkpoints import SCRIPTED
from support.client import strict_json
from support.http_background import in_background
from support.server import REPOSITORY, RunningServer, reserve_port, start_server

from lightllm.server import bench_serving
from lightllm.server.bench_serving import Load
from lightllm.server.core.server_args import ServerArgs
from lightllm.server.terminal import _flags, markdown
from lightllm.server.workloads import Request, prompt_ids

TIMEOUT = 240


def start(*arguments: str) -> subprocess.Popen[str]:
    """As a terminal would: a shell's background jobs, the tests among them, may ignore SIGINT."""
    return subprocess.Popen(
        [sys.executable, "-m", "lightllm.server.api_cli", *arguments], cwd=REPOSITORY, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def talk(lines: str, *arguments: str) -> tuple[int, str, str]:
    process = start(*arguments)
    out, err = process.communicate(lines, TIMEOUT)
    return process.returncode, out, err


class ScriptedHandler(BaseHTTPRequestHandler):
    """Answers "one two", stops in the middle when asked to "hang", and refuses when asked to "fail"."""

    def log_message(self, *_: object) -> None: ...

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server: ScriptedServer = self.server  # type: ignore[assignment]
        server.bodies.append(body)
        assert self.path == "/v1/chat/completions"
        question = body["messages"][-1]["content"]
        if question.startswith("fail"):
            return self._send(400, json.dumps({"error": {"message": "the prompt is too long"}}))
        if question.startswith("break"):
            return self._send(200, 'data: {"error": {"message": "the worker died"}}\n\n')
        if not question.startswith("hang"):
            return self._send(200, "".join(map(event, ["one", " two"])))
        self._send(200, event("one"), length=1000)
        server.hanging.set()
        self.connection.recv(1)  # until the client goes away
        server.left.set()

    def _send(self, status: int, text: str, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length or len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


class ScriptedServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), ScriptedHandler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.bodies: list[dict] = []
        self.hanging, self.left = threading.Event(), threading.Event()


def event(text: str) -> str:
    return f"data: {json.dumps({'choices': [{'delta': {'content': text}}]})}\n\n"


@pytest.fixture
def scripted() -> Iterator[ScriptedServer]:
    with in_background(ScriptedServer()) as server:
        yield server


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_history_and_commands(scripted: ScriptedServer) -> None:
    lines = "a\nb\n\n/reset\nc\n/system  Be brief.\nd\n/exit\nnever\n"
    code, out, err = talk(lines, "chat", "--url", scripted.url, "--system", "Hello.", "--max_new_tokens", "5")
    assert (code, out, err) == (0, "one two\n" * 4, "")
    hello, brief = {"role": "system", "content": "Hello."}, {"role": "system", "content": "Be brief."}
    answer = assistant("one two")
    assert [body["messages"] for body in scripted.bodies] == [
        [hello, user("a")],
        [hello, user("a"), answer, user("b")],
        [hello, user("c")],
        [brief, user("c"), answer, user("d")],
    ]
    asked = {name: value for name, value in scripted.bodies[0].items() if name != "messages"}
    assert asked == {"stream": True, "temperature": 0.0, "max_tokens": 5}


def test_no_proxy_stands_between_a_machine_and_itself(scripted: ScriptedServer, monkeypatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:0")
    assert talk("a\n", "chat", "--url", scripted.url) == (0, "one two\n", "")


def test_save(scripted: ScriptedServer, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    code, _, err = talk(f"a\n/save {file}\n/save {tmp_path}\n", "chat", "--url", scripted.url, "--system", "S")
    assert code == 0 and err == f"{tmp_path}: Is a directory\n"
    assert json.loads(file.read_text()) == [{"role": "system", "content": "S"}, user("a"), assistant("one two")]


def test_markdown_however_it_is_cut() -> None:
    text = "a **b** `c * d` **e `f` g**\n```py\nx ** 2 `y`\n```\nend *"
    whole = "".join(markdown(iter([text])))
    assert re.sub(r"\x1b\[\d+m", "", whole) == text
    assert "\x1b[1m**b**\x1b[0m" in whole and "\x1b[36m`c * d`\x1b[0m" in whole
    assert "".join(markdown(iter(text))) == whole


def test_refused_question_is_forgotten(scripted: ScriptedServer) -> None:
    code, out, err = talk("fail\nbreak\na", "chat", "--url", scripted.url)
    assert code == 0 and "one two" in out
    assert err == "the prompt is too long\nthe worker died\n"
    assert scripted.bodies[-1]["messages"] == [user("a")]


def test_ctrl_c_stops_the_answer(scripted: ScriptedServer) -> None:
    process = start("chat", "--url", scripted.url)
    assert process.stdin and process.stdout
    process.stdin.write("hang\n")
    process.stdin.flush()
    assert scripted.hanging.wait(TIMEOUT)
    assert process.stdout.read(3) == "one"
    process.send_signal(signal.SIGINT)
    assert scripted.left.wait(TIMEOUT)
    out, err = process.communicate("b\n", TIMEOUT)
    assert (process.returncode, out, err) == (0, " (stopped)\none two\n", "")
    assert scripted.bodies[-1]["messages"] == [user("hang"), assistant("one"), user("b")]


@pytest.mark.parametrize("command", [["chat"], ["generate", "x"]])
def test_no_server(command: list[str]) -> None:
    with reserve_port() as reserved:
        url = f"http://127.0.0.1:{reserved.getsockname()[1]}"
        code, out, err = talk("a\n", *command, "--url", url)
    assert code == 1 and not out
    assert err.startswith(f"lightllm {command[0]}: no server at {url}: ") and err.count("\n") == 1


def test_a_running_server(script: RunningServer) -> None:
    code, out, _ = talk("", "generate", "A", "--url", script.url)
    assert (code, out) == (0, SCRIPTED + "\n")
    code, out, err = talk("", "generate", "A", "--url", script.url, "--max_new_tokens", "0")
    assert code == 1 and not out and err.startswith("lightllm generate: max_new_tokens")
    code, out, err = talk("hello\nagain\n", "chat", "--url", script.url, "--max_new_tokens", "3")
    assert code == 0 and not err and out.count("\n") >= 2


def bench(server: RunningServer, *flags: str) -> dict[str, float]:
    """The numbers that are printed."""
    code, out, err = talk("", "bench", "--url", server.url, *flags)
    assert (code, err) == (0, "")
    return {name: float(value) for name, value in (line.split() for line in out.splitlines())}


@pytest.mark.parametrize("api", ["lightllm", "openai"])
def test_bench(script: RunningServer, tmp_path: Path, api: str) -> None:
    before = script.load()
    load = ("--api", api, "--requests", "6", "--concurrency", "2", "--prompt_tokens", "20", "--output_tokens", "5")
    result = bench(script, *load, "--json", str(tmp_path / "out.json"))
    assert result["requests"] == 6 and result["output_tokens"] == 30 and result["ttft_p50_ms"] > 0
    assert json.loads((tmp_path / "out.json").read_text())["output_tokens"] == 30
    after = script.load()
    assert after["prompt_tokens_total"] - before["prompt_tokens_total"] == 6 * 20 + 4 * 16, "the load and the warm-up"


def test_what_bench_cannot_know_is_null(script: RunningServer, tmp_path: Path) -> None:
    load = ("--requests", "1", "--prompt_tokens", "20", "--output_tokens", "1", "--json", str(tmp_path / "out.json"))
    assert math.isnan(bench(script, *load)["between_p99_ms"])
    assert strict_json((tmp_path / "out.json").read_text())["between_p99_ms"] is None


def test_bench_shows_at_a_terminal_how_far_it_is(script: RunningServer) -> None:
    reader, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 80))
    command = [sys.executable, "-m", "lightllm.server.api_cli", "bench", "--url", script.url, "--requests", "3"]
    load = ["--prompt_tokens", "20", "--output_tokens", "5"]
    done = subprocess.run([*command, *load], cwd=REPOSITORY, stderr=terminal, stdout=subprocess.PIPE, timeout=TIMEOUT)
    os.close(terminal)
    assert done.returncode == 0 and b"requests:   0%|" in os.read(reader, 1 << 16)
    os.close(reader)


def test_a_load_finds_a_server_below_a_path_and_by_its_name() -> None:
    class Proxied(ScriptedHandler):
        def do_POST(self) -> None:
            good = (self.path, self.headers["Host"]) == ("/below/generate_stream", f"localhost:{server.server_port}")
            self._send(200 if good else 404, "data: {}\n\n" if good else "")

    with in_background(ThreadingHTTPServer(("127.0.0.1", 0), Proxied)) as server:
        _, (stream,) = Load(f"http://localhost:{server.server_port}/below/", vocab_size=10).run([(1, 1)])
    assert len(stream.times) == 1


def test_the_time_of_a_load_begins_when_its_prompts_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def watched(requests: Sequence[Request], vocab_size: int) -> list[list[int]]:
        prompts = prompt_ids(requests, vocab_size)
        made.append(time.perf_counter())
        return prompts

    class OneToken(ScriptedHandler):
        def do_POST(self) -> None:
            self._send(200, "data: {}\n\n")

    monkeypatch.setattr(bench_serving, "prompt_ids", watched)
    with in_background(ThreadingHTTPServer(("127.0.0.1", 0), OneToken)) as server:
        begin, (stream,) = Load(f"http://127.0.0.1:{server.server_port}", vocab_size=10).run([(5, 1)])
    assert made[0] < begin < stream.sent


@pytest.mark.parametrize("api", ["lightllm", "openai"])
def test_a_load_counts_tokens_and_not_what_follows_them(script: RunningServer, api: str) -> None:
    _, (stream,) = Load(script.url, vocab_size=200, api=api).run([(20, 1)])
    assert len(stream.times) == 1


class OtherServer(ScriptedHandler):
    """OpenAI's dialect without what this server tells of itself."""

    def do_GET(self) -> None:
        self._send(200, "{}") if self.path == "/get_server_info" else self._send(404, "")

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert max(asked["prompt"]) < 50
        chunk = 'data: {"choices": [{"text": "a"}]}\n\n'
        self._send(200, chunk * asked["max_tokens"] + 'data: {"choices": [], "usage": {}}\n\ndata: [DONE]\n\n')


def test_bench_of_another_server() -> None:
    with in_background(ThreadingHTTPServer(("127.0.0.1", 0), OtherServer)) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        load = ("bench", "--url", url, "--api", "openai", "--requests", "2", "--prompt_tokens", "9")
        told = f"no LightLLM's answer at {url}/get_server_info; --vocab_size says how many ids a model has"
        assert talk("", *load) == (1, "", f"lightllm bench: {told}\n")
        code, out, err = talk("", *load, "--vocab_size", "50")
    assert (code, err) == (0, "") and "output_tokens                 256\n" in out


def test_bench_of_a_set_at_a_rate_within_a_schema(serve, tmp_path: Path) -> None:
    server = serve("llama", max_position_embeddings=2048)
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "string", "maxLength": 3}')
    result = bench(server, "--set", "uniform", "--requests", "1", "--rate", "100", "--schema", str(schema))
    assert result["requests"] == 1 and result["goodput"] >= 0


@pytest.mark.parametrize("flag", ["requests", "prompt_tokens", "output_tokens", "vocab_size", "concurrency"])
def test_bench_of_nothing(flag: str) -> None:
    code, out, err = talk("", "bench", f"--{flag}", "-1")
    assert (code, out) == (1, "") and err.startswith(f"lightllm bench: --{flag} must be at least") and "not -1" in err


@pytest.mark.parametrize(
    ("flag", "value", "told"),
    [
        ("rate", "-1", "must be 0 or more, not -1.0"),
        ("rate", "nan", "must be 0 or more, not nan"),
        ("json", "/nowhere/out.json", "/nowhere/out.json cannot be written"),
    ],
)
def test_bench_that_would_measure_in_vain(flag: str, value: str, told: str) -> None:
    assert talk("", "bench", f"--{flag}", value) == (1, "", f"lightllm bench: --{flag} {told}\n")


def test_bench_that_is_refused(script: RunningServer) -> None:
    code, out, err = talk("", "bench", "--url", script.url, "--prompt_tokens", "600", "--requests", "2")
    assert code == 1 and not out
    assert err.startswith("lightllm bench: a stream gave 0 of 128 tokens") and "512" in err


def test_a_server_that_wants_a_key(checkpoints) -> None:
    with start_server(
        checkpoints("spm"), "--api_key", "sesame", "--max_total_token_num", "500", key="sesame"
    ) as server:
        for command in (("generate", "A"), ("bench",)):
            code, _, err = talk("", *command, "--url", server.url)
            assert code == 1 and "API key" in err
        key = ("--url", server.url, "--api_key", "sesame")
        assert talk("", "generate", "A", *key)[0] == 0
        assert talk("", "bench", *key, "--prompt_tokens", "3", "--requests", "1")[0] == 0


def test_a_server_that_does_not_start(tmp_path: Path) -> None:
    code, out, err = talk("", "chat", "--model_dir", str(tmp_path))
    assert code == 1 and not out
    assert "the server did not start" in err and "config.json" in err


@pytest.mark.slow
def test_an_own_model() -> None:
    small = ("--max_total_token_num", "1024", "--max_new_tokens", "12")
    code, out, err = talk("What is the capital of France?\n", "chat", *small)
    assert (code, out) == (0, "The capital of France is Paris.\n"), err
    code, out, err = talk("", "generate", "The capital of France is", *small)
    assert code == 0 and "Paris" in out, err


def test_flags() -> None:
    args = ServerArgs(port=1, tp=2, eos_id=[3, 4], trust_remote_code=True, mem_fraction=0.5)
    flags = ["--port", "5", "--tp", "2", "--trust_remote_code", "--eos_id", "3", "4", "--mem_fraction", "0.5"]
    assert _flags(args, host="127.0.0.1", port=5) == flags
