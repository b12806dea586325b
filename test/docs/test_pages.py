"""What README and docs/ name exists: files, anchors, flags, and the fields of requests."""

import re
from dataclasses import fields
from pathlib import Path

import msgspec
import pytest
from support.server import REPOSITORY

from lightllm.server.api_models import Parameters
from lightllm.server.api_openai_models import ChatBody, CompletionBody
from lightllm.server.api_tgi import TgiParameters
from lightllm.server.core.server_args import ServerArgs
from lightllm.server.terminal import BenchOptions, OutputOptions

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(REPOSITORY)) for page in PAGES]
NOT_OURS = {"config.json", "generation_config.json", "tokenizer.json", "lightllm/models/granite/model.py"}
OF_DOCKER = {"--gpus", "--stop-timeout", "--shm-size"}


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings, and those that the page sets itself."""
    text = page.read_text()
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r'id="(\w+)"', text))


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!http)([^)]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists() and (not anchor or anchor in anchors(target)), link


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_files_are_where_the_page_says(page: Path) -> None:
    folders = ("lightllm", "test", "benchmarks", "docs")
    files = [
        "/" + path.relative_to(REPOSITORY).as_posix() for top in folders for path in (REPOSITORY / top).rglob("*.*")
    ]
    names = set(re.findall(r"`(\w[\w/]*\.(?:py|md|json))`", page.read_text()))
    assert [name for name in names - NOT_OURS if not any(file.endswith(f"/{name}") for file in files)] == []


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_flags_exist(page: Path) -> None:
    if page.name == "clients.md":  # names other programs' flags
        return
    ours = {f"--{field.name}" for kind in (ServerArgs, BenchOptions, OutputOptions) for field in fields(kind)}
    programs = [REPOSITORY / "lightllm/server/api_cli.py", *(REPOSITORY / "benchmarks").rglob("*.py")]
    ours |= {flag for path in programs for flag in re.findall(r'"(--[\w-]+)"', path.read_text())}
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", page.read_text())) <= ours | OF_DOCKER


@pytest.mark.parametrize("kind", [Parameters, ChatBody, CompletionBody, TgiParameters])
def test_every_field_of_a_request_is_on_the_page(kind: type[msgspec.Struct]) -> None:
    words = set(re.findall(r"\w+", (REPOSITORY / "docs/api.md").read_text()))
    assert {field.encode_name for field in msgspec.structs.fields(kind)} <= words
