"""Cases d of the bug bank: clients that leave, processes that die, servers that are stopped, too much at once."""

import json
import os
import resource
import shutil
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import SCRIPTED, edit_json, random_prompt, reference
from support.client import assert_error, strict_json
from support.server import RunningServer, StartFailed, assert_greedy, failed_start, start_server, until

ENDLESS = dict(do_sample=False, ignore_eos=True, max_new_tokens=4000)
CHILDREN = ("lightllm-router", "lightllm-detok", "lightllm-http0", "lightllm-tp0")
slow_too = pytest.mark.slow  # more of a kind that the quick run already has
PATIENCE = 60.0  # seconds in which a failure must have reached everybody


@pytest.fixture(scope="module")
def slow_server(checkpoints) -> Iterator[RunningServer]:
    """KV for four endless requests."""
    with start_server(checkpoints("slow"), "--max_total_token_num", "16400") as server:
        yield server


@pytest.fixture
def slow(slow_server: RunningServer) -> Iterator[RunningServer]:
    yield slow_server
    slow_server.wait_idle()
    assert_greedy(slow_server, reference(Path(str(slow_server.model_dir)), (65, 66, 67), 4))


def is_running(server: RunningServer, count: int = 1) -> Callable[[], bool]:
    return lambda: server.load()["running"] >= count


def is_gone(server: RunningServer) -> None:
    """What the client dropped is aborted, all its KV is free, and a request of full size starts at once."""
    server.wait_idle()
    with server.start_stream("next", **ENDLESS | dict(max_new_tokens=8000)) as stream:
        assert next(iter(stream))["token"]["count_output_tokens"] == 1
    server.wait_idle()


@pytest.mark.parametrize("times", [6, pytest.param(50, marks=pytest.mark.slow)])
def test_case_42_disconnect_in_a_stream(slow: RunningServer, times: int) -> None:
    """Who asks while the front finds out gets its own tokens."""
    expected = reference(Path(str(slow.model_dir)), (65, 66, 67), 4)
    for i in range(times):
        with slow.start_stream([i] * 20, **ENDLESS) as stream:
            next(iter(stream))
        assert_greedy(slow, expected)
        if i % 4 == 3:
            is_gone(slow)
    is_gone(slow)


@pytest.mark.parametrize("times", [6, pytest.param(50, marks=pytest.mark.slow)])
def test_case_43_disconnect_of_a_whole_answer(slow: RunningServer, times: int) -> None:
    for i in range(times):
        leaving = slow.send_and_leave("/generate", {"inputs": [i] * 20, "parameters": ENDLESS | dict(n=2)})
        until(is_running(slow))
        leaving.close()
        if i % 4 == 3:
            is_gone(slow)
    is_gone(slow)


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
def test_case_43_disconnect_while_waiting(slow: RunningServer, path: str) -> None:
    """Eight, of which four find room."""
    body = {"inputs": "wait", "parameters": ENDLESS}
    sockets = [slow.send_and_leave(path, body) for _ in range(8)]
    until(lambda: slow.load()["running"] == 4 and slow.load()["waiting"] == 4)
    for sock in reversed(sockets):
        sock.close()
    is_gone(slow)


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
def test_case_43_disconnect_while_prefilling(slow: RunningServer, path: str) -> None:
    for length in (4000, 8000):
        body = {"inputs": list(random_prompt(length)), "parameters": dict(max_new_tokens=100, ignore_eos=True)}
        leaving = slow.send_and_leave(path, body)
        until(is_running(slow))
        leaving.close()
    is_gone(slow)


def test_case_43_disconnect_at_once(slow: RunningServer) -> None:
    body = {"inputs": "at once", "parameters": ENDLESS}
    for path in ("/generate", "/generate_stream") * 4:
        slow.send_and_leave(path, body).close()
    half = socket.create_connection((slow.host, slow.port))
    half.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
    half.close()
    is_gone(slow)


def ends_somehow(server: RunningServer, stream: bool, started: threading.Event) -> str:
    """A request on a server that is about to fail; says how it ended, which must not be silence or success."""
    try:
        if stream:
            with server.start_stream("dying", **ENDLESS) as events:
                for event in events:
                    started.set()
                    if "error" in event:
                        assert_error(event["error"])
                        return "error event"
                    assert not event["finished"], event
            return "closed"
        answer = server.post("/generate", {"inputs": "dying", "parameters": ENDLESS})
        assert answer.status in (500, 503), (answer.status, answer.body)
        return "error answer"
    except OSError as error:
        return type(error).__name__
    except Exception as error:  # http.client's: cut off inside the answer
        assert type(error).__module__ == "http.client", error
        return type(error).__name__


@contextmanager
def at_work(server: RunningServer, streams: Sequence[bool]) -> Iterator[list[Future[str]]]:
    """How requests end that run inside; those that are streams have begun to answer."""
    begun = [threading.Event() for _ in streams]
    with ThreadPoolExecutor(len(streams)) as pool:
        ends = [pool.submit(ends_somehow, server, *of) for of in zip(streams, begun)]
        assert all(event.wait(60) for stream, event in zip(streams, begun) if stream)
        until(is_running(server, len(streams)))
        yield ends


@pytest.mark.parametrize("victim", CHILDREN)
def test_case_46_a_process_is_killed(checkpoints, victim: str) -> None:
    with start_server(checkpoints("slow"), "--max_total_token_num", "16400") as server:
        pids = server.pids()
        assert set(CHILDREN) <= set(pids)
        with at_work(server, (True, True, False, False)) as ends:
            os.kill(pids[victim], signal.SIGKILL)
            ways = [end.result(PATIENCE) for end in ends]
        if victim != "lightllm-http0":
            assert ways == ["error event", "error event", "error answer", "error answer"], ways
        assert not server.answers("/health")
        assert server.wait_gone(pids, PATIENCE) > 0
        assert victim in server.log


@slow_too
def test_case_46_a_rank_of_several_is_killed(checkpoints) -> None:
    with start_server(checkpoints("slow"), "--tp", "2", "--max_total_token_num", "16400") as server:
        pids = server.pids()
        with at_work(server, [True]) as (end,):
            os.kill(pids["lightllm-tp1"], signal.SIGKILL)
            assert end.result(PATIENCE) == "error event"
        assert server.wait_gone(pids, PATIENCE) > 0


@slow_too
def test_case_46_a_process_is_killed_while_idle(checkpoints) -> None:
    with start_server(checkpoints("script"), "--max_total_token_num", "4096") as server:
        pids = server.pids()
        os.kill(pids["lightllm-router"], signal.SIGKILL)
        assert server.wait_gone(pids, PATIENCE) > 0
        assert not server.answers("/health")


def test_case_46_the_launcher_is_killed(checkpoints) -> None:
    """Its children notice, clean up, and the port is free again."""
    model = checkpoints("script")
    with start_server(model, "--max_total_token_num", "4096") as server:
        pids = server.pids()
        server.signal(signal.SIGKILL)
        server.wait_gone(pids, PATIENCE)
        with start_server(model, "--max_total_token_num", "4096", port=server.port) as second:
            assert second.text("A", do_sample=False) == SCRIPTED


@pytest.mark.parametrize("seconds", [10, pytest.param(120, marks=pytest.mark.slow)])
def test_case_48_no_false_alarm_under_load(checkpoints, seconds: int) -> None:
    """64 sequences decode and long prompts keep coming; /health and /token_load never wait in their queue."""
    with start_server(checkpoints("slow"), "--max_total_token_num", "280000") as server:  # all of them fit
        over = threading.Event()

        def decode() -> None:
            with server.start_stream("decode", **ENDLESS) as stream:
                for event in stream:
                    assert "error" not in event
                    if over.is_set():
                        return

        def prefill(seed: int) -> None:
            while not over.is_set():
                server.generate(random_prompt(2000, seed), max_new_tokens=2)

        with ThreadPoolExecutor(66) as pool:
            work = [pool.submit(decode) for _ in range(64)] + [pool.submit(prefill, seed) for seed in range(2)]
            end, worst = time.monotonic() + seconds, 0.0
            while time.monotonic() < end:
                for path in ("/health", "/token_load", "/liveness"):
                    start = time.monotonic()
                    assert server.get(path, timeout=60).status == 200
                    worst = max(worst, time.monotonic() - start)
                time.sleep(0.1)
            over.set()
            for one in work:
                one.result()
        print(f"longest answer {worst:.3f} s")
        assert worst < 10
        server.wait_idle()


def the_launcher(server: RunningServer) -> None:
    server.signal()


def every_process(server: RunningServer) -> None:
    """As systemd stops a service."""
    for pid in (*server.pids().values(), server.process.pid):
        os.kill(pid, signal.SIGTERM)


def the_process_group(server: RunningServer) -> None:
    """As Ctrl-C in a terminal does it."""
    os.killpg(server.process.pid, signal.SIGINT)


@pytest.mark.parametrize("stop", [the_launcher, every_process, the_process_group])
def test_case_50_a_signal_lets_streams_end(checkpoints, stop: Callable[[RunningServer], None]) -> None:
    expected = reference(checkpoints("slow"), random_prompt(10), 60)
    with start_server(checkpoints("slow"), "--max_total_token_num", "16400") as server:
        pids = server.pids()
        with server.start_stream(random_prompt(10), **ENDLESS | dict(max_new_tokens=60)) as stream:
            events = iter(stream)
            got = [next(events)["token"]["id"] for _ in range(3)]
            stop(server)
            got += [event["token"]["id"] for event in events]
        assert tuple(got) == expected.tokens
        assert server.wait_gone(pids) == 0


def test_case_50_sigterm_ends_what_takes_too_long(checkpoints) -> None:
    with start_server(checkpoints("slow"), "--max_total_token_num", "16400", "--drain_timeout", "1") as server:
        pids = server.pids()
        with at_work(server, (True, False)) as ends:
            server.signal()
            until(lambda: not server.answers("/readiness"), PATIENCE)
            assert [end.result(PATIENCE) for end in ends] == ["error event", "error answer"]
        assert server.wait_gone(pids, PATIENCE) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=slow_too)])
def test_case_50_a_second_signal_waits_for_nobody(checkpoints, number: int) -> None:
    with start_server(checkpoints("slow"), "--max_total_token_num", "16400", "--drain_timeout", "600") as server:
        pids = server.pids()
        with at_work(server, [True]) as (end,):
            server.signal(number)
            until(lambda: "shutting down" in server.log)
            server.signal(number)
            end.result(PATIENCE)
        assert server.wait_gone(pids, PATIENCE) in (0, 128 + number, -number)


@pytest.mark.parametrize(
    ("number", "after"),
    [
        (signal.SIGTERM, 1.5),
        (signal.SIGINT, 0.3),
        *(
            pytest.param(number, after, marks=slow_too)
            for number in (signal.SIGTERM, signal.SIGINT)
            for after in (0.1, 0.8, 3)
        ),
    ],
)
def test_case_50_stopped_while_it_loads(checkpoints, number: int, after: float) -> None:
    with RunningServer(checkpoints("slow"), "--max_total_token_num", "16400") as server:
        time.sleep(after)
        pids = server.pids()
        server.signal(number)
        code = server.wait_gone(pids, PATIENCE)
        early = after < 1  # Python itself may be starting, which ends with 1 and a traceback
        assert code in (0, 128 + number, -number) or (early and code == 1)
        assert "Traceback" not in server.log or early


def test_case_50_sigint_while_idle_and_a_neighbour(checkpoints) -> None:
    """Two servers side by side; the end of one is nothing to the other."""
    model = checkpoints("script")
    with (
        start_server(model, "--max_total_token_num", "4096") as one,
        start_server(model, "--max_total_token_num", "4096") as other,
    ):
        pids = one.pids()
        assert not set(pids.values()) & set(other.pids().values())
        assert one.text("A") == other.text("A") == SCRIPTED
        one.signal(signal.SIGINT)
        assert one.wait_gone(pids) in (0, 130)
        assert other.text("A") == SCRIPTED


def test_case_50_the_port_is_taken(checkpoints) -> None:
    """Said before anything is loaded."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert str(port) in failed_start(checkpoints("slow"), port=port)


def cut(path: Path) -> None:
    file = path / "model.safetensors"
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size * 2 // 3)


def no_weights(path: Path) -> None:
    (path / "model.safetensors").unlink()


def no_tokenizer(path: Path) -> None:
    for file in path.glob("tokenizer*"):
        file.unlink()


def unknown_type(path: Path) -> None:
    edit_json(path / "config.json", model_type="nosuchmodel", architectures=["NoSuchModelForCausalLM"])


def other_shape(path: Path) -> None:
    edit_json(path / "config.json", intermediate_size=80)


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (cut, "model.safetensors"),
        (no_weights, ""),
        (no_tokenizer, "tokenizer"),
        (unknown_type, "nosuchmodel"),
        (other_shape, "mlp"),
        (shutil.rmtree, "damaged"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_case_52_a_load_failure_ends_the_start(checkpoints, tmp_path, damage, cause: str) -> None:
    """Every fault that a config or weight files can have: test/model/test_model_config.py and test_checkpoint.py."""
    path = checkpoints.copy("script", tmp_path / "damaged")
    damage(path)
    assert cause in failed_start(path)


def test_case_52_too_little_memory(checkpoints) -> None:
    limit = 1 << 29
    with pytest.raises(StartFailed) as failed:
        start_server(checkpoints("slow"), preexec=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)))
    assert failed.value.returncode != 0 and failed.value.log


def test_case_52_a_pool_larger_than_memory(checkpoints) -> None:
    assert "max_total_token_num" in failed_start(checkpoints("slow"), "--max_total_token_num", str(10**11))


def test_a_chat_template_that_is_not_there_is_told_before_the_model_loads(checkpoints) -> None:
    said = failed_start(checkpoints("slow"), "--chat_template", "/nowhere.jinja")
    assert said == "lightllm: --chat_template /nowhere.jinja does not exist"


def test_case_52_it_never_answers(checkpoints, tmp_path) -> None:
    """While it loads and fails, the port says nothing good."""
    path = checkpoints.copy("script", tmp_path / "damaged")
    cut(path)
    with RunningServer(path) as server:
        while server.process.poll() is None:
            assert not server.answers("/health") and not server.answers("/readiness")
            time.sleep(0.05)
        assert server.wait_gone({}) > 0


@pytest.mark.parametrize("clients", [120, pytest.param(500, marks=pytest.mark.slow)])
def test_case_53_overload(checkpoints, clients: int) -> None:
    """Each ends as 200 or as 429 with Retry-After; those that were let in are served in order."""
    model = checkpoints("llama")
    expected = reference(model, random_prompt(20), 50)
    with start_server(
        model, "--max_total_token_num", "4096", "--running_max_req_size", "8", "--max_queue", "32"
    ) as server:
        body = {
            "inputs": list(random_prompt(20)),
            "parameters": dict(do_sample=False, ignore_eos=True, max_new_tokens=50, return_details=True),
        }

        def one(i: int) -> int:
            if i % 3:
                answer = server.post("/generate", body)
                if answer.status == 200:
                    assert tuple(token["id"] for token in answer.json()["tokens"]) == expected.tokens
            else:
                answer = server.post("/generate_stream", body)
                if answer.status == 200:
                    frames = [strict_json(frame[6:]) for frame in answer.body.split(b"\n\n") if frame]
                    assert tuple(frame["token"]["id"] for frame in frames) == expected.tokens
            if answer.status != 200:
                assert answer.status == 429 and int(answer.headers["retry-after"]) >= 0 and answer.error()
            return answer.status

        worker = server.pids()["lightllm-tp0"]
        with ThreadPoolExecutor(clients) as pool:
            os.kill(worker, signal.SIGSTOP)
            asked = [pool.submit(one, i) for i in range(clients)]
            until(lambda: any(end.done() for end in asked))  # refused: nobody is served yet
            os.kill(worker, signal.SIGCONT)
            statuses = Counter(end.result() for end in asked)
        print(statuses)
        assert statuses[200] >= 40 and statuses[429] >= 1 and sum(statuses.values()) == clients
        server.wait_idle()
        assert one(1) == 200


def test_case_53_more_clients_than_a_shell_lets_a_process_have_files(checkpoints) -> None:
    def few_files() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    with (
        start_server(checkpoints("script"), "--max_total_token_num", "4096", preexec=few_files) as server,
        ExitStack() as stack,
    ):
        for _ in range(400):
            stack.enter_context(socket.create_connection((server.host, server.port)))
        assert server.text("A", do_sample=False) == SCRIPTED
        assert "connections beyond" not in server.log


def test_case_53_a_limit_of_files_below_the_queue_is_told(checkpoints) -> None:
    few_files = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    flags = ("--max_total_token_num", "4096", "--httpserver_workers", "2")
    with start_server(checkpoints("script"), *flags, preexec=few_files) as server:
        told = "connections beyond 256 of a front will be reset (ulimit -Hn), where --max_queue takes 2048"
        assert server.log.count(told) == 1


def test_case_53_a_full_queue_counts_sequences(checkpoints) -> None:
    with start_server(
        checkpoints("slow"), "--max_total_token_num", "8192", "--running_max_req_size", "2", "--max_queue", "4"
    ) as server:
        body = {"inputs": "full", "parameters": ENDLESS}
        held = [server.send_and_leave("/generate", body) for _ in range(2)]
        until(is_running(server, 2))
        held += [server.send_and_leave("/generate", body) for _ in range(4)]
        until(lambda: server.load()["waiting"] == 4)
        for path in ("/generate", "/generate_stream"):
            answer = server.post(path, body)
            assert answer.status == 429 and answer.headers["retry-after"] and answer.error()
        assert server.get("/health").status == 200
        held[3].close()
        until(lambda: server.load()["waiting"] == 3)
        held.append(server.send_and_leave("/generate", body))
        until(lambda: server.load()["waiting"] == 4)
        for sock in held:
            sock.close()
        server.wait_idle()


def resident(pid: int) -> int:
    """Bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("readers", "tokens"), [(20, 600), pytest.param(50, 4000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])]
)
def test_case_54_slow_readers(checkpoints, readers: int, tokens: int) -> None:
    """They hold up nobody, their KV is free when they are generated, and what waits for them is bounded."""
    model = checkpoints("llama", max_position_embeddings=8192)
    expected = reference(model, random_prompt(15), 60)
    with start_server(model, "--max_total_token_num", str(readers * 5000)) as server:
        front = server.pids()["lightllm-http0"]
        before = resident(front)
        asked = dict(do_sample=False, ignore_eos=True, max_new_tokens=tokens, logprobs=5)
        sockets = [slow_reader(server, {"inputs": "slow", "parameters": asked}) for _ in range(readers)]
        for sock in sockets:
            assert sock.recv(100).startswith(b"HTTP/1.1 200")

        def normal(_: int) -> None:
            for _ in range(3):
                got = server.ids(random_prompt(15), do_sample=False, ignore_eos=True, max_new_tokens=60)
                assert tuple(got) == expected.tokens

        with ThreadPoolExecutor(4) as pool:
            done = [pool.submit(normal, i) for i in range(4)]
            while not all(one.done() for one in done):
                for sock in sockets:
                    sock.recv(10)
                time.sleep(0.1)
            for one in done:
                one.result()
        until(lambda: not server.in_use(), 900)  # nobody reads any more, and yet they end
        assert resident(front) - before < (64 << 20) + readers * tokens * 2048
        for sock in sockets[::2]:
            sock.close()
        for sock in sockets[1::2]:
            assert rest_of(sock).endswith(b"0\r\n\r\n")


def slow_reader(server: RunningServer, body: Any) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(240)
    sock.connect((server.host, server.port))
    content = json.dumps(body).encode()
    head = f"POST /generate_stream HTTP/1.1\r\nHost: {server.host}\r\nContent-Length: {len(content)}\r\n\r\n"
    sock.sendall(head.encode() + content)
    return sock


def rest_of(sock: socket.socket) -> bytes:
    """The last bytes of a stream that is now read fast; the keep-alive connection stays open."""
    tail = b""
    while not tail.endswith(b"0\r\n\r\n") and (chunk := sock.recv(1 << 16)):
        tail = (tail + chunk)[-100:]
    sock.close()
    return tail
