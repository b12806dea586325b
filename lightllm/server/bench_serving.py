"""A running server under load: streamed requests of random ids, all at once or at a rate, that run to their bound."""

import asyncio
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from lightllm.server.workloads import Request, prompt_ids

NO_TOKEN = (b"data: [DONE]", b'"choices":[]', b'"choices": []')  # openai's last events: the end, and the usage
TAIL = 600  # bytes of a stream's end that are kept: the last event is in them


class BenchFailed(Exception):
    """A request that did not give what was asked for; the message says what came instead."""


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
        cast(asyncio.WriteTransport, transport).write(self.body)  # which uvloop's is in all but name

    def data_received(self, data: bytes) -> None:
        now, count = time.perf_counter(), data.count(b"data:") - sum(map(data.count, NO_TOKEN))
        self.times += [now] * count
        self.end = (self.end + data)[-TAIL:]

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


class Load:
    """Requests of one kind to the server at `url`, which may lie below a path, behind TLS or a proxy.

    vocab_size: prompts are of its ids. api: lightllm or openai. key: an API key. wishes: parameters of every request
    besides its length, a constraint for instance.
    """

    def __init__(self, url: str, vocab_size: int, api: str = "lightllm", key: str = "", **wishes: Any):
        where = urlsplit(url if "://" in url else f"http://{url}")
        self._tls = where.scheme == "https"
        self._host, self._port = where.hostname or "127.0.0.1", where.port or (443 if self._tls else 80)
        self._name, self._path = where.netloc.rpartition("@")[2], where.path.rstrip("/")
        self._vocab_size, self._api, self._wishes = vocab_size, api, wishes
        self._key = f"Authorization: Bearer {key}\r\n" if key else ""

    def run(
        self,
        requests: Sequence[Request],
        rate: float = 0,
        concurrency: int = 0,
        one_ended: Callable[[], object] = lambda: None,
    ) -> tuple[float, list[Stream]]:
        """When the load began, and the streams of all requests once they have ended.

        rate: requests a second, as a Poisson process; 0: all at once. concurrency: how many run at most; 0: all.
        one_ended is called behind each. Raises BenchFailed if one of them was refused or ended early.
        """
        free = asyncio.Semaphore(concurrency or len(requests) or 1)
        return asyncio.run(self._run(requests, rate, free, one_ended))

    async def _run(
        self, requests: Sequence[Request], rate: float, free: asyncio.Semaphore, one_ended: Callable[[], object]
    ) -> tuple[float, list[Stream]]:
        rng, prompts = random.Random(2), prompt_ids(requests, self._vocab_size)
        begin, streams = time.perf_counter(), []

        async def ask(ids: list[int], tokens: int) -> Stream:
            async with free:
                stream = await self.finished(ids, tokens)
            one_ended()
            return stream

        try:
            async with asyncio.TaskGroup() as group:
                for ids, (_, tokens) in zip(prompts, requests):
                    streams.append(group.create_task(ask(ids, tokens)))
                    await asyncio.sleep(rng.expovariate(rate) if rate else 0)
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return begin, [task.result() for task in streams]

    async def start(self, ids: list[int], tokens: int) -> Stream:
        """A stream of `tokens` tokens that is under way."""
        loop = asyncio.get_running_loop()
        stream = Stream(self._request(ids, tokens), tokens, loop.create_future())
        await loop.create_connection(lambda: stream, self._host, self._port, ssl=self._tls or None)
        return stream

    async def finished(self, ids: list[int], tokens: int) -> Stream:
        """A stream that has ended. Raises BenchFailed if it gave fewer tokens."""
        stream = await self.start(ids, tokens)
        await stream.done
        if f'"completion_tokens":{tokens},'.encode() not in stream.end and len(stream.times) != tokens:
            said = stream.end.decode(errors="replace")
            raise BenchFailed(f"a stream gave {len(stream.times)} of {tokens} tokens and ended with {said!r}")
        return stream

    def _request(self, ids: list[int], tokens: int) -> bytes:
        if self._api == "openai":
            path, body = "/v1/completions", dict(prompt=ids, max_tokens=tokens, stream=True, ignore_eos=True)
            body |= dict(stream_options=dict(include_usage=True), temperature=0) | self._wishes
        else:
            parameters = dict(max_new_tokens=tokens, ignore_eos=True, do_sample=False) | self._wishes
            path, body = "/generate_stream", dict(inputs=ids, parameters=parameters)
        content = json.dumps(body).encode()
        head = f"POST {self._path}{path} HTTP/1.1\r\nHost: {self._name}\r\nContent-Type: application/json\r\n"
        head += f"Connection: close\r\n{self._key}Content-Length: {len(content)}\r\n\r\n"
        return head.encode() + content


def gaps(streams: list[Stream], begin: float, end: float) -> list[float]:
    """Milliseconds between neighbouring tokens that both came in that time."""
    pairs = ((a, b) for stream in streams for a, b in zip(stream.times, stream.times[1:]))
    return [1e3 * (b - a) for a, b in pairs if begin <= b <= end]


def percentile(values: list[float], percent: int) -> float:
    """Of one value that value, of none NaN."""
    if len(values) < 2:
        return values[0] if values else float("nan")
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def file_can_be_written(path: Path) -> bool:
    """Whether results can go there, asked before they are measured."""
    return not path.is_dir() and os.access(path if path.exists() else path.parent, os.W_OK)


def summary(begin: float, streams: list[Stream], most_ttft: float, most_tpot: float) -> dict[str, float]:
    """Times in milliseconds. goodput: requests a second whose first token and mean time a token keep to the limits."""
    end = max(stream.times[-1] for stream in streams)
    tokens = sum(stream.tokens for stream in streams)
    first = [1e3 * (stream.times[0] - stream.sent) for stream in streams]
    between = gaps(streams, begin, end)
    spans = [1e3 * (s.times[-1] - s.times[0]) / max(1, s.tokens - 1) for s in streams]
    good = sum(ttft <= most_ttft and span <= most_tpot for ttft, span in zip(first, spans))
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
