"""The examples of docs/api.md and docs/clients.md run as they stand, against a server on another port."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.server import REPOSITORY, RunningServer, start_server

PAGES = ["docs/api.md", "docs/clients.md"]
EXAMPLES = [
    pytest.param(kind, code, id=f"{Path(page).stem}-{kind}{number}")
    for page in PAGES
    for number, (kind, code) in enumerate(
        re.findall(r"^```(bash|python)\n(.*?)^```", (REPOSITORY / page).read_text(), re.S | re.M)
    )
]


SERVED = ("--model_name", "SmolLM2-135M-Instruct")


@pytest.fixture
def documented(serve) -> RunningServer:
    return serve("script", *SERVED, max_position_embeddings=2048)


@pytest.mark.parametrize(("kind", "code"), EXAMPLES)
def test_an_example(documented: RunningServer, checkpoints, kind: str, code: str) -> None:
    if started := re.match("# lightllm serve (.*)\n", code):
        with start_server(checkpoints("script"), *SERVED, *started[1].split()) as server:
            run(server, kind, code)
    else:
        run(documented, kind, code)


def run(server: RunningServer, kind: str, code: str) -> None:
    code = code.replace("localhost:8000", f"127.0.0.1:{server.port}").replace("curl -s", "curl -sSf")
    command = [sys.executable, "-c", code] if kind == "python" else ["bash", "-euc", code]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr[-2000:]


def test_every_path_is_on_the_page(documented: RunningServer) -> None:
    paths = documented.get("/openapi.json").json()["paths"]
    page = (REPOSITORY / "docs/api.md").read_text()
    missing = [path for path in paths if f"`{path.replace('{name}', 'NAME')}`" not in page]
    assert missing == []


def test_every_metric_of_the_dashboard_exists(documented: RunningServer) -> None:
    documented.generate("A", max_new_tokens=3)
    metrics = documented.get("/metrics").body.decode()
    dashboard = json.loads((REPOSITORY / "docs/watching/grafana.json").read_text())
    expressions = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    for name in set(re.findall(r"lightllm_\w+", expressions)):
        assert f"\n{name}" in metrics, name
