from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.checkpoints import SCRIPTED, Checkpoints, reference
from support.server import RunningServer, start_server

MAX_SERVERS = 6  # shared ones that run at once
Serve = Callable[..., RunningServer]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def shared_servers(checkpoints: Checkpoints) -> Iterator[Serve]:
    """serve(name, *flags, **overrides): a server of a checkpoint that tests share, started when first asked for."""
    running: dict[str, RunningServer] = {}

    def serve(name: str, *flags: str, **overrides: object) -> RunningServer:
        key = f"{name} {flags} {sorted(overrides.items())}"
        server = running.pop(key, None)
        if server is None:
            while len(running) >= MAX_SERVERS:
                running.pop(next(iter(running))).stop()
            server = start_server(checkpoints(name, **overrides), "--max_total_token_num", "4096", *flags)
        running[key] = server
        return server

    yield serve
    failures = []
    for server in running.values():
        try:
            server.stop()
        except AssertionError as failure:
            failures.append(failure)
    assert not failures, failures


@pytest.fixture
def serve(shared_servers: Serve) -> Iterator[Serve]:
    """As `shared_servers`; every server that a test used must be alive and idle after it."""
    used: list[RunningServer] = []

    def use(name: str, *flags: str, **overrides: object) -> RunningServer:
        used.append(shared_servers(name, *flags, **overrides))
        return used[-1]

    yield use
    for server in used:
        assert_alive(server)


@pytest.fixture
def script(serve: Serve) -> RunningServer:
    """The scripted checkpoint, byte tokenizer, context 512."""
    return serve("script")


@pytest.fixture
def rand(serve: Serve) -> RunningServer:
    """The random LLaMA, context 512."""
    return serve("llama")


def assert_alive(server: RunningServer) -> None:
    """It still answers exactly, and all that was asked of it before has ended and freed its KV."""
    assert server.get("/health").status == 200
    name = Path(str(server.model_dir)).name
    if name.startswith("script"):
        probe = server.generate("A", do_sample=False)
        assert probe["generated_text"] == [SCRIPTED] and probe["finish_reason"] == "stop"
    elif not name.startswith(("spm", "space")):
        expected = reference(Path(str(server.model_dir)), (65, 66, 67), 4)
        assert tuple(server.ids([65, 66, 67], do_sample=False, max_new_tokens=4, ignore_eos=True)) == expected.tokens
    server.wait_idle()
