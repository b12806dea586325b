"""Tensor parallelism: one rank against several, in one run.

    python benchmarks/bench_tp.py --shape 8b 32b --ranks 2 [--batch 1 16 64] [--context 1024] [--prompt 2048 8192]

Sums over ranks by size: ours and NCCL's, alone and with the residual addition and the norm behind them, captured in
CUDA graphs. Then each shape on one rank and on several: a decode step and a prompt, in milliseconds, and how many times
as fast. With --http also the whole server under load. Weights are random.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import tempfile
from pathlib import Path

import ceilings
import torch
import torch.multiprocessing as mp
import triton
from bench_http_decode import PROMPT, free_port, served, start_server
from bench_static import Bench
from shapes import SHAPES, VOCAB, write_model

from lightllm.common.basemodel.peer_crossover import share_peer_memory
from lightllm.common.basemodel.triton_kernel.all_reduce import one_shot
from lightllm.common.basemodel.triton_kernel.rmsnorm import add_rmsnorm
from lightllm.distributed.communication_op import all_reduce
from lightllm.distributed.parallel_state import ParallelState

SUMS_OF = (1, 4, 16, 64, 128, 256, 512, 1024, 2048)  # lines
CALLS = 20
UNKNOWN = ceilings.Ceilings(float("nan"), float("nan"), float("nan"))
SUM_LINE = "{lines:6d} {kb:8.0f} {sum_us:10.1f} {nccl_us:10.1f} {fused_us:14.1f} {nccl_norm_us:14.1f}"


def join(rank: int, size: int, folder: str, width: int) -> ParallelState:
    torch.cuda.set_device(rank)
    parallel = ParallelState.init(rank, size, "nccl", Path(folder) / f"meet{size}")
    return share_peer_memory(parallel, width, torch.bfloat16)


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


def rank_main(rank: int, size: int, gpu: int, shape: str, folder: str, options: argparse.Namespace) -> None:
    """Measures one shape as one of `size` ranks; the first rank writes what it found."""
    width = SHAPES[shape]["hidden_size"]
    if size == 1:
        torch.cuda.set_device(gpu)
        parallel = ParallelState()
    else:
        parallel = join(rank, size, folder, width)
    found = {"sums": sums(parallel, width), "most_bytes": parallel.peers.most_bytes if parallel.peers else 0}
    tokens = max([*options.prompt, max(options.batch) * (max(options.context) + 50)])
    bench = Bench(shape, max(options.batch), tokens, UNKNOWN, options.batch, parallel)
    found["decode"] = [bench.decode(batch, context) for context in options.context for batch in options.batch]
    found["prompt"] = [bench.prompt(length, options.chunk) for length in options.prompt]
    if rank == 0:
        (Path(folder) / f"{shape}-{size}.json").write_text(json.dumps(found))
    torch.cuda.synchronize()
    os._exit(0)  # without the clean-up of NCCL


def measure(shape: str, ranks: int, options: argparse.Namespace) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        for size in (1, ranks):
            processes = [
                mp.get_context("spawn").Process(target=rank_main, args=(rank, size, rank, shape, folder, options))
                for rank in range(size)
            ]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
        one, many = (json.loads((Path(folder) / f"{shape}-{size}.json").read_text()) for size in (1, ranks))
    print(f"\n{shape}: sums over {ranks} ranks, up to {many['most_bytes'] >> 10} KB through shared memory")
    print(" lines       KB     sum us    NCCL us   sum+norm us  NCCL+norm us")
    for row in many["sums"]:
        print(SUM_LINE.format(**row))
    print(f"{shape}       1 rank ms   {ranks} ranks ms   times as fast")
    rows = []
    for kind, before, after in (("decode", "graph_ms", "step_ms"), ("prompt", "ms", "ms")):
        for alone, together in zip(one[kind], many[kind]):
            what = {key: alone[key] for key in ("batch", "context", "prompt", "chunk") if key in alone}
            for name in dict.fromkeys((before, after)):
                row = dict(what, kind=kind, time=name, one=alone[name], many=together[name])
                rows.append(row | {"ratio": alone[name] / together[name]})
                label = " ".join(f"{key} {value}" for key, value in what.items())
                print(f"{label:26s} {name:9s} {alone[name]:9.3f} {together[name]:9.3f} {rows[-1]['ratio']:6.2f}")
    return {"sums": many["sums"], "most_bytes": many["most_bytes"], "rows": rows}


def over_http(shape: str, ranks: int, options: argparse.Namespace) -> list[dict]:
    """The whole server under the same load on one rank and on several."""
    rng, rows = random.Random(0), []
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), shape, None, None)
        for size in (1, ranks):
            port = free_port()
            flags = ["--tp", str(size), "--graph_max_batch_size", str(max(options.batch))]
            server = start_server(Path(folder), port, flags)
            try:
                for batch in options.batch:
                    prompts = [[rng.randrange(3, VOCAB) for _ in range(PROMPT)] for _ in range(batch)]
                    asyncio.run(served(port, prompts))
                    rows.append({"ranks": size, "batch": batch} | asyncio.run(served(port, prompts)))
                    print(f"{shape} over HTTP:", json.dumps(rows[-1]), flush=True)
            finally:
                server.terminate()
                server.wait()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=["8b", "32b"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--context", type=int, nargs="+", default=[1024])
    parser.add_argument("--prompt", type=int, nargs="*", default=[2048, 8192])
    parser.add_argument("--chunk", type=int, default=8192, help="prompt tokens of one step")
    parser.add_argument("--http", choices=SHAPES, nargs="*", default=[], help="shapes that are also served")
    parser.add_argument("--json", type=Path, help="where to write the results")
    options = parser.parse_args()
    results = {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "nccl": str(torch.cuda.nccl.version())},
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip(),
    }
    for shape in options.shape:
        results[shape] = measure(shape, options.ranks, options)
    for shape in options.http:
        results[f"{shape} over http"] = over_http(shape, options.ranks, options)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
