"""Schemathesis on the server's own description: no 500, and every answer as described."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from front.scripted_engine import Front, ScriptedEngine, serving

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


@pytest.fixture(scope="module")
def served(chat_tokenizer, chat_dir) -> Iterator[tuple[Front, ScriptedEngine]]:
    with serving(chat_tokenizer, model_dir=str(chat_dir), request_log="none") as front_and_engine:
        yield front_and_engine


@pytest.mark.slow
def test_whatever_fits_the_description_is_answered_as_described(front, engine, tmp_path) -> None:
    pytest.importorskip("schemathesis")
    engine.burst = 50
    program = str(Path(sys.executable).with_name("st"))
    ran = subprocess.run(
        [program, "run", f"{front.url}/openapi.json", "--max-examples", "25", "--generation-deterministic",
         "--phases", "examples,coverage,fuzzing", "--continue-on-failure", "--checks", CHECKS],
        cwd=tmp_path, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-6000:]
