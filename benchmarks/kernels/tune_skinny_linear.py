"""Times every configuration of skinny_linear against a norm and cuBLAS, and writes the table of those that win.

python -m benchmarks.kernels.tune_skinny_linear [--shape 4096x14336 ...] [--out table.json]
"""

import argparse
import json

import torch

from benchmarks import ceilings
from benchmarks.arguments import count, need_gpu, results_file
from lightllm.common.basemodel.tune_products import LINES, tune

SHAPES = [  # outputs x inputs: Llama-3.2-1B, 3B, Llama-3-8B, its halves under --tp 2, Qwen3-8B, Qwen2.5-7B, 32B, halves
    "3072x2048", "2048x2048", "16384x2048", "2048x8192", "128256x2048",
    "5120x3072", "3072x3072", "16384x3072", "3072x8192", "128256x3072",
    "6144x4096", "4096x4096", "28672x4096", "4096x14336", "128256x4096",
    "3072x4096", "4096x2048", "14336x4096", "4096x7168", "64128x4096",
    "24576x4096", "4096x12288", "151936x4096", "4608x3584", "3584x3584", "37888x3584", "3584x18944", "152064x3584",
    "10240x5120", "5120x8192", "51200x5120", "5120x25600", "128256x5120",
    "5120x5120", "5120x4096", "25600x5120", "5120x12800", "64128x5120",
]  # fmt: skip


def weight(text: str) -> tuple[int, int]:
    outputs, inputs = text.split("x")
    return count(outputs), count(inputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shape", type=weight, nargs="+", default=[*map(weight, SHAPES)], help="outputs x inputs of weights"
    )
    parser.add_argument("--out", type=results_file, help="where to write the table")
    options = parser.parse_args()
    need_gpu(parser)
    read = ceilings.read_rate()
    table = {}
    for outputs, inputs in options.shape:
        found = table[f"{outputs}x{inputs}"] = {}
        for lines in LINES:
            config, cublas, ours = tune(outputs, inputs, lines, torch.device("cuda"))
            shares = [2 * outputs * inputs / time / read * 1e6 for time in (cublas, ours)]
            print(
                f"{outputs:7d} x {inputs:6d}, {lines:2d} lines: cuBLAS {cublas:6.1f} us {shares[0]:.2f}, "
                f"{ours:6.1f} us {shares[1]:.2f} with {config}",
                flush=True,
            )
            if config:
                found[str(lines)] = config
    if options.out:
        lines = ",\n".join(f"  {json.dumps(shape)}: {json.dumps(configs)}" for shape, configs in table.items())
        options.out.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
