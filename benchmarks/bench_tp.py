"""Tensor parallelism: one rank against several, in one run.

    python benchmarks/bench_tp.py --shape 8b 32b --ranks 2 [--batch 1 16 64] [--context 1024] [--prompt 2048 8192]

Sums over ranks by size: ours and NCCL's, alone and with the residual addition and the norm behind them, captured in
CUDA graphs. Then each shape on one rank and on several: a decode step and a prompt, in milliseconds, and how many times
as fast. With --http also the whole server under load; with --kill what becomes of its clients when each rank in turn is
killed or stopped (on a CPU: --shape --kill tiny). Weights are random.
"""

import argparse
import gc
import itertools
import json
import os
import subprocess
import tempfile
from pathlib import Path

import ceilings
import torch
import torch.multiprocessing as mp
import triton
from arguments import count, need_gpu, results_file
from bench_static import Bench
from kill_rank import kill_each_rank
from over_http import decode, serving
from shapes import SHAPES

from lightllm.common.basemodel.peer_crossover import share_peer_memory
from lightllm.common.basemodel.triton_kernel.all_reduce import one_shot
from lightllm.common.basemodel.triton_kernel.rmsnorm import add_rmsnorm
from lightllm.distributed.communication_op import all_reduce
from lightllm.distributed.parallel_state import ParallelState

SUMS_OF = (1, 4, 16, 64, 128, 256, 512, 1024, 2048)  # lines
CALLS = 20
UNKNOWN = ceilings.Ceilings(float("nan"), float("nan"), float("nan"))
SUM_LINE = "{lines:6d} {kb:8.0f} {sum_us:10.1f} {nccl_us:10.1f} {fused_us:14.1f} {nccl_norm_us:14.1f}"


def sums(parallel: ParallelState, width: int) -> list[dict[str, float]]:
    """Microseconds of sums of lines of bf16, by size."""
    peers = parallel.peers
    rows = []
    for lines in SUMS_OF if peers else ():
        x = torch.zeros(lines, width, dtype=torch.bfloat16, device="cuda")
        ways = {
            "sum_us": lambda x=x: one_shot(x, None, None, 0.0, parallel, peers),
            "nccl_us": lambda x=x: all_reduce(x, parallel),
            "fused_us": lambda x=x: one_shot(x, x, x[0], 1e-5, parallel, peers),
            "nccl_norm_us": lambda x=x: add_rmsnorm(all_reduce(x, parallel), x, x[0], 1e-5),
        }
        took = {name: ceilings.graph_microseconds([call] * CALLS) for name, call in ways.items()}
        rows.append(dict(lines=lines, kb=x.numel() * 2 / 1024, **took))
    return rows


def rank_main(rank: int, size: int, folder: str, options: argparse.Namespace) -> None:
    """Measures its share of the shapes alone, then all of them together with the other ranks."""
    torch.cuda.set_device(rank)
    for shape in options.shape[rank::size]:
        write(folder, shape, 1, one_shape(shape, ParallelState(), options))
    parallel = ParallelState.init(rank, size, "nccl", Path(folder) / "meet")
    widest = max(SHAPES[shape]["hidden_size"] for shape in options.shape)
    parallel = share_peer_memory(parallel, widest, torch.bfloat16, options.chunk)
    for shape in options.shape:
        found = one_shape(shape, parallel, options)
        if rank == 0:
            write(folder, shape, size, found)
    torch.cuda.synchronize()
    os._exit(0)  # without the clean-up of NCCL


def write(folder: str, shape: str, ranks: int, found: dict) -> None:
    (Path(folder) / f"{shape}-{ranks}.json").write_text(json.dumps(found))
    print(f"{shape} on {ranks}:", json.dumps([*found["decode"], *found["prompt"]]), flush=True)


def one_shape(shape: str, parallel: ParallelState, options: argparse.Namespace) -> dict:
    torch.manual_seed(0)
    found = {"most_lines": parallel.peers.most_lines if parallel.peers else 0, "decode": [], "prompt": []}
    found["sums"] = sums(parallel, SHAPES[shape]["hidden_size"])
    tokens = max(0, *options.prompt, max(options.batch) * (max(options.context) + 50))
    short = [length for length in options.prompt if length <= 2048]  # they have graphs
    bench = Bench(shape, max(options.batch), tokens, UNKNOWN, options.batch, parallel, mixed_sizes=short)
    for batch, context in itertools.product(options.batch, options.context):
        found["decode"].append(bench.decode(batch, context))
    for length in options.prompt:
        found["prompt"].append(bench.prompt(length, options.chunk))
    del bench
    gc.collect()
    torch.cuda.empty_cache()
    return found


def measure(options: argparse.Namespace) -> dict[str, dict]:
    """Every shape alone, as many side by side as there are ranks, then on all ranks together."""
    size = options.ranks
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        processes = [context.Process(target=rank_main, args=(rank, size, folder, options)) for rank in range(size)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit("a rank failed")
        read = lambda shape, ranks: json.loads((Path(folder) / f"{shape}-{ranks}.json").read_text())
        return {shape: compare(shape, read(shape, 1), read(shape, size), size) for shape in options.shape}


def compare(shape: str, one: dict, many: dict, ranks: int) -> dict:
    """Prints and returns what one rank and several need."""
    print(f"\n{shape}: sums over {ranks} ranks, up to {many['most_lines']} lines through shared memory")
    print(" lines       KB     sum us    NCCL us   sum+norm us  NCCL+norm us")
    for row in many["sums"]:
        print(SUM_LINE.format(**row))
    print(f"{shape:37s} 1 rank ms {ranks} ranks ms   times as fast")
    rows = []
    for kind, times in (("decode", ("graph_ms", "step_ms")), ("prompt", ("ms",))):
        for alone, together in zip(one[kind], many[kind]):
            what = {key: alone[key] for key in ("batch", "context", "prompt", "chunk") if key in alone}
            for time in times:
                ratio = alone[time] / together[time]
                rows.append(what | dict(kind=kind, time=time, one=alone[time], many=together[time], ratio=ratio))
                label = " ".join(f"{key} {value}" for key, value in what.items())
                print(f"{label:26s} {time:9s} {alone[time]:10.3f} {together[time]:10.3f} {ratio:10.2f}", flush=True)
    return {"sums": many["sums"], "most_lines": many["most_lines"], "rows": rows}


def both_over_http(shape: str, ranks: int, options: argparse.Namespace) -> list[dict]:
    """The whole server under the same load on one rank and on several."""
    rows = []
    for size in (1, ranks):
        with serving(shape, ["--tp", str(size), "--graph_max_batch_size", str(max(options.batch))]) as url:
            for batch in options.batch:
                rows.append({"ranks": size} | decode(url, batch))
                print(f"{shape} over HTTP:", json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, nargs="*", default=["8b", "32b"])
    parser.add_argument("--ranks", type=count, default=2)
    parser.add_argument("--batch", type=count, nargs="+", default=[1, 16, 64])
    parser.add_argument("--context", type=count, nargs="+", default=[1024])
    parser.add_argument("--prompt", type=count, nargs="*", default=[2048, 8192])
    parser.add_argument("--chunk", type=count, default=8192, help="prompt tokens of one step")
    parser.add_argument("--http", choices=SHAPES, nargs="*", default=[], help="shapes that are also served")
    parser.add_argument("--kill", choices=SHAPES, nargs="*", default=[], help="shapes served while a rank is killed")
    parser.add_argument("--clients", type=count, default=64, help="of a server whose rank is killed")
    parser.add_argument("--json", type=results_file, help="where to write the results")
    options = parser.parse_args()
    if options.shape:
        need_gpu(parser)
        if options.ranks > torch.cuda.device_count():
            parser.error(f"--ranks {options.ranks} needs as many GPUs")
    on_gpu = torch.cuda.is_available()
    nccl = {"nccl": str(torch.cuda.nccl.version())} if on_gpu else {}
    results = {
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "versions": {"torch": torch.__version__, "triton": triton.__version__} | nccl,
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip(),
    }
    if options.shape:
        results |= measure(options)
    for shape in options.http:
        results[f"{shape} over http"] = both_over_http(shape, options.ranks, options)
    for shape in options.kill:
        results[f"{shape}, a rank ends"] = kill_each_rank(shape, options.ranks, options.clients)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
