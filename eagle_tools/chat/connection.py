"""What a chat asks a server over HTTP."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from eagle_tools.chat.answer import Event

SECONDS = 30.0  # for a connection and for short answers; a stream may be silent for longer
UNIX = "unix:"
NO_TEMPLATE = "built-in: dialogue"  # in the server's information, for a model without a chat template


class ChatFailure(Exception):
    """The server cannot be reached, or it refuses or ends a request; the message is one line."""


@dataclass(frozen=True)
class Served:
    """What a server says about itself. drafts: how it drafts, None if it does not say so."""

    model: str
    drafts: str | None
    has_template: bool
    has_trees: bool


class Connection:
    """A client of one server. `url` may be `unix:PATH`, for the path of a Unix socket.

    Raises:
        ChatFailure: it is not a URL.
    """

    def __init__(self, url: str, api_key: str | None) -> None:
        headers = {} if api_key is None else {b"authorization": f"Bearer {api_key}".encode()}
        timeout = httpx.Timeout(SECONDS, read=None)
        self.url = url
        if url.startswith(UNIX):
            transport = httpx.HTTPTransport(uds=url.removeprefix(UNIX))
            self._http = httpx.Client(
                transport=transport, base_url="http://localhost", headers=headers, timeout=timeout
            )
        else:
            url = url if "://" in url else f"http://{url}"
            base = url.rstrip("/").removesuffix("/v1")
            try:
                self._http = httpx.Client(base_url=base, headers=headers, timeout=timeout)
            except httpx.InvalidURL as error:
                raise ChatFailure(f"--url {self.url}: {error}") from None

    def close(self) -> None:
        self._http.close()

    def is_healthy(self) -> bool:
        """Whether the server generates now."""
        try:
            return self._http.get("health", timeout=SECONDS).is_success
        except httpx.HTTPError:
            return False

    def served(self) -> Served:
        """What is served.

        Raises:
            ChatFailure: the server cannot be reached or refuses to say it.
        """
        models = self._get("v1/models")
        model = str(models["data"][0]["id"])
        try:
            info = self._get("v1/server_info")
        except _Refused:  # another server, or a proxy that does not pass this path on
            return Served(model, None, has_template=True, has_trees=False)
        resolved = info.get("resolved") or {}
        template = resolved.get("model", {}).get("chat_template")
        drafts = (info.get("serving") or {}).get("speculative_algorithm")
        return Served(model, drafts, has_template=template != NO_TEMPLATE, has_trees=True)

    def events(self, path: str, body: Mapping[str, Any]) -> Generator[Event, None, None]:
        """The events of a stream. Closing the iterator ends the request.

        Raises:
            ChatFailure: the request is refused, or fails before its end.
        """
        try:
            with self._http.stream("POST", path, json={**body, "stream": True}) as response:
                if not response.is_success:
                    response.read()
                    raise _refusal(response)
                for line in response.iter_lines():
                    if line == "data: [DONE]":
                        return
                    if line.startswith("data: "):
                        event = json.loads(line.removeprefix("data: "))
                        if "error" in event:
                            raise ChatFailure(event["error"]["message"])
                        yield event
        except httpx.HTTPError as error:
            raise self._lost(error) from None
        raise ChatFailure("the connection was lost before the answer ended")

    def _get(self, path: str) -> Any:
        try:
            response = self._http.get(path, timeout=SECONDS)
        except httpx.HTTPError as error:
            raise self._lost(error) from None
        if not response.is_success:
            raise _refusal(response)
        try:
            return response.json()
        except ValueError:
            raise ChatFailure(f"{self.url}/{path} answers with no JSON: is it a server of models?") from None

    def _lost(self, error: Exception) -> ChatFailure:
        reason = " ".join(str(error).split()) or type(error).__name__
        return ChatFailure(f"the server at {self.url} cannot be reached: {reason}")


class _Refused(ChatFailure):
    pass


def _refusal(response: httpx.Response) -> _Refused:
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.reason_phrase
    return _Refused(f"{message} (status {response.status_code})")
