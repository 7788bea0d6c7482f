"""Spans: their attributes, and their export to a collector over HTTP."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from eagle_server.api.app import create_app
from eagle_server.api.telemetry.access import AccessLog
from eagle_server.api.telemetry.tracing import Tracing
from eagle_server.client.client import EngineClient
from eagle_server.config import Config, ObservabilitySection, parse_args
from eagle_server.text.chat_template_files import load_chat_template
from eagle_server.text.tokenizer import load_tokenizer
from tests.api.conftest import REPOSITORY

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HI = [{"role": "user", "content": "hi"}]
TRACEPARENT = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}


class Collector(HTTPServer):
    """A collector that accepts OTLP over HTTP."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.received: list[ExportTraceServiceRequest] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/traces"


class Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.received.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
async def traced(http: httpx.AsyncClient, spans: InMemorySpanExporter) -> httpx.AsyncClient:
    """The application of `http`, with its spans kept in memory."""
    app = http._transport.app
    tracing = Tracing("fake", SimpleSpanProcessor(spans))
    [access] = [each for each in app.user_middleware if each.cls is AccessLog]
    access.kwargs["on_generated"].append(tracing.record)
    return http


async def test_a_call_is_a_span_below_its_parent(traced: httpx.AsyncClient, spans: InMemorySpanExporter) -> None:
    body = {"prompt": "abc", "max_tokens": 40, "temperature": 0.5, "top_p": 0.9}
    answer = (await traced.post("/v1/completions", json=body, headers=TRACEPARENT)).json()
    [span] = spans.get_finished_spans()
    assert (span.name, span.kind.name) == ("llm_request", "SERVER")
    assert format(span.context.trace_id, "032x") == TRACE
    assert format(span.parent.span_id, "016x") == PARENT
    assert span.resource.attributes["service.name"] == "eagle_server"
    values = dict(span.attributes)
    spec = answer["metrics"]["speculative_decoding"]
    expected = {
        "gen_ai.request.id": "mine",
        "gen_ai.request.max_tokens": 40,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.n": 1,
        "gen_ai.response.model": "fake",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.prompt_tokens": 3,
        "gen_ai.usage.completion_tokens": 40,
        "gen_ai.latency.time_in_queue": 0.25,
        "gen_ai.latency.time_in_model_prefill": 0.5,
        "gen_ai.latency.time_in_model_decode": 1.0,
        "gen_ai.latency.time_in_model_inference": 1.5,
        "eagle_server.accept_length": spec["mean_acceptance_length"],
        "http.response.status_code": 200,
    }
    assert {name: values[name] for name in expected} == expected
    assert 0 < values["gen_ai.latency.time_to_first_token"] <= values["gen_ai.latency.e2e"]
    assert span.end_time - span.start_time >= values["gen_ai.latency.e2e"] * 1e9


@pytest.mark.parametrize(
    ("path", "body", "operation"),
    [
        ("/v1/completions", {"prompt": "abc"}, "text_completion"),
        ("/v1/chat/completions", {"messages": HI, "max_tokens": 3}, "chat"),
        ("/v1/responses", {"input": "abc", "max_output_tokens": 3}, "chat"),
        ("/v1/messages", {"messages": HI, "max_tokens": 3}, "chat"),
    ],
)
async def test_a_span_names_path_and_operation(
    traced: httpx.AsyncClient, spans: InMemorySpanExporter, path: str, body: dict[str, Any], operation: str
) -> None:
    assert (await traced.post(path, json=body)).status_code == 200
    [span] = spans.get_finished_spans()
    assert (span.attributes["url.path"], span.attributes["gen_ai.operation.name"]) == (path, operation)


async def test_what_generates_nothing_is_no_span(traced: httpx.AsyncClient, spans: InMemorySpanExporter) -> None:
    await traced.get("/health")
    await traced.post("/v1/completions", json={"prompt": 3})
    assert spans.get_finished_spans() == ()


async def test_spans_reach_the_collector(
    config: Config, engine_client: EngineClient, tokenizer_dir: Path, running: None, collector: Collector
) -> None:
    observability = ObservabilitySection(otlp_traces_endpoint=collector.url)
    tokenizer = load_tokenizer(str(tokenizer_dir))
    template = load_chat_template(str(tokenizer_dir), tokenizer, None)
    app = create_app(config.model_copy(update={"observability": observability}), engine_client, tokenizer, template)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as http:
        assert (await http.post("/v1/completions", json={"prompt": "abc"})).status_code == 200
    app.state.tracing.close()
    [request] = collector.received
    [span] = request.resource_spans[0].scope_spans[0].spans
    assert span.name == "llm_request"


@pytest.mark.slow
def test_missing_packages_are_one_line_that_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['opentelemetry.sdk'] = None; from eagle_server.__main__ import main; "
        "sys.exit(main(['--port', '1', '--log-level', 'error', '--otlp-traces-endpoint', 'http://localhost:4318/v1/traces']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    [line] = done.stderr.strip().splitlines()
    assert "eagle-server[otlp]" in line


@pytest.mark.parametrize("url", ["localhost:4318", "grpc://localhost:4317", ""])
def test_an_endpoint_is_an_http_url(url: str) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--otlp-traces-endpoint", url], environ={})
