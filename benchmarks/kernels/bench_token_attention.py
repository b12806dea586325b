"""Decode attention over shuffled slots: microseconds, share of the read bandwidth, and what skewed lengths cost.

    python -m benchmarks.kernels.bench_token_attention [--sweep]

--sweep tries other tiles and numbers of programs than the kernel's own.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools

import torch

from benchmarks import ceilings
from lightllm.common.basemodel.attention.backend import AttentionSpec
from lightllm.common.basemodel.triton_kernel import decode_plan, token_attention

HEADS, KV_HEADS = 32, 8
UNIFORM = [(1, 1024), (1, 8192), (16, 1024), (64, 1024), (64, 4096), (256, 1024), (256, 2048)]
SKEWED = [32768, *[1560] * 63]  # 128 k tokens


@dataclasses.dataclass
class Case:
    name: str
    kv_lens: list[int]
    head_dim: int

    def __post_init__(self) -> None:
        tokens = sum(self.kv_lens)
        self.bytes = tokens * KV_HEADS * 2 * self.head_dim * 2
        copies = max(2, min(16, int(3e8 / self.bytes)))
        spec, rows = AttentionSpec(self.head_dim**-0.5), len(self.kv_lens)
        self.kv = torch.randn(tokens, KV_HEADS, 2, self.head_dim, dtype=torch.bfloat16, device="cuda")
        pools = [self.kv] + [torch.empty_like(self.kv).normal_() for _ in range(copies - 1)]
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
        self.make_plan = lambda: token_attention.token_plan(q, pools[0], lens, spec)

    def microseconds(self) -> float:
        self.plan = self.make_plan()
        return ceilings.graph_microseconds(self.calls)


def sweep(case: Case, read: float) -> None:
    own, most = token_attention.token_config, decode_plan.MOST_PROGRAMS
    results = {}
    for block_n, warps, stages in itertools.product((64, 128), (4,), (2, 3, 4, 5)):
        changed = {"BLOCK_N": block_n, "num_warps": warps, "num_stages": stages}
        if 2 * 2 * block_n * case.head_dim * 2 * min(stages, 4) > 460000:
            continue
        token_attention.token_config = lambda *shape, changed=changed: own(*shape) | changed
        for programs in (256, 512, 1024, 2048):
            decode_plan.MOST_PROGRAMS = programs
            try:
                results[block_n, warps, stages, programs] = case.microseconds()
            except Exception as error:
                print(block_n, warps, stages, programs, type(error).__name__)
    token_attention.token_config, decode_plan.MOST_PROGRAMS = own, most
    best = sorted(results.items(), key=lambda pair: pair[1])[:4]
    for (block_n, warps, stages, programs), time in best:
        share = case.bytes / time / read * 1e6
        print(f"      {block_n}/{warps}/{stages} {programs} programs: {time:.1f} us {share:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    read = ceilings.read_rate()
    print(f"{torch.cuda.get_device_name()}, read {read / 1e12:.2f} TB/s")
    for head_dim in (128, 64):
        cases = [Case(f"{batch} x {length}", [length] * batch, head_dim) for batch, length in UNIFORM]
        cases.append(Case("64 x 2048", [2048] * 64, head_dim))
        cases.append(Case("1 x 32768, 63 x 1560", SKEWED, head_dim))
        for case in cases:
            time = case.microseconds()
            share = case.bytes / time / read * 1e6
            print(f"head_dim {head_dim:4d} {case.name:22s} {time:8.1f} us {share:6.3f} of the bandwidth", flush=True)
            if options.sweep:
                sweep(case, read)


if __name__ == "__main__":
    main()
