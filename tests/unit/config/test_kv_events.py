"""--kv-events-config: vLLM's JSON, checked key by key."""

from __future__ import annotations

import json
from typing import Any

import pytest

from eagle_server.config import Config, from_options, parse_args

FLAG = "--kv-events-config"


def parse(**keys: Any) -> Config:
    return parse_args([FLAG, json.dumps(keys)], environ={})


def test_events_are_off_unless_they_are_enabled() -> None:
    assert parse_args([], environ={}).cache.published_events is None
    assert parse(enable_kv_cache_events=False, endpoint="tcp://*:5557").cache.published_events is None
    assert parse(enable_kv_cache_events=True, publisher="null").cache.published_events is None
    events = parse(enable_kv_cache_events=True).cache.published_events
    assert events is not None
    assert (events.endpoint, events.replay_endpoint) == ("tcp://127.0.0.1:5557", None), "for this machine alone"


def test_every_key_of_vllm_is_taken_from_flag_environment_and_code() -> None:
    keys = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:7000",
        "replay_endpoint": "ipc:///tmp/replay",
        "buffer_steps": 10,
        "hwm": 0,
        "topic": "kv@pod@model",
    }
    by_flag = parse(**keys)
    assert by_flag.cache.published_events is not None
    assert by_flag.cache.published_events.model_dump() == keys
    assert parse_args([], environ={"EAGLE_SERVER_KV_EVENTS_CONFIG": json.dumps(keys)}) == by_flag
    assert from_options({"kv_events_config": keys}) == by_flag
    assert by_flag.public_dict()["cache"]["kv_events_config"] == keys


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", 'should be a JSON object, like {"enable_kv_cache_events": true}'),
        ('{"publisher": "zmq"}', "enable_kv_cache_events is missing: true publishes, false does not"),
        ('{"enable_kv_cache_events": 1}', "enable_kv_cache_events: Input should be a valid boolean"),
        ('{"enable_kv_cache_events": true, "enpoint": ""}', "unknown key enpoint; there are enable_kv_cache_events, "),
        (
            '{"enable_kv_cache_events": true, "endpoint": "5557"}',
            "endpoint: should be tcp://<address>:<port, 1 to 65535> or ipc://<file>",
        ),
        ('{"enable_kv_cache_events": true, "endpoint": "tcp://*:0"}', "endpoint: should be tcp://"),
        (
            '{"enable_kv_cache_events": true, "endpoint": "tcp://*:70000"}',
            "endpoint: should be tcp://<address>:<port, ",
        ),
        ('{"enable_kv_cache_events": true, "replay_endpoint": "tcp://*:65536"}', "replay_endpoint: should be tcp://"),
        (
            '{"enable_kv_cache_events": true, "topic": "\\ud800"}',
            "topic: should be text in UTF-8, without half of a surrogate pair",
        ),
        (
            '{"enable_kv_cache_events": true, "endpoint": "ipc:///tmp/\\ud800"}',
            "endpoint: should be text in UTF-8, without half of a surrogate pair",
        ),
        (
            '{"enable_kv_cache_events": true, "replay_endpoint": "tcp://127.0.0.1:5557"}',
            "endpoint and replay_endpoint should be two, not both tcp://127.0.0.1:5557",
        ),
        ('{"enable_kv_cache_events": true, "buffer_steps": 0}', "buffer_steps: Input should be greater than or equal"),
    ],
)
def test_a_wrong_value_is_refused_by_its_key(value: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args([FLAG, value], environ={})
    assert f"{FLAG} {value!r}: {message}" in capsys.readouterr().err


def test_every_port_of_tcp_is_taken() -> None:
    for port in (1, 65535):
        events = parse(enable_kv_cache_events=True, endpoint=f"tcp://*:{port}").cache.published_events
        assert events is not None
        assert events.endpoint == f"tcp://*:{port}"


def test_events_need_the_prefix_cache(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args([FLAG, '{"enable_kv_cache_events": true}', "--disable-radix-cache"], environ={})
    assert "with --disable-radix-cache nothing is cached; drop one of them" in capsys.readouterr().err
