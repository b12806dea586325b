"""Every kernel, with every tile size it is launched with, compiles for GPUs that are not here and fits their memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_kernels_compile_and_fit_shared_memory(target: str) -> None:
    root = Path(__file__).parents[2]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": f"{root}:{root / 'test'}", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "test/support/compile_kernels.py", target]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    problems = [line for line in done.stdout.splitlines() if line.startswith(f"{target} ")]
    assert not problems, "\n".join(problems)
    assert f"{target}: " in done.stdout
