"""A server of a shape with random weights, and decoding over HTTP: the time of a step, and how long the GPU idles."""

import asyncio
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shapes import VOCAB, write_model

from lightllm.server.bench_serving import Load
from lightllm.utils.net_utils import bind

PROMPT, OUTPUT = 128, 512
WATCHED = 256  # tokens of a stream for which the GPU's time is watched; towards its end a client is behind many streams


def _wait_until_ready(server: subprocess.Popen, url: str) -> None:
    for _ in range(3000):
        if server.poll() is not None:
            raise SystemExit("the server did not start")
        try:
            urllib.request.urlopen(f"{url}/readiness", timeout=1)
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit("the server was not ready in 300 s")


@contextmanager
def served(model_dir: Path, flags: list[str]) -> Iterator[str]:
    """The url of a server of the model, on a free port."""
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "lightllm.server.api_server", "--model_dir", str(model_dir), "--port", str(port)]
    server = subprocess.Popen([*command, *flags])
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_ready(server, url)
        yield url
    finally:
        server.terminate()
        server.wait()


@contextmanager
def serving(shape: str, flags: list[str], tokenizer_dir: str | None = None) -> Iterator[str]:
    """The url of a server of the shape; tokenizer_dir: default a byte tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), shape, tokenizer_dir, None)
        with served(Path(folder), ["--load_format", "random", "--request_log", "none", *flags]) as url:
            yield url


def _device_seconds(url: str) -> tuple[float, float]:
    """(now, seconds for which the GPU has been at steps)."""
    begin = time.perf_counter()
    with urllib.request.urlopen(f"{url}/token_load") as answer:
        return (begin + time.perf_counter()) / 2, json.load(answer)["device_seconds_total"]


async def _decode(load: Load, url: str, prompts: list[list[int]]) -> dict[str, float]:
    begin = time.perf_counter()
    streams = await asyncio.gather(*(load.start(ids, OUTPUT) for ids in prompts))
    while not all(stream.times for stream in streams):
        await asyncio.sleep(0.002)
    since, busy_before = await asyncio.to_thread(_device_seconds, url)
    while max(len(stream.times) for stream in streams) < WATCHED:
        await asyncio.sleep(0.002)
    until, busy = await asyncio.to_thread(_device_seconds, url)
    for stream in streams:
        await stream.done
        if len(stream.times) != OUTPUT:
            raise SystemExit(f"a stream gave {len(stream.times)} events instead of {OUTPUT}")
    all_running, first_end = max(s.times[0] for s in streams), min(s.times[-1] for s in streams)
    if first_end < until:
        raise SystemExit("a stream ended before the last had begun")
    steps = statistics.median(sum(all_running < x <= first_end for x in s.times) for s in streams)
    return dict(
        batch=len(prompts),
        ms_per_step=1e3 * (first_end - all_running) / max(steps, 1),
        idle=1 - (busy - busy_before) / (until - since) if busy else math.nan,
        ttft_ms=1e3 * statistics.median(s.times[0] - begin for s in streams),
        tokens_per_s=len(prompts) * OUTPUT / (max(s.times[-1] for s in streams) - begin),
    )


def decode(url: str, batch: int) -> dict[str, float]:
    """That many streams of 128 prompt and 512 output tokens at once, warm.

    ms_per_step: between the moment the last of them has its first token and the moment the first of them ends. idle:
    the share of about that time for which the GPU was at no step, by events around each; NaN on a CPU.
    """
    rng, load = random.Random(batch), Load(url, VOCAB)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(PROMPT)] for _ in range(batch)]
    asyncio.run(_decode(load, url, prompts))
    return asyncio.run(_decode(load, url, prompts))
