"""Decode over HTTP against transformers generate, on random weights of a real shape.

    python benchmarks/bench_http_decode.py --shape 8b --batch 1 16 64 [--json out.json]

Serves the shape with `--load_format random` and, for each batch size, streams that many requests of 128 prompt and 256
output tokens at once. A decode step is timed between the moment the last of them has its first token and the moment the
first of them ends. Then transformers generates the same batch (dynamic cache, sdpa) in this process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from shapes import SHAPES, VOCAB, write_model

PROMPT, OUTPUT = 128, 256


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start_server(model_dir: Path, port: int, extra: list[str]) -> subprocess.Popen:
    command = [sys.executable, "-m", "lightllm.server.api_server", "--model_dir", str(model_dir), "--port", str(port)]
    server = subprocess.Popen([*command, "--load_format", "random", *extra])
    for _ in range(3000):
        if server.poll() is not None:
            raise SystemExit("the server did not start")
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/readiness", timeout=1)
            return server
        except OSError:
            time.sleep(0.1)
    server.terminate()
    raise SystemExit("the server was not ready in 300 s")


async def stream(port: int, ids: list[int]) -> list[float]:
    """Arrival time of every token of one streamed request."""
    body = json.dumps({"inputs": ids, "parameters": {"max_new_tokens": OUTPUT, "ignore_eos": True, "do_sample": False}})
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    writer.write(
        f"POST /generate_stream HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
    )
    times = []
    while line := await reader.readline():
        if line.startswith(b"data:"):
            times.append(time.perf_counter())
    writer.close()
    if len(times) != OUTPUT:
        raise SystemExit(f"a stream gave {len(times)} events instead of {OUTPUT}")
    return times


async def served(port: int, prompts: list[list[int]]) -> dict[str, float]:
    start = time.perf_counter()
    times = await asyncio.gather(*(stream(port, ids) for ids in prompts))
    all_running, first_end = max(t[0] for t in times), min(t[-1] for t in times)
    steps = statistics.median(sum(all_running < x <= first_end for x in t) for t in times)
    return {
        "ms_per_step": 1e3 * (first_end - all_running) / max(steps, 1),
        "ttft_ms": 1e3 * statistics.median(t[0] - start for t in times),
        "tokens_per_s": len(prompts) * OUTPUT / (max(t[-1] for t in times) - start),
    }


def over_http(
    model_dir: Path, server_flags: list[str], batches: list[int], rng: random.Random
) -> Iterator[tuple[list[list[int]], dict[str, float]]]:
    """Serves the model; for each batch size its prompts and what was measured, warm."""
    port = free_port()
    server = start_server(model_dir, port, server_flags)
    try:
        for batch in batches:
            prompts = [[rng.randrange(3, VOCAB) for _ in range(PROMPT)] for _ in range(batch)]
            asyncio.run(served(port, prompts))
            yield prompts, asyncio.run(served(port, prompts))
    finally:
        server.terminate()
        server.wait()


def transformers_ms(model, prompts: list[list[int]], new_tokens: int) -> float:
    """Milliseconds of a decode step of generate: the time of `new_tokens` less the time of one."""
    import torch

    ids = torch.tensor(prompts, device=model.device)

    def timed(n: int) -> float:
        torch.cuda.synchronize() if ids.is_cuda else None
        start = time.perf_counter()
        model.generate(ids, max_new_tokens=n, min_new_tokens=n, do_sample=False, attention_mask=torch.ones_like(ids))
        torch.cuda.synchronize() if ids.is_cuda else None
        return time.perf_counter() - start

    timed(2)
    first = timed(1)
    return 1e3 * (timed(new_tokens) - first) / (new_tokens - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has, for a quick look")
    parser.add_argument("--tokenizer_dir", help="tokenizer to serve with; default: a byte tokenizer")
    parser.add_argument(
        "--transformers_tokens", type=int, default=24, help="tokens that transformers generates; 0 skips it"
    )
    parser.add_argument("--json", help="where to write the results")
    options, server_flags = parser.parse_known_args()

    import torch
    import transformers

    rng = random.Random(0)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), options.shape, options.tokenizer_dir, options.layers)
        for prompts, measured in over_http(Path(folder), server_flags, options.batch, rng):
            results.append({"batch": len(prompts), "prompts": prompts} | measured)
        if options.transformers_tokens:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            config = transformers.AutoConfig.from_pretrained(folder)
            with torch.device(device):
                model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
            for row in results:
                row["transformers_ms"] = transformers_ms(model, row["prompts"], options.transformers_tokens)

    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{options.shape} on {where}, torch {torch.__version__}, transformers {transformers.__version__}, bf16")
    print("batch   ours ms/step   transformers   ratio   ttft ms   tok/s")
    for row in results:
        del row["prompts"]
        theirs = row.get("transformers_ms", float("nan"))
        print(
            f"{row['batch']:5d} {row['ms_per_step']:14.2f} {theirs:14.2f} {theirs / row['ms_per_step']:7.1f}"
            f" {row['ttft_ms']:9.1f} {row['tokens_per_s']:7.0f}"
        )
    if options.json:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        result = {"shape": options.shape, "device": where, "versions": versions, "rows": results}
        Path(options.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
