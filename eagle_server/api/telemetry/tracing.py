"""Spans for OpenTelemetry, sent to an OTLP endpoint over HTTP: one per generating request.

Attribute names come from the semantic conventions for generative AI, else from vLLM. The SDK reads its OTEL_* variables
itself: service name, sampler, headers, batches.
"""

from __future__ import annotations

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from eagle_server.api.telemetry.request_record import EngineRequestRecord, RequestRecord

SPAN = "llm_request"
FIRST_SERVER_ERROR = 500


class Tracing:
    """Makes a span of each ended request. It has its own provider, and changes no global state."""

    def __init__(self, model_name: str, processor: SpanProcessor) -> None:
        resource = Resource.create()
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "eagle_server"}))
        self._model_name = model_name
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("eagle_server")
        self._propagator = TraceContextTextMapPropagator()

    def record(self, request: RequestRecord) -> None:
        """A span from the request's start until now. Its parent is the span that the traceparent header names."""
        span = self._tracer.start_span(
            SPAN,
            context=self._propagator.extract(request.headers),
            kind=SpanKind.SERVER,
            attributes=attributes(request, self._model_name),
            start_time=request.began_ns,
        )
        if request.status >= FIRST_SERVER_ERROR:
            span.set_status(Status(StatusCode.ERROR))
        span.end()

    def close(self) -> None:
        """Send all spans that have not been sent."""
        self._provider.shutdown()


def otlp_processor(endpoint: str) -> SpanProcessor:
    """Sends spans in batches to the URL `endpoint`, from a separate thread."""
    return BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint))


def attributes(request: RequestRecord, model_name: str) -> dict[str, AttributeValue]:
    """The attributes of a request's span. Latencies, in seconds, belong to the engine request that ended last."""
    first = request.engine_requests[0].request
    values: dict[str, AttributeValue] = {
        "http.request.method": request.method,
        "url.path": request.path,
        "http.response.status_code": int(request.status),
        "gen_ai.operation.name": "text_completion" if request.path == "/v1/completions" else "chat",
        "gen_ai.response.model": model_name,
        "gen_ai.request.id": request.request_id,
        "gen_ai.request.n": next(record.n for record in request.engine_requests if record.n is not None),
        "gen_ai.request.max_tokens": first.sampling.max_tokens,
        "gen_ai.request.temperature": first.sampling.temperature,
        "gen_ai.request.top_p": first.sampling.top_p,
        "gen_ai.response.finish_reasons": [record.reason.value for record in request.engine_requests],
        "gen_ai.usage.num_sequences": len(request.engine_requests),
        "gen_ai.usage.prompt_tokens": request.prompt_tokens,
        "gen_ai.usage.input_tokens": request.prompt_tokens,
        "gen_ai.usage.completion_tokens": request.output_tokens,
        "gen_ai.usage.output_tokens": request.output_tokens,
    }
    firsts = [record.first_token - record.began for record in request.engine_requests if record.first_token is not None]
    if firsts:
        values["gen_ai.latency.time_to_first_token"] = min(firsts)
    ended = [record for record in request.engine_requests if record.ended is not None]
    if ended:
        values |= _latencies(max(ended, key=lambda record: record.ended or 0.0))
    if request.key:
        values["eagle_server.api_key_name"] = request.key
    spec = request.spec
    if spec is not None:
        values["eagle_server.accept_length"] = spec.mean_acceptance_length
        values["eagle_server.draft_tokens"] = spec.drafted
        values["eagle_server.accepted_tokens"] = spec.accepted
    return values


def _latencies(record: EngineRequestRecord) -> dict[str, AttributeValue]:
    values: dict[str, AttributeValue] = {}
    if record.ended is not None:
        values["gen_ai.latency.e2e"] = record.ended - record.began
    if record.last is not None and record.last.timing is not None:
        timing = record.last.timing
        values["gen_ai.latency.time_in_queue"] = timing.queue
        values["gen_ai.latency.time_in_model_prefill"] = timing.prefill
        values["gen_ai.latency.time_in_model_decode"] = timing.decode
        values["gen_ai.latency.time_in_model_inference"] = timing.prefill + timing.decode
    return values
