"""The launcher with real servers: who is who, the port, the ends that test/cases/test_d_lifecycle.py does not have."""

import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.checkpoints import SCRIPTED
from support.client import Client
from support.server import (
    RunningServer,
    StartFailed,
    alive,
    failed_start,
    listening,
    reserve_port,
    socket_inodes,
    start_server,
    until,
)

from lightllm.utils.cache_dir import temporary_caches

SMALL = ("--max_total_token_num", "4096")
ENDLESS = dict(do_sample=False, ignore_eos=True, max_new_tokens=4000)
PATIENCE = 60.0


def test_who_is_who(checkpoints) -> None:
    """Names in ps, one port, and everything else behind a folder of mode 0700."""
    flags = ("--tp", "2", "--httpserver_workers", "2", *SMALL)
    with start_server(checkpoints("llama"), *flags) as server:
        pids = server.pids()
        assert set(pids) == {f"lightllm-{name}" for name in ("router", "detok", "http0", "http1", "tp0", "tp1")}
        (socket_dir,) = server.tmp.iterdir()
        assert socket_dir.stat().st_mode & 0o777 == 0o700
        port = f"0100007F:{server.port:04X}"
        for name, pid in pids.items():
            addresses = listening(pid)
            if "http" in name:
                assert addresses == {port}
            else:
                assert all(address.startswith("0100007F:") for address in addresses), (name, addresses)
        assert listening(server.process.pid) == set()
        answers = [server.text("A", max_new_tokens=3) for _ in range(20)]  # by both fronts
        assert len(set(answers)) == 1


def test_a_restart_while_connections_are_in_time_wait(checkpoints) -> None:
    """The side that closes first keeps the port for a minute; at a drain that is the server."""
    model, reserved = checkpoints("script"), reserve_port()
    port = reserved.getsockname()[1]
    for _ in range(2):
        with start_server(model, *SMALL, port=port) as server:
            kept = socket.create_connection((server.host, port))
            kept.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert kept.recv(100).startswith(b"HTTP/1.1 200")
            server.stop()
            while kept.recv(1 << 16):
                pass
            kept.close()
        assert f":{port:04X} " in Path("/proc/net/tcp").read_text(), "none in TIME_WAIT, so nothing was tested"


def test_two_that_start_on_one_port(checkpoints) -> None:
    """One of them serves; the other ends at once, before it loads anything."""
    model, reserved = checkpoints("slow"), reserve_port()
    port = reserved.getsockname()[1]
    servers = [RunningServer(model, *SMALL, port=port) for _ in range(2)]
    try:
        until(lambda: any(server.process.poll() is not None for server in servers))
        loser, winner = sorted(servers, key=lambda server: server.process.poll() is None)
        assert loser.process.returncode == 1 and winner.process.poll() is None
        assert f":{port}" in loser.log.splitlines()[-1] and "lightllm-" not in loser.log
        winner.wait_ready()
        winner.stop()
    finally:
        for server in servers:
            server.kill()


def test_a_free_port_and_a_deep_temporary_folder(checkpoints, tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    env = {"TMPDIR": str(deep)}
    with RunningServer(checkpoints("script"), "--port", "0", *SMALL, env=env) as server:
        until(lambda: "is ready on http://127.0.0.1:" in server.log, PATIENCE)
        last = server.log.splitlines()[-1]
        assert "curl -s http" in last
        port = int(last.partition("http://127.0.0.1:")[2].split(";")[0])
        assert port not in (0, server.port)
        answer = Client("127.0.0.1", port).post("/generate", {"inputs": "A", "parameters": {"do_sample": False}})
        assert answer.json()["generated_text"] == [SCRIPTED]
        (router,) = {path for path in map(Path, unix_sockets(server)) if path.name == "router"}
        server.stop()
        assert not router.parent.exists() and not list(deep.iterdir())


def test_a_full_disk_takes_no_log_and_holds_up_nobody(checkpoints) -> None:
    def full() -> None:
        os.dup2(os.open("/dev/full", os.O_WRONLY), 2)

    with start_server(checkpoints("script"), *SMALL, preexec=full) as server:
        assert server.text("A", do_sample=False) == SCRIPTED


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6")
def test_kernels_of_a_user_without_a_home_go_with_the_server(checkpoints, tmp_path: Path) -> None:
    """As of containers that run under any number: HOME is / there, where nothing can be written."""
    (tmp_path / "file").touch()
    env = {"HOME": str(tmp_path / "file" / "home"), "XDG_CACHE_HOME": ""}
    with start_server(checkpoints("script"), *SMALL, env=env) as server:
        (socket_dir,) = server.tmp.iterdir()
        words = Path(f"/proc/{server.pids()['lightllm-tp0']}/environ").read_text().split("\0")
        assert {f"TRITON_CACHE_DIR={socket_dir}/triton", f"XDG_CACHE_HOME={socket_dir}/cache"} <= set(words)
        assert "nothing is kept for the next start" in server.log
        server.stop()


@pytest.mark.parametrize("home", ["/nowhere", "~"])
def test_folders_that_can_be_written_stay(home: str, tmp_path: Path, monkeypatch) -> None:
    for name in ("HOME", "TRITON_HOME", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path.replace("~", home))
    monkeypatch.setattr(os, "access", lambda path, mode: path != "/")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new" / "cache"))
    assert temporary_caches("/spare") == {"TRITON_CACHE_DIR": "/spare/triton"}
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kernels"))
    assert temporary_caches("/spare") == {}


def test_ipv6(checkpoints) -> None:
    with RunningServer(checkpoints("script"), "--host", "::1", *SMALL) as server:
        until(lambda: f"curl -s http://[::1]:{server.port}/generate" in server.log, PATIENCE)
        server.host = "::1"
        assert server.text("A", do_sample=False) == SCRIPTED
        server.stop()


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.1"])
def test_an_address_that_is_not_ours(checkpoints, host: str) -> None:
    assert host in failed_start(checkpoints("script"), "--host", host)


def unix_sockets(server: RunningServer) -> set[str]:
    """Paths of the unix sockets that its router has bound."""
    inodes = socket_inodes(server.pids()["lightllm-router"])
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return {line[7] for line in lines if len(line) > 7 and line[6] in inodes}


def test_a_process_dies_during_the_drain(checkpoints) -> None:
    """Its clients are told, at once and not at the end of the drain, and the exit code says so."""
    with start_server(checkpoints("slow"), "--max_total_token_num", "16400", "--drain_timeout", "3000") as server:
        pids = server.pids()
        with server.start_stream("dying", **ENDLESS) as stream:
            events = iter(stream)
            next(events)
            server.signal()
            until(lambda: not server.answers("/readiness"))
            os.kill(pids["lightllm-router"], signal.SIGKILL)
            assert "error" in list(events)[-1]
        assert server.wait_gone(pids) == 1
        assert "lightllm-router ended: SIGKILL" in server.log.splitlines()[-1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_while_loading_ends_at_once(checkpoints, number: int) -> None:
    """There is nobody to wait for."""
    with RunningServer(checkpoints("slow"), *SMALL, "--drain_timeout", "3000") as server:
        until(lambda: len(server.pids()) == 4)
        pids = server.pids()
        server.signal(number)
        assert server.wait_gone(pids) == 0
        assert "Traceback" not in server.log and "shutting down" not in server.log


def test_killed_while_loading_leaves_nothing(checkpoints) -> None:
    with RunningServer(checkpoints("slow"), *SMALL) as server:
        until(lambda: len(server.pids()) == 4)
        time.sleep(0.5)
        pids = server.pids()
        server.signal(signal.SIGKILL)
        assert server.wait_gone(pids) == -signal.SIGKILL


def test_a_failure_is_the_last_line(checkpoints, tmp_path: Path) -> None:
    """With two ranks too, of which one only sees that the other is gone."""
    path = checkpoints.copy("llama", tmp_path / "damaged")
    (path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(StartFailed) as failed:
        start_server(path, "--tp", "2", *SMALL)
    last = failed.value.log.splitlines()[-1]
    assert failed.value.returncode == 1
    assert last.startswith("lightllm: lightllm-tp") and "model.safetensors" in last


@pytest.mark.slow
def test_servers_side_by_side(checkpoints) -> None:
    """Started at once, each with its own model; SIGKILL of one is nothing to the others."""
    with ThreadPoolExecutor(3) as pool:
        names = ("script", "llama", "script")
        servers = list(pool.map(lambda name: start_server(checkpoints(name), *SMALL), names))
    try:
        pids = servers[0].pids()
        os.kill(servers[0].process.pid, signal.SIGKILL)
        servers[0].wait_gone(pids)
        assert servers[2].text("A", do_sample=False) == SCRIPTED
        assert all(alive(pid) for server in servers[1:] for pid in server.pids().values())
        for server in servers[1:]:
            server.stop()
    finally:
        for server in servers:
            server.kill()
