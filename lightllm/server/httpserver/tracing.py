"""A span for every request and one for each of its stages, sent to an OpenTelemetry collector (OTLP over HTTP)."""

import time
from typing import Any

from lightllm.server.httpserver.generation import Generation

EXPORT_TIMEOUT = 2.0  # seconds for a batch, tries and all: a front that ends waits for its last one


class Tracer:
    """endpoint: of a collector, for instance http://localhost:4318/v1/traces. model: the served name.

    Spans are sent in batches by a thread; a collector that is away costs a warning. Raises ImportError without the
    extra `tracing`.
    """

    def __init__(self, endpoint: str, model: str | None):
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import SERVICE_NAME, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            raise ImportError("--otlp_traces_endpoint needs the extra: pip install 'lightllm[tracing]'") from None
        self._provider = TracerProvider(resource=Resource.create({SERVICE_NAME: "lightllm"}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint, timeout=EXPORT_TIMEOUT)))
        self._tracer = self._provider.get_tracer("lightllm")
        self._model = model

    def ended(self, request_id: int, generation: Generation) -> None:
        """Tells of a request that is over, whatever its end."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        to_wall = time.time() - time.monotonic()

        def nanoseconds(moment: float) -> int:
            return int((moment + to_wall) * 1e9)

        caller = TraceContextTextMapPropagator().extract({"traceparent": generation.traceparent})
        span = self._tracer.start_span(
            "llm_request",
            caller,
            SpanKind.SERVER,
            self._attributes(request_id, generation),
            start_time=nanoseconds(generation.times.received),
        )
        if generation.outcome.startswith("error"):
            span.set_status(Status(StatusCode.ERROR, generation.outcome))
        own = set_span_in_context(span)
        for stage, (begin, end) in generation.times.stages().items():
            part = self._tracer.start_span(stage, own, start_time=nanoseconds(begin))
            part.end(nanoseconds(end))
        span.end(nanoseconds(time.monotonic()))

    def _attributes(self, request_id: int, generation: Generation) -> dict[str, Any]:
        """In the words of OpenTelemetry's conventions for generative models; what is None is left out."""
        sampling = generation.sampling
        told = {
            "gen_ai.request.model": self._model,
            "gen_ai.request.max_tokens": sampling.max_new_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.choice.count": sampling.n,
            "gen_ai.response.id": f"{request_id:x}",
            "gen_ai.usage.input_tokens": len(generation.prompt_ids),
            "gen_ai.usage.output_tokens": generation.num_output_tokens,
            "lightllm.usage.cached_tokens": generation.cached_tokens,
            "lightllm.outcome": generation.outcome,
        }
        return {name: value for name, value in told.items() if value is not None}

    def close(self) -> None:
        """Sends what is left."""
        self._provider.shutdown()
