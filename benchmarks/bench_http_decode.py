"""Decode over HTTP against transformers generate, on random weights of a real shape.

    python benchmarks/bench_http_decode.py --shape 8b --batch 1 16 64 [--json out.json]

Serves the shape with `--load_format random` and, for each batch size, streams that many requests of 128 prompt and 256
output tokens at once. A decode step is timed between the moment the last of them has its first token and the moment the
first of them ends; `idle` is the share of about that time for which the GPU was at no step, by events around each. Then
transformers generates the same batch (dynamic cache, sdpa) in this process.

--continuous N: N requests of 16 to 512 prompt and 128 output tokens, all at once, beside transformers' generate_batch.
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
from contextlib import contextmanager
from pathlib import Path

from shapes import SHAPES, VOCAB, write_model

from lightllm.server.bench_serving import Load, summary
from lightllm.server.workloads import Request, prompt_ids, uniform

PROMPT, OUTPUT = 128, 256
SPARE = 16  # tokens before a stream's end up to which the GPU's time is watched
CONTINUOUS_OUTPUT = 128


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


async def device_seconds(url: str) -> tuple[float, float]:
    """(now, seconds for which the GPU has been at steps)."""
    load = await asyncio.to_thread(lambda: json.load(urllib.request.urlopen(f"{url}/token_load")))
    return time.perf_counter(), load["device_seconds_total"]


async def served(url: str, prompts: list[list[int]]) -> dict[str, float]:
    load = Load(url, VOCAB)
    begin = time.perf_counter()
    streams = [await load.start(ids, OUTPUT) for ids in prompts]
    while not all(stream.times for stream in streams):
        await asyncio.sleep(0.002)
    since, busy_before = await device_seconds(url)
    while max(len(stream.times) for stream in streams) < OUTPUT - SPARE:
        await asyncio.sleep(0.002)
    until, busy = await device_seconds(url)
    for stream in streams:
        await stream.done
        if len(stream.times) != OUTPUT:
            raise SystemExit(f"a stream gave {len(stream.times)} events instead of {OUTPUT}")
    all_running, first_end = max(s.times[0] for s in streams), min(s.times[-1] for s in streams)
    steps = statistics.median(sum(all_running < x <= first_end for x in s.times) for s in streams)
    return {
        "ms_per_step": 1e3 * (first_end - all_running) / max(steps, 1),
        "idle": 1 - (busy - busy_before) / (until - since),
        "ttft_ms": 1e3 * statistics.median(s.times[0] - begin for s in streams),
        "tokens_per_s": len(prompts) * OUTPUT / (max(s.times[-1] for s in streams) - begin),
    }


@contextmanager
def serving(model_dir: Path, server_flags: list[str]) -> Iterator[str]:
    """The url of a server of the model."""
    port = free_port()
    server = start_server(model_dir, port, server_flags)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def over_http(url: str, batches: list[int], rng: random.Random) -> Iterator[tuple[list[list[int]], dict[str, float]]]:
    """For each batch size its prompts and what was measured, warm."""
    for batch in batches:
        prompts = [[rng.randrange(3, VOCAB) for _ in range(PROMPT)] for _ in range(batch)]
        asyncio.run(served(url, prompts))
        yield prompts, asyncio.run(served(url, prompts))


def continuous_requests(count: int) -> list[Request]:
    return [(prompt, CONTINUOUS_OUTPUT) for prompt, _ in uniform(count, 16, 512)]


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


def transformers_tokens_per_s(model, prompts: list[list[int]]) -> float:
    """Of continuous batching, from when the first request begins to run to when the last ends: warming up is over."""
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=CONTINUOUS_OUTPUT, do_sample=False, eos_token_id=-1, pad_token_id=0)
    answers = list(model.generate_batch(prompts, generation_config=config).values())
    tokens = sum(len(answer.generated_tokens) for answer in answers)
    if tokens != len(prompts) * CONTINUOUS_OUTPUT:
        raise SystemExit(f"generate_batch gave {tokens} tokens: {answers[0].error if answers else 'no answers'}")
    return tokens / (max(a.lifespan[1] for a in answers) - min(a.lifespan[0] for a in answers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 16, 64])
    parser.add_argument("--continuous", type=int, default=0, help="requests of the comparison with generate_batch")
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
    rows, continuous = [], {}
    requests = continuous_requests(options.continuous)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), options.shape, options.tokenizer_dir, options.layers)
        with serving(Path(folder), server_flags) as url:
            for prompts, measured in over_http(url, options.batch, rng):
                rows.append({"batch": len(prompts), "prompts": prompts} | measured)
            if requests:
                begin, streams = Load(url, VOCAB).run(requests)
                continuous["tokens_per_s"] = summary(begin, streams, 0, 0)["output_tokens_per_s"]
        if options.transformers_tokens:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            config = transformers.AutoConfig.from_pretrained(folder)
            with torch.device(device):
                model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
            for row in rows:
                row["transformers_ms"] = transformers_ms(model, row["prompts"], options.transformers_tokens)
            if requests:
                theirs = transformers_tokens_per_s(model, prompt_ids(requests, VOCAB))
                continuous |= {"transformers": theirs, "ratio": continuous["tokens_per_s"] / theirs}

    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{options.shape} on {where}, torch {torch.__version__}, transformers {transformers.__version__}, bf16")
    print("batch   ours ms/step   transformers   ratio   ttft ms   tok/s    idle")
    for row in rows:
        del row["prompts"]
        theirs = row.get("transformers_ms", float("nan"))
        print(
            f"{row['batch']:5d} {row['ms_per_step']:14.2f} {theirs:14.2f} {theirs / row['ms_per_step']:7.1f}"
            f" {row['ttft_ms']:9.1f} {row['tokens_per_s']:7.0f} {100 * row['idle']:6.1f} %"
        )
    if requests:
        print(f"{len(requests)} requests at once:", ", ".join(f"{key} {x:.1f}" for key, x in continuous.items()))
    if options.json:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        result = {"shape": options.shape, "device": where, "versions": versions, "rows": rows, "continuous": continuous}
        Path(options.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
