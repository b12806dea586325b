"""A served model under load: requests over HTTP, all at once or at a rate, streamed, greedy, ignoring eos.

    python benchmarks/bench_serving.py --shape 8b --set sharegpt [--rate 20] [--api openai] [server flags]
    python benchmarks/bench_serving.py --shape 8b --interference

Serves the shape with random weights, or measures a running server with --url. --interference: 64 streams at 1,000
tokens of context decode; what becomes of the time between their tokens while a prompt of 8,000 is computed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from bench_http_decode import free_port, start_server
from shapes import SHAPES, VOCAB, write_model
from workloads import SETS, Request, prompt_ids

MODEL = "bench"  # --model_name of the server


@dataclass
class Stream(asyncio.Protocol):
    """One streamed request: the arrival times of its events, several of which may come in one piece.

    An event is a token, but for openai's dialect, which leaves out tokens without text: give it a real tokenizer.
    """

    body: bytes
    tokens: int
    done: asyncio.Future
    sent: float = 0.0
    times: list[float] = field(default_factory=list)
    end: bytes = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.sent = time.perf_counter()
        transport.write(self.body)

    def data_received(self, data: bytes) -> None:
        now, count = time.perf_counter(), data.count(b"data:") - data.count(b"data: [DONE]")
        self.times += [now] * count
        self.end = (self.end + data)[-600:]

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


def request_bytes(api: str, ids: list[int], tokens: int) -> bytes:
    if api == "openai":
        path, body = "/v1/completions", dict(model=MODEL, prompt=ids, max_tokens=tokens, stream=True, temperature=0)
        body |= dict(ignore_eos=True, stream_options=dict(include_usage=True))
    else:
        parameters = dict(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
        path, body = "/generate_stream", dict(inputs=ids, parameters=parameters)
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


class Client:
    def __init__(self, host: str, port: int, api: str):
        self.host, self.port, self.api = host, port, api

    async def start(self, ids: list[int], tokens: int) -> Stream:
        loop = asyncio.get_running_loop()
        body = request_bytes(self.api, ids, tokens)
        _, stream = await loop.create_connection(
            lambda: Stream(body, tokens, loop.create_future()), self.host, self.port
        )
        return stream

    async def finished(self, ids: list[int], tokens: int) -> Stream:
        stream = await self.start(ids, tokens)
        await stream.done
        all_here = f'"completion_tokens":{tokens},'.encode() in stream.end or len(stream.times) == tokens
        if not all_here:
            raise SystemExit(f"a stream gave {len(stream.times)} of {tokens} tokens and ended with {stream.end!r}")
        return stream

    async def load(self, requests: list[Request], rate: float) -> tuple[float, list[Stream]]:
        """All requests, at once or as a Poisson process of `rate` a second: when that began, and their streams."""
        rng = random.Random(2)
        begin, streams = time.perf_counter(), []
        async with asyncio.TaskGroup() as group:
            for ids, (_, tokens) in zip(prompt_ids(requests, VOCAB), requests):
                streams.append(group.create_task(self.finished(ids, tokens)))
                await asyncio.sleep(rng.expovariate(rate) if rate else 0)
        return begin, [task.result() for task in streams]

    async def interference(self, streams: int, context: int, prompt: int) -> dict[str, float]:
        """Milliseconds between tokens: alone, and while the prompt is computed."""
        rng = random.Random(3)
        ids = [[rng.randrange(3, VOCAB) for _ in range(context)] for _ in range(streams)]
        running = [await self.start(one, 600) for one in ids]
        while any(len(stream.times) < 100 for stream in running):
            await asyncio.sleep(0.01)
        quiet = time.perf_counter()
        await asyncio.sleep(1.0)
        begin = time.perf_counter()
        await self.finished([rng.randrange(3, VOCAB) for _ in range(prompt)], 1)
        end = time.perf_counter()
        idle = gaps(running, quiet, begin)
        busy = gaps(running, begin, end)
        for stream in running:
            await stream.done
        return dict(idle_p99_ms=percentile(idle, 99), busy_p99_ms=percentile(busy, 99), prompt_ms=1e3 * (end - begin))


def gaps(streams: list[Stream], begin: float, end: float) -> list[float]:
    """Milliseconds between neighbouring tokens that both came in that time."""
    pairs = ((a, b) for stream in streams for a, b in zip(stream.times, stream.times[1:]))
    return [1e3 * (b - a) for a, b in pairs if begin <= b <= end]


def percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1] if len(values) > 1 else float("nan")


def summary(begin: float, streams: list[Stream], most_first: float, most_each: float) -> dict[str, float]:
    """Times in milliseconds. goodput: requests a second whose first token and mean time a token keep to the limits."""
    end = max(stream.times[-1] for stream in streams)
    tokens = sum(stream.tokens for stream in streams)
    first = [1e3 * (stream.times[0] - stream.sent) for stream in streams]
    between = gaps(streams, begin, end)
    spans = [1e3 * (s.times[-1] - s.times[0]) / max(1, s.tokens - 1) for s in streams]
    good = sum(ttft <= most_first and span <= most_each for ttft, span in zip(first, spans))
    return dict(
        requests=len(streams),
        output_tokens=tokens,
        seconds=end - begin,
        output_tokens_per_s=tokens / (end - begin),
        goodput=good / (end - begin),
        ttft_p50_ms=percentile(first, 50),
        ttft_p99_ms=percentile(first, 99),
        per_token_p50_ms=percentile(spans, 50),
        between_p50_ms=percentile(between, 50),
        between_p99_ms=percentile(between, 99),
    )


def measure(client: Client, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    asyncio.run(client.load([(64, 16)] * 8, 0))
    results = {}
    if options.interference:
        results["interference"] = asyncio.run(client.interference(64, 1000, 8000))
    for name in options.set:
        requests = SETS[name](options.requests) if options.requests else SETS[name]()
        results[name] = summary(*asyncio.run(client.load(requests, options.rate)), options.most_ttft, options.most_tpot)
    for name, result in results.items():
        print(name, ", ".join(f"{key} {value:.1f}" for key, value in result.items()), flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--set", choices=SETS, nargs="*", default=[])
    parser.add_argument("--requests", type=int, help="fewer requests than the set has")
    parser.add_argument("--rate", type=float, default=0, help="requests a second; 0: all at once")
    parser.add_argument("--most_ttft", type=float, default=1000, help="milliseconds to the first token, for goodput")
    parser.add_argument("--most_tpot", type=float, default=50, help="milliseconds a token, for goodput")
    parser.add_argument("--api", choices=["lightllm", "openai"], default="lightllm")
    parser.add_argument("--interference", action="store_true")
    parser.add_argument("--tokenizer_dir", help="tokenizer to serve with; default: a byte tokenizer")
    parser.add_argument("--url", help=f"a running server, with --model_name {MODEL} for openai")
    parser.add_argument("--json", type=Path, help="where to write the results")
    options, server_flags = parser.parse_known_args()
    if options.url:
        where = urlsplit(options.url)
        results = measure(Client(where.hostname or "127.0.0.1", where.port or 80, options.api), options)
    else:
        with tempfile.TemporaryDirectory() as folder:
            write_model(Path(folder), options.shape, options.tokenizer_dir, None)
            port = free_port()
            server = start_server(Path(folder), port, ["--model_name", MODEL, *server_flags])
            try:
                results = measure(Client("127.0.0.1", port, options.api), options)
            finally:
                server.terminate()
                server.wait()
    if options.json:
        options.json.write_text(json.dumps({"shape": options.shape, "flags": server_flags, **results}, indent=1))


if __name__ == "__main__":
    main()
