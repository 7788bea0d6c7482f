"""Which web pages may use this server: pages of other origins may neither read answers nor cause work.

A browser sends some requests of any page to any server, localhost included, and only hides the answers. A page whose
host name is bound to another address after it was loaded (DNS rebinding) may read them, too.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from http import HTTPStatus
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from eagle_server.api.errors import ApiError

ALL = "*"
_READING = frozenset({"GET", "HEAD", "OPTIONS"})


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's own."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class PagesOfThisServer:
    """ASGI middleware: refuses names of other hosts, and requests that pages of other origins send.

    `origins`: --cors-allow-origins. `hosts`: --allowed-hosts. A server on a loopback address (`local`) always accepts
    this machine's names. Without `hosts`, a server on any other address accepts every name.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str], hosts: Sequence[str], *, local: bool) -> None:
        self._app, self._origins, self._local = app, frozenset(origins), local
        self._hosts = tuple(host.lower().rstrip(".") for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope["method"], Headers(scope=scope)) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await refusal.response(scope["path"])(scope, receive, send)

    def _refusal(self, method: str, headers: Headers) -> ApiError | None:
        host, origin = headers.get("host"), headers.get("origin")
        if host is not None and not self._serves(host):
            return _forbidden(
                f"this server is not {host!r}; if it is, start it with --allowed-hosts and that name",
                "host_not_allowed",
            )
        if method in _READING or origin is None or self._origins & {origin, ALL}:
            return None
        # A page cannot set this header. It is also right if a proxy has replaced the host.
        site = headers.get("sec-fetch-site")
        if site in ("same-origin", "none") or (site is None and host is not None and _is_of(origin, host)):
            return None
        return _forbidden(
            f"pages of {origin!r} may not use this server; --cors-allow-origins names those that may",
            "origin_not_allowed",
        )

    def _serves(self, host: str) -> bool:
        if ALL in self._hosts or not (self._hosts or self._local):
            return True
        name = _split(f"//{host}")[0].rstrip(".")
        if any(name == pattern or (pattern.startswith("*.") and name.endswith(pattern[1:])) for pattern in self._hosts):
            return True
        return self._local and is_loopback(name)


def _is_of(origin: str, host: str) -> bool:
    """Whether a `host` header belongs to an origin. Many proxies send no port: then it matches all ports."""
    (name, place), (ours, whole) = _split(origin), _split(f"//{host}")
    return bool(ours) and (place == whole or (ours == whole and name == ours))


def _split(url: str) -> tuple[str, str]:
    """The host of a URL, and its host with the port, in lower case. Empty if it is no URL."""
    try:
        parts = urlsplit(url)
        return parts.hostname or "", parts.netloc.lower()
    except ValueError:
        return "", ""


def _forbidden(message: str, code: str) -> ApiError:
    return ApiError(HTTPStatus.FORBIDDEN, message, code=code)
