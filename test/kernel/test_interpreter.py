"""Runs the tests of kernels under Triton's interpreter, which must be chosen before triton is imported: in processes of
their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("file", ["test_kernels.py", "test_quantized_kernels.py"])
def test_kernels_equal_their_twins_under_the_interpreter(file: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"test/kernel/{file}"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
