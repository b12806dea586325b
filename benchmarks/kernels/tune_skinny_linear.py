"""Times every configuration of skinny_linear against cuBLAS and writes the table of those that win.

python -m benchmarks.kernels.tune_skinny_linear [--shape 4096x14336 ...] [--out table.json]
"""

from __future__ import annotations

import argparse
import json
from dataclasses import astuple
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks import ceilings
from lightllm.common.basemodel.triton_kernel.skinny_linear import CANDIDATES, MOST_LINES, skinny_linear

SHAPES = [  # outputs x inputs: Llama-3.2-1B, 3B, Llama-3-8B, its halves under --tp 2, Qwen3-8B, Qwen2.5-7B
    "3072x2048", "2048x2048", "16384x2048", "2048x8192", "128256x2048",
    "5120x3072", "3072x3072", "16384x3072", "3072x8192", "128256x3072",
    "6144x4096", "4096x4096", "28672x4096", "4096x14336", "128256x4096",
    "3072x4096", "4096x2048", "14336x4096", "4096x7168", "64128x4096",
    "24576x4096", "4096x12288", "151936x4096", "4608x3584", "3584x3584", "37888x3584", "3584x18944", "152064x3584",
]  # fmt: skip
MARGIN = 0.98  # a kernel must beat cuBLAS by this much to be named


def tune(outputs: int, inputs: int, lines: int, read: float) -> list | None:
    """The best configuration's fields, None if cuBLAS is as good."""
    copies = max(2, min(40, int(3e8 / (2 * outputs * inputs))))
    weights = torch.randn(copies, outputs, inputs, dtype=torch.bfloat16, device="cuda")
    x = torch.randn(lines, inputs, dtype=torch.bfloat16, device="cuda")
    exact = F.linear(x.float(), weights[0].float())
    cublas = ceilings.graph_microseconds([lambda w=w: F.linear(x, w) for w in weights])
    times = {}
    for config in CANDIDATES:
        fits = inputs % (config.block_k * config.split) == 0 and outputs % config.block_n == 0
        if not fits or (lines > 1 and not config.dot):
            continue
        error = (skinny_linear(x, weights[0], None, config).float() - exact).norm() / exact.norm()
        assert error < 1e-2, (config, error)
        calls = [lambda w=w, config=config: skinny_linear(x, w, None, config) for w in weights]
        times[config] = ceilings.graph_microseconds(calls)
    best = min(times, key=times.__getitem__)
    shares = [2 * outputs * inputs / time / read * 1e6 for time in (cublas, times[best])]
    print(
        f"{outputs:7d} x {inputs:6d}, {lines:2d} lines: cuBLAS {cublas:6.1f} us {shares[0]:.2f}, "
        f"{times[best]:6.1f} us {shares[1]:.2f} with {astuple(best)}",
        flush=True,
    )
    return list(astuple(best)) if times[best] < MARGIN * cublas else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=SHAPES, help="outputs x inputs of weights")
    parser.add_argument("--out", type=Path, help="where to write the table")
    options = parser.parse_args()
    read = ceilings.read_rate()
    table = {}
    for shape in options.shape:
        outputs, inputs = map(int, shape.split("x"))
        found = {str(lines): tune(outputs, inputs, lines, read) for lines in (1, MOST_LINES)}
        table[shape] = {lines: config for lines, config in found.items() if config}
    if options.out:
        lines = ",\n".join(f"  {json.dumps(shape)}: {json.dumps(configs)}" for shape, configs in table.items())
        options.out.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
