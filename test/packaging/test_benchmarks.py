"""The scripts of benchmarks/: what they refuse before they measure, and what the tuning of products tries."""

import runpy
import shlex
import sys

import pytest
import torch
from kernel.test_few_lines_linear import SHARED_MEMORY
from support.server import REPOSITORY

from lightllm.common.basemodel.triton_kernel.few_lines_linear import BLOCK_K, LINES
from lightllm.common.basemodel.triton_kernel.ring_linear import RingConfig
from lightllm.common.basemodel.triton_kernel.skinny_linear import MOST_LINES
from lightllm.common.basemodel.triton_kernel.some_lines_linear import LINES as MORE_LINES

FOLDER = REPOSITORY / "benchmarks"
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="would measure this GPU")


@pytest.fixture(autouse=True)
def as_a_script(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY))
    monkeypatch.syspath_prepend(str(FOLDER))  # scripts find each other there


def end_of(command: str, monkeypatch, capsys) -> tuple[object, str]:
    """Exit code and stderr of a script that ends by itself."""
    script, *arguments = shlex.split(command)
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(FOLDER / script), run_name="__main__")
    return end.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("bench_offline.py --shape tiny --json /nowhere/out.json", "/nowhere/out.json cannot be written"),
        ("bench_offline.py --shape tiny --json /tmp", "/tmp cannot be written"),
        ("bench_offline.py --shape tiny --requests 0", "must be at least 1, not 0"),
        ("bench_offline.py --shape tiny --requests many", "invalid count value: 'many'"),
        ("bench_serving.py --shape tiny --decode 0", "must be at least 1, not 0"),
        ("bench_serving.py --shape tiny --rate -1", "must be 0 or more, not -1"),
        ("bench_serving.py --shape tiny --set fixed --api openai", "--api openai needs --tokenizer_dir"),
        ("bench_policies.py --shape tiny --device cpu --policies foo", "invalid choice: 'foo'"),
        ("bench_policies.py --shape tiny --device cpu --rate 0", "--rate must be more than 0"),
        ("bench_transformers.py --shape tiny --tokens 1", "--tokens must be at least 2"),
        ("bench_cpu.py --model_dir /nowhere", "--model_dir /nowhere does not exist"),
        ("../test/model/model_infer.py --model_dir /nowhere", "--model_dir /nowhere does not exist"),
        ("../test/model/model_infer.py --batch 0", "must be at least 1, not 0"),
        ("bench_scheduler.py --seeds 0", "must be at least 1, not 0"),
        ("bench_scheduler.py --loads 0.5 1 0", "--loads"),
        ("bench_scheduler.py --out /nowhere", "/nowhere cannot be written"),
        ("report.py table /nowhere", "/nowhere holds no results"),
        ("kernels/bench_token_attention.py --case foo", "invalid choice: 'foo'"),
        ("kernels/tune_skinny_linear.py --shape 4096", "invalid weight value: '4096'"),
    ],
)
def test_wrong_arguments_are_told_before_anything_is_measured(command: str, told: str, monkeypatch, capsys) -> None:
    code, err = end_of(command, monkeypatch, capsys)
    assert code == 2 and told in err.splitlines()[-1]


@needs_no_gpu
@pytest.mark.parametrize(
    "command",
    [
        "bench_static.py --shape tiny",
        "bench_tp.py --shape tiny",
        "bench_policies.py --shape tiny",
        "report.py run /tmp",
        *(f"kernels/{script.name}" for script in sorted((FOLDER / "kernels").glob("*.py"))),
    ],
)
def test_what_needs_a_gpu_says_so(command: str, monkeypatch, capsys) -> None:
    code, err = end_of(command, monkeypatch, capsys)
    assert code == 2 and err.endswith("error: this is measured on a GPU, and torch finds none here\n")


def test_every_product_of_every_model_has_configurations_to_try() -> None:
    from benchmarks.kernels.tune_few_lines_linear import MODELS, candidates, weight_shapes

    for model in MODELS:
        for name, (outputs, inputs) in weight_shapes(model).items():
            for lines in (MOST_LINES, *LINES, *MORE_LINES):
                tried = candidates(name, outputs, inputs, lines)
                assert tried, (model, name, lines)
            for ring in candidates(name, outputs, inputs, MOST_LINES):
                assert isinstance(ring, RingConfig) and ring.fits(outputs, inputs, name == "gate_up")
                tile = ring.tile_rows + MOST_LINES * ring.stack
                assert 2 * BLOCK_K * tile * ring.num_stages < SHARED_MEMORY - 2048
