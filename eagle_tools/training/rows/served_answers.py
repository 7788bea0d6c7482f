"""Answers of a served model with their token ids, over HTTP: any server with `return_token_ids` in chats."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

_BUSY = frozenset({408, 429, 500, 502, 503, 504})  # asked again
_CONNECT_SECONDS = 30.0
_MOST_WAIT = 30.0  # seconds between two tries


class ServerLost(Exception):
    """The server cannot be reached, or is not one that tells token ids. The message is one line."""


class AnswerFailed(Exception):
    """The server refuses one request, or fails it again and again. The message is one line."""


@dataclass(frozen=True)
class ServedAnswer:
    """One answer: its message for the history, and the token ids of its prompt and of itself.

    histogram: how many cycles accepted 0, 1, ... drafts; nothing where the server does not say so.
    """

    message: Mapping[str, Any]
    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    finish_reason: str | None
    histogram: tuple[int, ...] = ()


class AnswerClient:
    """Asks one server. `tries`: of a request while the server is busy or fails; `pause`: seconds after the first."""

    def __init__(self, url: str, api_key: str | None, connections: int, *, tries: int = 6, pause: float = 1.0) -> None:
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        base = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
        self.url, self.tries, self.pause = url, tries, pause
        try:
            self._http = httpx.AsyncClient(
                base_url=base,
                headers=headers,
                timeout=httpx.Timeout(_CONNECT_SECONDS, read=None, pool=None),
                limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
            )
        except httpx.InvalidURL as error:
            raise ServerLost(f"--url {url}: {error}") from None

    async def close(self) -> None:
        await self._http.aclose()

    async def model(self) -> str:
        """The name of the served model.

        Raises:
            ServerLost: nothing answers there, or no server of models.
        """
        response = await self._send("GET", "v1/models", None)
        try:
            return str(response.json()["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError):
            raise ServerLost(f"{self.url}/models answers {response.status_code}, and names no model") from None

    async def answer(self, body: Mapping[str, Any]) -> ServedAnswer:
        """The answer to a request of chat completions.

        Raises:
            AnswerFailed: the request is refused, or fails again and again.
            ServerLost: the server is gone, or does not tell token ids.
        """
        for number in range(self.tries):
            response = await self._send("POST", "v1/chat/completions", {**body, "return_token_ids": True})
            if response.is_success:
                return self._parsed(response)
            if response.status_code not in _BUSY or number + 1 == self.tries:
                raise AnswerFailed(f"{response.status_code}: {_message(response)}")
            await asyncio.sleep(_wait(response, self.pause * 2**number))
        raise AssertionError("tries is at least 1")

    async def flush_cache(self) -> None:
        """Drop the server's prefix cache, so that prompts are computed anew. Other servers may have no such path."""
        await self._send("POST", "flush_cache", None)

    async def _send(self, method: str, path: str, body: Mapping[str, Any] | None) -> httpx.Response:
        """A response. A lost connection is tried once more: the server may have closed it between two requests."""
        for last in (False, True):
            try:
                return await self._http.request(method, path, json=body)
            except httpx.TransportError as error:
                if last:
                    reason = " ".join(str(error).split()) or type(error).__name__
                    raise ServerLost(f"the server at {self.url} cannot be reached: {reason}") from None
        raise AssertionError

    def _parsed(self, response: httpx.Response) -> ServedAnswer:
        try:
            body = response.json()
            choice = body["choices"][0]
            prompt, ids = body.get("prompt_token_ids"), choice.get("token_ids")
            message = choice["message"]
        except (ValueError, KeyError, IndexError, TypeError):
            raise AnswerFailed(f"the answer is none of chat completions: {response.text[:200]!r}") from None
        if not isinstance(prompt, list) or not isinstance(ids, list):
            raise ServerLost(f"the server at {self.url} ignores return_token_ids: its answers have no token ids")
        drafts = (body.get("metrics") or {}).get("speculative_decoding") or {}
        histogram = tuple(drafts.get("acceptance_histogram") or ())
        return ServedAnswer(message, tuple(prompt), tuple(ids), choice.get("finish_reason"), histogram)


def request_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of a `ChatRecord` as requests have it: arguments of calls as JSON text."""
    if not message.get("tool_calls"):
        return dict(message)
    return {**message, "tool_calls": [_request_call(call) for call in message["tool_calls"]]}


def calls_of(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The tool calls of a message."""
    return message.get("tool_calls") or ()


def _request_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function, arguments = call["function"], call["function"]["arguments"]
    text = str(arguments) if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def _message(response: httpx.Response) -> str:
    """The error's message, in one line."""
    try:
        text = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        text = response.text
    return " ".join(text.split())[:300]


def _wait(response: httpx.Response, seconds: float) -> float:
    """Seconds until the next try: what the server says, or `seconds`."""
    told = response.headers.get("retry-after", "")
    return min(_MOST_WAIT, float(told) if told.isdigit() else seconds)
