"""Sweeps tiles and launch sizes of the kernels of mixtures of experts and of latent attention.

    python -m benchmarks.kernels.tune_families [--only experts latent prompt] [--json out.json]

Shapes are those of Qwen3-30B-A3B and DeepSeek-V2-Lite. Configurations are compiled side by side first. Each line is one
case with its best configurations; the share is that of the read bandwidth (decode) or of the matrix rate (prompts).
"""

import argparse
import functools
import itertools
import json
import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks import ceilings
from benchmarks.arguments import count, need_gpu, results_file
from lightllm.common.basemodel.attention.backend import AttentionSpec
from lightllm.common.basemodel.infer_struct import Chunks
from lightllm.common.basemodel.triton_kernel.decode_plan import PlanSize, plan_decode
from lightllm.common.basemodel.triton_kernel.grouped_gemm import GemmConfig, Routing, grouped_gemm
from lightllm.common.basemodel.triton_kernel.latent_attention import latent_attention
from lightllm.common.basemodel.triton_kernel.latent_context_attention import latent_context_attention
from lightllm.common.basemodel.triton_kernel.lone_token_experts import LoneConfig, lone_product, lone_sum
from lightllm.common.basemodel.triton_kernel.select_experts import TopK, select_experts
from lightllm.common.basemodel.triton_kernel.weighted_sum import weighted_sum

DEVICE = "cuda"
HIDDEN, ROPE, RANK, NOPE, VALUE, HEADS = 2048, 64, 512, 128, 128, 16
MIXTURES = {"qwen3": (128, 8, 768), "deepseek": (64, 6, 1408)}  # experts, of a token, size
GEMM = {  # lines of a program -> configurations: BLOCK_N, BLOCK_K, num_warps, num_stages
    16: [(16, 256, 4, 3), (32, 128, 4, 4), (32, 256, 4, 3), (64, 64, 4, 5), (64, 128, 4, 3), (64, 128, 4, 4),
         (64, 128, 8, 3), (128, 64, 4, 4), (128, 128, 8, 3)],
    32: [(32, 128, 4, 4), (64, 64, 4, 5), (64, 128, 4, 3), (64, 128, 4, 4), (128, 64, 4, 4), (128, 64, 8, 4)],
    64: [(64, 64, 4, 4), (64, 128, 4, 3), (128, 64, 4, 4), (128, 64, 8, 4), (256, 64, 8, 3)],
    128: [(64, 64, 4, 4), (64, 64, 8, 4), (128, 64, 4, 3), (128, 64, 8, 3), (128, 64, 8, 4), (256, 64, 8, 3)],
}  # fmt: skip
LONE = [  # of a lone token: BLOCK_N, BLOCK_K, num_warps
    (1, 2048, 4), (2, 1024, 2), (2, 1024, 4), (2, 2048, 4), (4, 512, 4), (4, 1024, 2), (4, 1024, 4), (4, 2048, 8),
    (8, 256, 4), (8, 512, 4), (8, 1024, 8), (16, 128, 4), (16, 256, 4),
]  # fmt: skip
KERNELS = ("experts", "latent", "prompt")
BLOCKS = {16: [16, 32], 64: [16, 32], 256: [16, 32, 64], 1024: [64, 128], 8192: [128]}  # by tokens
# With 64 keys, 4 warps and 1 stage triton 3.6 reads beyond shared memory in the last product (compute-sanitizer).
LATENT = [(32, 4, 2), (32, 4, 3), (64, 4, 2), (64, 4, 3), (64, 8, 2), (64, 8, 3)]  # BLOCK_N, num_warps, num_stages
PROMPT = [  # BLOCK_M, BLOCK_N, num_warps, num_stages
    (64, 32, 4, 3), (64, 64, 4, 2), (64, 64, 4, 3), (128, 32, 8, 3), (128, 64, 4, 2), (128, 64, 8, 2), (128, 64, 8, 3),
    (128, 128, 8, 2),
]  # fmt: skip


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@dataclass(frozen=True)
class Blocked(Routing):
    """With so many lines in a block."""

    size: int = 16

    @property
    def block(self) -> int:
        return self.size


def random_ids(tokens: int, experts: int, k: int) -> torch.Tensor:
    return torch.rand(tokens, experts, device=DEVICE).topk(k).indices.int()


@functools.cache
def weights(name: str, gated: bool) -> torch.Tensor:
    experts, _, size = MIXTURES[name]
    shape = (experts, 2 * size, HIDDEN) if gated else (experts, HIDDEN, size)
    return randn(*shape) * shape[2] ** -0.5


def expert_case(
    name: str, tokens: int, gated: bool, block: int, config: GemmConfig
) -> tuple[list[Callable], float, float]:
    """(calls, bytes, operations): gate and up, or down."""
    experts, k, _ = MIXTURES[name]
    weight = weights(name, gated)
    x = randn(tokens if gated else tokens * k, weight.shape[2])
    calls, read = [], 0.0
    for i in range(4):
        torch.manual_seed(i)
        routing = Blocked(random_ids(tokens, experts, k), 0, experts, block)
        _ = routing.blocks
        read += len(routing.ids.unique()) * weight[0].nbytes / 4
        calls.append(partial(grouped_gemm.launcher, x, weight, None, routing, gated, config))
    return calls, read, 2 * tokens * k * weight[0].numel()


def lone_case(name: str, gated: bool, config: LoneConfig) -> tuple[list[Callable], float, float]:
    """expert_case of a lone token."""
    experts, k, _ = MIXTURES[name]
    weight = weights(name, gated)
    x, chosen = randn(1 if gated else k, weight.shape[2]), torch.rand(1, k, device=DEVICE)
    calls: list[Callable] = []
    for _ in range(8):
        ids = random_ids(1, experts, k)
        of_ids = (x, weight, None, ids, 0)
        product = partial(lone_product, *of_ids, True, config)
        calls.append(product if gated else partial(lone_sum, *of_ids, chosen, None, config))
    return calls, k * weight[0].nbytes, 2 * k * weight[0].numel()


def latent_case(batch: int, context: int, keys: int, config: dict) -> tuple[list[Callable], float, float]:
    tokens = batch * context
    copies = max(2, min(16, int(3e8 / (tokens * 2 * (ROPE + RANK)))))
    turned, absorbed = randn(batch, HEADS, ROPE), randn(batch, HEADS, RANK)
    table = torch.randperm(tokens, device=DEVICE).int().view(batch, context)
    rows, lens = torch.arange(batch, device=DEVICE).int(), torch.full((batch,), context, device=DEVICE).int()
    plan = plan_decode(lens, rows, AttentionSpec(1.0), 1, keys, PlanSize(128, 64))
    pools = [randn(tokens, ROPE + RANK) for _ in range(copies)]
    calls = [
        partial(latent_attention.launcher, turned, absorbed, pool, table, rows, lens, 0.07, plan, config)
        for pool in pools
    ]
    return calls, 2 * tokens * (ROPE + RANK), 2 * tokens * HEADS * (ROPE + 2 * RANK)


def prompt_case(length: int, start: int, config: dict) -> tuple[list[Callable], float, float]:
    q, turned = randn(length, HEADS, ROPE + NOPE), randn(start + length, ROPE + RANK)[:, :ROPE]
    kv, zero = randn(start + length, HEADS, NOPE + VALUE), ints(0)
    chunks = Chunks(zero, ints(start), ints(length), zero, length)
    call = partial(latent_context_attention.launcher, q, turned, kv, chunks, zero, 0.07, config)
    pairs = length * start + length**2 / 2
    return [call], 0.0, 2 * pairs * HEADS * (ROPE + NOPE + VALUE)


def tiles(fields: tuple[int, ...]) -> dict[str, int]:
    names = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")[-len(fields) :]
    return dict(zip(names, fields, strict=True))


def cases(only: list[str], of_tokens: list[int]) -> Iterator[tuple[str, list[tuple[str, Callable]]]]:
    """(what, its configurations), each of these a function that makes the calls."""
    if "experts" in only:
        for name in MIXTURES:
            for tokens, gated in itertools.product(of_tokens, (True, False)):
                if tokens == 1:
                    found = [(str(fields), partial(lone_case, name, gated, LoneConfig(*fields))) for fields in LONE]
                else:
                    found = [
                        (f"{block}: {fields}", partial(expert_case, name, tokens, gated, block, GemmConfig(*fields)))
                        for block in BLOCKS[tokens]
                        for fields in GEMM[block]
                        if not gated or fields[0] <= 128
                    ]
                yield f"{name} {'gate_up' if gated else 'down'} of {tokens} tokens", found
    if "latent" in only:
        for batch, context in ((1, 1024), (1, 8192), (16, 1024), (64, 1024), (256, 1024)):
            yield (
                f"latent decode {batch} x {context}",
                [
                    (f"{keys}: {fields}", partial(latent_case, batch, context, keys, {"BLOCK_H": 16, **tiles(fields)}))
                    for keys in (64, 128, 256, 512)
                    for fields in LATENT
                ],
            )
    if "prompt" in only:
        for length, start in ((1024, 0), (8192, 0), (2048, 8192)):
            found = [(str(fields), partial(prompt_case, length, start, tiles(fields))) for fields in PROMPT]
            yield f"latent prompt {length} after {start}", found


def compile_one(index: int, count: int, only: list[str]) -> None:
    """Every count-th kernel, with tensors as small as they may be."""
    global MIXTURES
    jobs: list[Callable] = []
    MIXTURES = {name: (k, k, size) for name, (_, k, size) in MIXTURES.items()}
    if "experts" in only:
        for block in GEMM:
            for fields in GEMM[block]:
                for gated in (True, False):
                    jobs.append(partial(expert_case, "qwen3", 2, gated, block, GemmConfig(*fields)))
        for name, gated, fields in itertools.product(MIXTURES, (True, False), LONE):
            jobs.append(partial(lone_case, name, gated, LoneConfig(*fields)))
    if "latent" in only:
        jobs += [partial(latent_case, b, 128, 64, {"BLOCK_H": 16, **tiles(f)}) for b in (1, 16) for f in LATENT]
    if "prompt" in only:
        jobs += [partial(prompt_case, 256, 0, tiles(fields)) for fields in PROMPT]
    for job in jobs[index::count]:
        try:
            job()[0][0]()
        except Exception as error:
            print(f"does not run: {job.args} {type(error).__name__} {str(error)[:80]}", flush=True)


def check(only: list[str]) -> None:
    """Each kernel against its definition in float32."""
    torch.manual_seed(0)
    for name, (experts, k, _) in MIXTURES.items() if "experts" in only else ():
        for tokens in (1, 16, 200, 3000):
            x, logits = randn(tokens, HIDDEN), torch.randn(tokens, experts, device=DEVICE)
            chosen, ids = select_experts(logits, None, TopK(k))
            routing = Routing(ids, 0, experts)
            hidden = grouped_gemm(x, weights(name, True), None, routing, True)
            ours = weighted_sum(grouped_gemm(hidden, weights(name, False), None, routing), chosen)
            exact = torch.zeros(tokens, HIDDEN, device=DEVICE)
            for expert in range(experts):
                at, j = (ids == expert).nonzero(as_tuple=True)
                gate, up = (x[at].float() @ weights(name, True)[expert].float().t()).chunk(2, -1)
                answer = (F.silu(gate) * up) @ weights(name, False)[expert].float().t()
                exact.index_add_(0, at, answer * chosen[at, j, None])
            error = ((ours.float() - exact).norm() / exact.norm()).item()
            print(f"{name}, {tokens} tokens: error {error:.1e}", flush=True)
            assert error < 1e-2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--tokens", type=int, nargs="+", choices=[1, *BLOCKS], default=[1, *BLOCKS], help="of experts")
    parser.add_argument("--processes", type=count, default=12)
    parser.add_argument("--json", type=results_file)
    options = parser.parse_args()
    need_gpu(parser)
    spawn = multiprocessing.get_context("spawn")
    workers = [
        spawn.Process(target=compile_one, args=(i, options.processes, options.only)) for i in range(options.processes)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    check(options.only)
    read = ceilings.read_rate()
    a, b = randn(8192, 8192), randn(8192, 8192)
    matrix = 2 * 8192**3 / ceilings.milliseconds(lambda: a @ b.t()) * 1e3
    print(f"read {read / 1e12:.2f} TB/s, matrix {matrix / 1e12:.0f} TFLOP/s", flush=True)
    results = {}
    for what, configs in cases(options.only, options.tokens):
        times = {}
        for label, make in configs:
            torch.manual_seed(0)
            calls, moved, operations = make()
            try:
                times[label] = ceilings.graph_microseconds(calls)
            except Exception as error:
                print(f"{what} {label}: {type(error).__name__}", flush=True)
        limit = 1e6 * max(moved / read, operations / matrix)
        best = sorted(times, key=times.__getitem__)
        results[what] = {"limit_us": limit, "us": {label: times[label] for label in best}}
        shown = ", ".join(f"{label} {times[label]:.1f}" for label in best[:4])
        print(f"{what}: limit {limit:.1f} us, share {limit / times[best[0]]:.2f}: {shown}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
