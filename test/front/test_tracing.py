"""Traces: what a collector receives over a real socket is what happened to the request."""

import gzip
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from front.scripted_engine import serving
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from support.http_background import in_background

from lightllm.server.httpserver import tracing

STAGES = ["tokenize", "queue", "prefill", "decode", "detokenize"]
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector(ThreadingHTTPServer):
    """spans: all that came."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1/traces"
        self.spans: list = []


class Handler(BaseHTTPRequestHandler):
    server: Collector

    def log_message(self, *_: object) -> None: ...

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
        self.send_response(200)
        self.end_headers()


@pytest.fixture
def collector() -> Iterator[Collector]:
    with in_background(Collector()) as collector:
        yield collector


def attributes(span) -> dict[str, object]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes}


def test_a_trace_of_every_request(tokenizer, collector, monkeypatch) -> None:
    monkeypatch.setattr(tracing, "EXPORT_TIMEOUT", 60)
    with serving(tokenizer, otlp_traces_endpoint=collector.url, model_name="m") as (front, engine):
        body = {"inputs": "ABC", "parameters": {"max_new_tokens": 4, "temperature": 0.5}}
        with httpx.Client(base_url=front.url, timeout=60) as client:
            client.post("/generate", json=body, headers={"traceparent": CALLER})
            client.post("/generate_stream", json=body)
            engine.refusal = (429, "full")
            client.post("/generate", json=body)
    whole = [span for span in collector.spans if span.name == "llm_request"]
    assert len(whole) == 3, "the front sends what it has before it ends"
    first, second, refused = whole
    assert (first.trace_id.hex(), first.parent_span_id.hex()) == tuple(CALLER.split("-")[1:3])
    assert second.trace_id != first.trace_id and not second.parent_span_id
    told = attributes(first)
    assert told["gen_ai.request.model"] == "m" and told["gen_ai.request.temperature"] == 0.5
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (3, 4)
    assert told["lightllm.outcome"] == "length"
    assert attributes(refused)["lightllm.outcome"] == refused.status.message == "error 429"
    for span in (first, second):
        stages = [part for part in collector.spans if part.parent_span_id == span.span_id]
        assert [part.name for part in stages] == STAGES
        moments = [span.start_time_unix_nano]
        for part in stages:
            assert part.start_time_unix_nano == moments[-1] <= part.end_time_unix_nano, "one begins where one ends"
            moments.append(part.end_time_unix_nano)
        assert moments[-1] <= span.end_time_unix_nano


def test_a_collector_that_is_away_changes_nothing(tokenizer) -> None:
    with serving(tokenizer, otlp_traces_endpoint="http://127.0.0.1:9/v1/traces") as (front, _):
        body = {"inputs": "A", "parameters": {"max_new_tokens": 2}}
        assert httpx.post(f"{front.url}/generate", json=body, timeout=60).status_code == 200
