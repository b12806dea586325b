"""--profile_dir: traces that are begun and ended over HTTP."""

import gzip
import json
from pathlib import Path

import pytest
from support.checkpoints import build
from support.server import StartFailed, start_server

from lightllm.server.router.model_infer.step_tracer import StepTracer


def test_asking_twice_changes_nothing(tmp_path: Path) -> None:
    tracer = StepTracer(tmp_path / "traces", 3)
    tracer.trace(False)
    assert not (tmp_path / "traces").exists()
    for on in (True, True, False, False):
        tracer.trace(on)
    (trace,) = (tmp_path / "traces").iterdir()
    assert trace.name.startswith("rank3-") and json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    for on in (True, False):
        tracer.trace(on)
    assert len(list((tmp_path / "traces").iterdir())) == 2, "in the same second"


def test_a_trace_that_cannot_be_written_is_lost_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    tracer = StepTracer(tmp_path / "file" / "traces", 0)
    for on in (True, False, True, False):
        tracer.trace(on)


def test_a_folder_that_cannot_be_written_is_told_at_the_start(tmp_path: Path) -> None:
    model_dir = build("llama", tmp_path / "llama")
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(StartFailed, match=r"--profile_dir \S+/file/traces cannot be written\n$"):
        start_server(model_dir, "--profile_dir", str(tmp_path / "file" / "traces"))


@pytest.mark.slow
def test_traces_over_http(tmp_path: Path) -> None:
    model_dir, folder = build("llama", tmp_path / "llama"), tmp_path / "traces"
    with start_server(model_dir, "--profile_dir", str(folder)) as server:
        assert server.post("/start_profile", {}).status == 200
        server.ids([1, 2, 3], max_new_tokens=4)
        assert server.post("/stop_profile", {}).status == 200
        server.ids([1, 2, 3], max_new_tokens=4)  # after the trace was written
        (trace,) = folder.iterdir()
        assert "aten::linear" in gzip.decompress(trace.read_bytes()).decode()
        assert server.post("/start_profile", {}).status == 200
        server.ids([1, 2, 3], max_new_tokens=4)
    (last,) = set(folder.iterdir()) - {trace}
    assert "aten::linear" in gzip.decompress(last.read_bytes()).decode(), "of the end of the server"
    with start_server(model_dir) as server:
        assert server.post("/start_profile", {}).status == 404
