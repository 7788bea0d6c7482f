"""Responses conform to /openapi.json, for valid and for invalid requests. There is never an internal error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from eagle_server.api.openapi import openapi
from tests.api.conftest import Server, serving
from tests.api.fake_engine import BREAK
from tests.api.test_parameters import BODIES

pytestmark = pytest.mark.slow

CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]
OPERATIONS = [found.ok() for found in schemathesis.openapi.from_dict(openapi()).get_all_operations()]

CASES = [
    pytest.param(operation, mode, id=f"{operation.label} {mode.value}")
    for operation in OPERATIONS
    for mode in GenerationMode
    if mode is GenerationMode.POSITIVE or len(operation.body)
]


@pytest.fixture(scope="module")
def described(tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tokenizer_dir, tmp_path_factory.mktemp("described") / "log") as running:
        yield running


def test_the_document_is_what_is_served(described: Server) -> None:
    assert httpx.get(f"{described.url}/openapi.json").json() == openapi()


@pytest.mark.parametrize(("operation", "mode"), CASES)
def test_answers_are_as_documented(described: Server, operation: Any, mode: GenerationMode) -> None:
    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=25 if len(operation.body) else 3,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def call(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict):
            case.body.pop("model", None)  # otherwise nearly all requests would get 404
        case.call_and_validate(base_url=described.url, checks=CHECKS, timeout=30)

    call()


@pytest.mark.parametrize("say", ["abc", f"abc{BREAK}"])
@pytest.mark.parametrize("path", BODIES)
def test_events_are_as_documented(described: Server, path: str, say: str) -> None:
    [operation] = [each for each in OPERATIONS if each.path == path]
    body = json.loads(json.dumps(BODIES[path]).replace('"hi"', '"abc"').replace('"abc"', json.dumps(say)))
    answer = operation.Case(body={**body, "stream": True}, media_type="application/json").call_and_validate(
        base_url=described.url, checks=CHECKS, timeout=30
    )
    assert answer.headers["content-type"] == ["text/event-stream; charset=utf-8"]


def test_every_path_has_a_group_that_is_explained() -> None:
    document = openapi()
    explained = {tag["name"] for tag in document["tags"]}
    groups = {path: operation["tags"] for path, methods in document["paths"].items() for operation in methods.values()}
    assert {name for names in groups.values() for name in names} == explained
    assert groups["/v1/messages"] == ["generation"]
    assert groups["/v1/messages/count_tokens"] == groups["/v1/completions/render"] == ["tokens"]
    assert groups["/v1/models"] == groups["/get_load"] == ["model and load"]
    assert groups["/ping"] == groups["/version"] == ["health"]


def test_nothing_failed_unseen(described: Server) -> None:
    assert "Traceback" not in described.log.read_text()
