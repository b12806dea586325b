"""docs/options.md is what the flags say."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

from support.server import REPOSITORY

from lightllm.server.api_cli import OPTIONS_PAGE, options_page
from lightllm.server.core.server_args import ServerArgs


def test_the_page_is_not_stale() -> None:
    assert (REPOSITORY / OPTIONS_PAGE).read_text() == options_page(), "run `make options`"


def test_one_line_for_each_flag() -> None:
    flags = [line.split("`")[1] for line in options_page().splitlines() if line.startswith("| `")]
    assert flags == [f"--{field.name}" for field in fields(ServerArgs)]


def test_the_command_writes_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lightllm.server.api_cli", "options", "--path", "page.md"]
    subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, check=True)
    assert (tmp_path / "page.md").read_text() == options_page()
