"""What a front tells about its requests: Prometheus metrics, and a log line for each."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from lightllm.server.core.messages import Load
from lightllm.server.httpserver.generation import STAGES, Generation
from lightllm.server.httpserver.tracing import Tracer
from lightllm.utils.log_utils import init_logger

logger = init_logger("lightllm.requests")

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKEN_SECONDS = (0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)

HTTP = Counter("lightllm_http_requests", "Answers by path and status", ["path", "status"])
REQUESTS = Counter("lightllm_requests", "Requests that reached the engine, by how they ended", ["outcome"])
DURATION = Histogram("lightllm_request_seconds", "From a request's arrival to its last token", buckets=SECONDS)
FIRST = Histogram("lightllm_time_to_first_token_seconds", "From a request's arrival on", buckets=SECONDS)
PER_TOKEN = Histogram(
    "lightllm_time_per_output_token_seconds", "Mean of a sequence behind its first token", buckets=TOKEN_SECONDS
)
BETWEEN = Histogram(
    "lightllm_inter_token_seconds", "Between two steps that brought this front tokens", buckets=TOKEN_SECONDS
)
IN_STAGE = Histogram("lightllm_stage_seconds", "Where requests spend their time", ["stage"], buckets=SECONDS)


class RequestWatch:
    """Counts, logs and traces requests as they end. log: "human", "json" or "none"."""

    def __init__(self, log: str, tracer: Tracer | None = None):
        self._log = log
        self._tracer = tracer
        self._last_step = 0.0

    def step(self, running: bool) -> None:
        """Tokens have come. running: requests went on since the last time."""
        now = time.monotonic()
        if running and self._last_step:
            BETWEEN.observe(now - self._last_step)
        self._last_step = now

    def idle(self) -> None:
        """Nothing runs any more: the time until the next token is no time between tokens."""
        self._last_step = 0.0

    def ended(self, request_id: int, client: str, generation: Generation) -> None:
        times, count = generation.times, generation.num_output_tokens
        seconds = {stage: end - begin for stage, (begin, end) in times.stages().items()}
        REQUESTS.labels(generation.outcome).inc()
        for stage, spent in seconds.items():
            IN_STAGE.labels(stage).observe(spent)
        if times.first:
            FIRST.observe(times.first - times.received)
            DURATION.observe(times.last - times.received)
        samples = generation.sampling.n or 1
        if count > samples:
            PER_TOKEN.observe((times.last - times.first) * samples / (count - samples))
        if self._tracer is not None:
            self._tracer.ended(request_id, generation)
        if self._log == "none":
            return
        end = {
            "request": request_id,
            "client": client,
            "outcome": generation.outcome,
            "prompt_tokens": len(generation.prompt_ids),
            "cached_tokens": generation.cached_tokens,
            "output_tokens": count,
            **{stage: round(seconds.get(stage, 0.0), 6) for stage in STAGES},
            "total": round(time.monotonic() - times.received, 6),
        }
        logger.info("%s", _for_people(end) if self._log == "human" else msgspec.json.encode(end).decode())


def _for_people(end: dict[str, Any]) -> str:
    stages = ", ".join(f"{stage} {end[stage]:.3f} s" for stage in STAGES)
    client = f" of {repr(end['client'])[1:-1]}" if end["client"] else ""  # escaped: a line stays a line
    return (
        f"request {end['request']:x}{client}: {end['outcome']}; {end['prompt_tokens']} prompt tokens "
        f"({end['cached_tokens']} cached), {end['output_tokens']} output tokens; {stages}"
    )


@dataclass(frozen=True)
class _Router(Collector):
    """The router's numbers at one moment."""

    load: Load
    capacity: int

    def collect(self) -> Iterator[Any]:
        load = self.load
        yield _gauge("sequences_running", "Sequences that run", load.running)
        yield _gauge("sequences_waiting", "Sequences that wait, paused ones among them", load.waiting)
        yield _gauge("sequences_paused", "Sequences that were paused for want of memory", load.paused)
        yield _gauge("kv_tokens_capacity", "KV tokens that the pool holds", self.capacity)
        yield _gauge("kv_tokens_used", "KV tokens of sequences", load.used_tokens)
        yield _gauge("kv_tokens_cached", "KV tokens in the prefix cache alone", load.cached_tokens)
        yield _gauge("kv_tokens_free", "KV tokens of nobody", self.capacity - load.used_tokens - load.cached_tokens)
        yield _gauge("kv_tokens_predicted_peak", "The most that running sequences will use", load.predicted_peak)
        yield _gauge("kv_tokens_used_peak", "The most that was used since the engine was idle", load.used_peak)
        yield _counter("prompt_tokens", "Prompt tokens of admitted sequences", load.prompt_tokens_total)
        yield _counter("cached_prompt_tokens", "Prompt tokens found in the cache", load.cached_prompt_tokens_total)
        yield _counter("output_tokens", "Tokens generated", load.output_tokens_total)
        yield _counter("sequences_admitted", "Sequences that began to run", load.admitted_total)
        yield _counter("device_seconds", "Seconds for which the GPU was at a step", load.device_seconds_total)
        yield _counter("pauses", "Times that a sequence was paused", load.pauses_total)


def _gauge(name: str, help: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"lightllm_{name}", help, value)


def _counter(name: str, help: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"lightllm_{name}", help, value)


def metrics_page(folder: Path, load: Load, capacity: int) -> bytes:
    """Of all fronts, if they share `folder`, and of the router."""
    registry = CollectorRegistry()
    if folder.is_dir():
        MultiProcessCollector(registry, str(folder))
    router = CollectorRegistry()
    router.register(_Router(load, capacity))
    return generate_latest(registry if folder.is_dir() else REGISTRY) + generate_latest(router)
