"""What may import what: one direction, one home for each library, a router without torch, no environment."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "lightllm"
FILES = sorted(PACKAGE.rglob("*.py"))

# From the lowest to the highest; a layer imports itself and what is below it.
LAYERS = (
    ("utils",),
    ("distributed",),
    ("common/triton_utils",),
    ("common/basemodel",),
    ("common/kv_cache_mem_manager", "common/sampling"),
    ("common/grammar",),
    ("models",),
    ("server",),
    ("llm.py", "__init__.py"),
    ("server/terminal.py", "server/api_cli.py", "server/api_server.py", "_server_shim"),  # the command line
)
HOMES = {
    "zmq": ("server/core/channel.py",),
    "fastapi": ("server/api_",),
    "starlette": ("server/api_",),
    "uvicorn": ("server/api_",),
    "prometheus_client": ("server/httpserver/metrics.py",),
    "llguidance": ("common/grammar/llguidance_backend.py",),
    "xgrammar": ("common/grammar/xgrammar_backend.py",),
    "opentelemetry": ("server/httpserver/tracing.py",),
    "argparse": ("server/api_cli.py",),
    "triton": ("common/triton_utils/", "common/basemodel/triton_kernel/"),
}
LOCATIONS = ("XDG_CACHE_HOME",)  # where a platform keeps files: variables that may be read
HEAVY = ("torch", "transformers", "triton")


def place(file: Path) -> str:
    return file.relative_to(PACKAGE).as_posix()


@cache
def nodes_of(file: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(file.read_text(), str(file))))


def imports(file: Path) -> Iterator[tuple[str, int]]:
    """Absolute names of all modules that a file imports anywhere, with their lines; names it imports from them too."""
    for node in nodes_of(file):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{place(file)}:{node.lineno}: a relative import"
            assert node.module is not None
            yield node.module, node.lineno
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno


def layer_of(path: str) -> int:
    for level, members in reversed(list(enumerate(LAYERS))):
        if any(path == member or path.startswith(member + "/") for member in members):
            return level
    raise AssertionError(f"{path} is in no layer")


@cache
def path_of(module: str) -> str | None:
    """Of a module of ours, relative to the package; None for anything else."""
    first, *rest = module.split(".")
    if first != "lightllm":
        return None
    for length in range(len(rest), -1, -1):
        path = PACKAGE.joinpath(*rest[:length])
        if path.with_suffix(".py").is_file() and rest[:length]:
            return "/".join(rest[:length]) + ".py"
        if path.is_dir():
            return "/".join([*rest[:length], "__init__.py"])
    raise AssertionError(module)


@pytest.mark.parametrize("file", FILES, ids=place)
def test_imports_run_one_way(file: Path) -> None:
    own = layer_of(place(file)) if file.name != "__init__.py" or file.parent == PACKAGE else None
    for module, line in imports(file):
        target = path_of(module)
        if target is None or target == "__init__.py":
            continue
        assert own is not None, f"{place(file)}:{line}: an __init__.py that imports"
        assert layer_of(target) <= own, f"{place(file)}:{line} imports {module}, which is above it"


def test_layers_of_one_level_do_not_know_each_other() -> None:
    for file in FILES:
        own = place(file)
        for members in LAYERS:
            home = next((member for member in members if own.startswith(member + "/")), None)
            for module, line in imports(file):
                target = path_of(module) or ""
                others = [member for member in members if home and member != home and target.startswith(member + "/")]
                assert not others, f"{own}:{line} imports {module}"


@pytest.mark.parametrize("library", HOMES)
def test_a_library_has_one_home(library: str) -> None:
    for file in FILES:
        for module, line in imports(file):
            if module.partition(".")[0] == library:
                assert place(file).startswith(HOMES[library]), f"{place(file)}:{line} imports {module}"


@pytest.mark.parametrize("file", FILES, ids=place)
def test_no_environment_variable_is_read(file: Path) -> None:
    """What a flag should change no variable changes. Handing the whole environment to a child is no reading."""
    for node in nodes_of(file):
        read = None
        if isinstance(node, ast.Call):
            names = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            read = None if names and names[0] in LOCATIONS else ast.unparse(node.func)
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            read = ast.unparse(node.value)
        assert read not in ("os.getenv", "getenv", "os.environ", "environ", "os.environ.get", "environ.get"), (
            f"{place(file)}:{getattr(node, 'lineno', 0)} reads the environment"
        )


@pytest.mark.parametrize("file", FILES, ids=place)
def test_no_module_state_is_rebound(file: Path) -> None:
    """No hidden globals: parallel state, arguments and step facts are passed."""
    for node in nodes_of(file):
        assert not isinstance(node, ast.Global), f"{place(file)}:{node.lineno} has a global statement"


def test_what_imports_nothing_heavy() -> None:
    """`import lightllm`, the launcher, the fronts, the router, the detokenizer and all that they import."""
    light = [
        "lightllm",
        "lightllm.server.core.messages",
        "lightllm.server.core.channel",
        "lightllm.server.router.manager",
        "lightllm.server.router.scheduler",
        "lightllm.server.router.admission",
        "lightllm.common.kv_cache_mem_manager.token_pool",
        "lightllm.server.api_cli",
        "lightllm.server.api_start",
        "lightllm.server.api_server",
        "lightllm.server.api_http",
        "lightllm.server.detokenization.manager",
        "lightllm.server.terminal",
        "lightllm.utils.process_utils",
    ]
    program = f"""
import importlib, sys
for module in {light!r}:
    importlib.import_module(module)
    assert not set({HEAVY!r}) & set(sys.modules), module
from lightllm import SamplingParams
assert "torch" not in sys.modules, "SamplingParams"
"""
    subprocess.run([sys.executable, "-c", program], cwd=PACKAGE.parent, check=True)
