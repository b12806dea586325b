"""Attention of prompts: TFLOP/s of our kernel over the token cache and of cuDNN over gathered keys.

    python -m benchmarks.kernels.bench_context_attention

`fresh` prompts have nothing in the cache; `behind` ones continue a prefix of that many tokens, which cuDNN attends to
apart and joins by log-sum-exp.
"""

import argparse
import functools
import itertools
import json
from collections.abc import Callable, Iterator

import torch

from benchmarks import ceilings
from benchmarks.arguments import need_gpu, results_file
from benchmarks.kernels.bench_token_attention import FORMATS, HEADS, random_kv
from lightllm.common.basemodel.attention.backend import AttentionSpec
from lightllm.common.basemodel.attention.library_attention import library_attention
from lightllm.common.basemodel.infer_struct import Chunks
from lightllm.common.basemodel.triton_kernel.context_attention import context_attention

LENGTHS = [(0, 256), (0, 1024), (0, 2048), (0, 8192), (2048, 2048), (24576, 8192)]  # prefix, chunk


def cases(head_dim: int, prefix: int, chunk: int) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """What is measured of a shape, by name."""
    total = prefix + chunk
    q = torch.randn(chunk, HEADS, head_dim, dtype=torch.bfloat16, device="cuda")
    table = torch.randperm(total, device="cuda").int()[None]
    row = [torch.tensor(values, dtype=torch.int32, device="cuda") for values in ([0], [prefix], [chunk], [0, chunk])]
    spec = AttentionSpec(head_dim**-0.5)
    for kind in FORMATS:
        kv = random_kv(total, head_dim, kind)
        yield f"ours, {kind}", functools.partial(context_attention, q, kv, table, Chunks(*row, chunk), spec)
        yield f"cuDNN, {kind}", functools.partial(library_attention, q, kv, table[0], spec.scale)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=results_file, help="where to write the results")
    options = parser.parse_args()
    need_gpu(parser)
    results = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cases": []}
    for head_dim, (prefix, chunk) in itertools.product((128, 64), LENGTHS):
        flops = 4 * HEADS * head_dim * (chunk * prefix + chunk**2 / 2)
        for name, work in cases(head_dim, prefix, chunk):
            time = ceilings.milliseconds(work, 7)
            case = dict(head_dim=head_dim, prefix=prefix, chunk=chunk, what=name, ms=time, tflops=flops / time / 1e9)
            results["cases"].append(case)
            print(
                "{head_dim:4d} {prefix:6d} + {chunk:5d} {what:14s} {ms:8.3f} ms {tflops:6.0f}".format(**case),
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
