"""Decode attention over shuffled slots: microseconds, share of the read bandwidth, what skewed lengths cost, and how
much faster a cache in 8 bits is.

    python -m benchmarks.kernels.bench_token_attention [--sweep] [--kv plain int8 fp8]

--sweep tries other tiles and numbers of programs than the kernel's own.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json

import torch
import triton

from benchmarks import ceilings
from benchmarks.arguments import need_gpu, results_file
from lightllm.common.basemodel.attention.backend import AttentionSpec
from lightllm.common.basemodel.triton_kernel import token_attention
from lightllm.common.basemodel.triton_kernel.decode_plan import PlanSize
from lightllm.common.basemodel.triton_kernel.quantized_kv import LayerKV, QuantizedKV

HEADS, KV_HEADS = 32, 8
UNIFORM = [(1, 1024), (1, 8192), (1, 32768), (16, 1024), (64, 1024), (64, 2048), (64, 4096), (256, 1024), (256, 2048)]
UNEVEN = {f"{rows} x 100 to 1948": [100 + 1848 * i // (rows - 1) for i in range(rows)] for rows in (16, 64, 128)}
SKEWED = {"1 x 32768, 63 x 1560": [32768, *[1560] * 63]}  # as many tokens as 64 x 2048
CASES = {f"{batch} x {length}": [length] * batch for batch, length in UNIFORM} | UNEVEN | SKEWED
FORMATS = ("plain", "int8", "fp8")
TILES = [  # keys, stages, warps
    (32, 3, 1), (32, 5, 1), (64, 2, 1), (64, 4, 1), (64, 3, 2), (128, 2, 2), (128, 3, 2), (64, 2, 4), (128, 2, 4),
    (128, 3, 4), (256, 2, 4),
]  # fmt: skip


def random_kv(tokens: int, head_dim: int, kv: str) -> LayerKV:
    numbers = torch.randn(tokens, KV_HEADS, 2, head_dim, dtype=torch.bfloat16, device="cuda")
    if kv == "plain":
        return numbers
    scales = torch.rand(tokens, KV_HEADS, 2, dtype=torch.float16, device="cuda") * 0.01 + 0.02
    if kv == "fp8":
        return QuantizedKV((numbers * 100).clamp(-448, 448).to(torch.float8_e4m3fn), scales)
    return QuantizedKV((numbers * 40 + 128.5).clamp(1, 255).to(torch.uint8), scales)


@dataclasses.dataclass
class Case:
    name: str
    kv_lens: list[int]
    head_dim: int
    kv: str = "plain"

    def __post_init__(self) -> None:
        tokens = sum(self.kv_lens)
        self.bytes = tokens * KV_HEADS * 2 * (self.head_dim * 2 if self.kv == "plain" else self.head_dim + 2)
        copies = max(2, min(16, int(3e8 / self.bytes)))
        spec, rows = AttentionSpec(self.head_dim**-0.5), len(self.kv_lens)
        pools = [random_kv(tokens, self.head_dim, self.kv) for _ in range(copies)]
        table = torch.zeros(rows, max(self.kv_lens), dtype=torch.int32, device="cuda")
        slots = torch.randperm(tokens, device="cuda").int().split(self.kv_lens)
        for row, of_row in enumerate(slots):
            table[row, : len(of_row)] = of_row
        q = torch.randn(rows, HEADS, self.head_dim, dtype=torch.bfloat16, device="cuda")
        index = torch.arange(rows, dtype=torch.int32, device="cuda")
        lens = torch.tensor(self.kv_lens, dtype=torch.int32, device="cuda")
        self.calls = [
            lambda pool=pool: token_attention.token_attention(q, pool, table, index, lens, spec, None, self.plan)
            for pool in pools
        ]
        self.make_plan = lambda: token_attention.token_plan(q, pools[0], index, lens, spec)

    def microseconds(self) -> float:
        self.plan = self.make_plan()
        return ceilings.graph_microseconds(self.calls)


def sweep(case: Case, read: float) -> None:
    own = token_attention.token_sizes
    results = {}
    for (block_n, stages, warps), programs in itertools.product(TILES, (264, 528, 1056)):
        items = max(programs // KV_HEADS, len(case.kv_lens))
        sizes = token_attention.Sizes(block_n, stages, warps, PlanSize(items, 0))
        token_attention.token_sizes = lambda *shape, sizes=sizes: sizes
        with contextlib.suppress(triton.runtime.errors.OutOfResources):
            results[block_n, stages, warps, programs] = case.microseconds()
    token_attention.token_sizes = own
    for (block_n, stages, warps, programs), time in sorted(results.items(), key=lambda pair: pair[1])[:6]:
        share = case.bytes / time / read * 1e6
        print(
            f"      {block_n} keys, {stages} stages, {warps} warps, {programs}: {time:.1f} us {share:.3f}", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--case", choices=CASES, nargs="+", default=list(CASES), metavar="CASE", help="only these")
    parser.add_argument("--kv", choices=FORMATS, nargs="+", default=list(FORMATS))
    parser.add_argument("--head_dim", type=int, nargs="+", default=[128, 64])
    parser.add_argument("--json", type=results_file, help="where to write the results")
    options = parser.parse_args()
    need_gpu(parser)
    read = ceilings.read_rate()
    print(f"{torch.cuda.get_device_name()}, read {read / 1e12:.2f} TB/s")
    results = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "read": read, "cases": []}
    for head_dim in options.head_dim:
        for name, kv in itertools.product(options.case, options.kv):
            case = Case(name, CASES[name], head_dim, kv)
            time = case.microseconds()
            share = case.bytes / time / read * 1e6
            results["cases"].append(dict(head_dim=head_dim, case=name, kv=kv, microseconds=time, share=share))
            print(f"head_dim {head_dim:4d} {name:22s} {kv:6s} {time:8.1f} us {share:6.3f} of the bandwidth", flush=True)
            if options.sweep:
                sweep(case, read)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
