"""The value of --kv-events-config: vLLM's JSON object, by its names."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from eagle_server.config.base import Count, json_object

_LAST_PORT = (1 << 16) - 1


def _text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("should be text in UTF-8, without half of a surrogate pair") from None
    return value


def _endpoint(value: str) -> str:
    match = re.fullmatch(r"tcp://\S+:([1-9][0-9]{0,4})|ipc://\S+", value)
    if match is None or int(match[1] or 1) > _LAST_PORT:
        raise ValueError(f"should be tcp://<address>:<port, 1 to {_LAST_PORT}> or ipc://<file>")
    return value


Text = Annotated[str, AfterValidator(_text)]
Endpoint = Annotated[Text, AfterValidator(_endpoint)]


class KVEventsConfig(BaseModel):
    """Whether and where the events of the prefix cache are published."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    enable_kv_cache_events: bool
    publisher: Literal["zmq", "null"] = "zmq"
    endpoint: Endpoint = "tcp://127.0.0.1:5557"
    replay_endpoint: Endpoint | None = None
    buffer_steps: Count = 10_000
    hwm: Annotated[int, Field(ge=0)] = 100_000
    topic: Text = ""

    @model_validator(mode="after")
    def _are_two_endpoints(self) -> KVEventsConfig:
        if self.endpoint == self.replay_endpoint:
            raise ValueError(f"endpoint and replay_endpoint should be two, not both {self.endpoint}")
        return self

    @property
    def publishes(self) -> bool:
        return self.enable_kv_cache_events and self.publisher == "zmq"

    def __str__(self) -> str:
        return self.model_dump_json()


def parsed(value: object) -> object:
    """The object of a JSON text.

    Raises:
        ValueError: it is no such object; the message names the key.
    """
    if isinstance(value, KVEventsConfig):
        return value
    try:
        return KVEventsConfig.model_validate(json_object(value, like='{"enable_kv_cache_events": true}'))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    key = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        raise ValueError(f"unknown key {key}; there are {', '.join(KVEventsConfig.model_fields)}")
    if first["type"] == "missing":
        raise ValueError(f"{key} is missing: true publishes, false does not")
    raise ValueError(": ".join(filter(None, (key, first["msg"].removeprefix("Value error, ")))))
