"""Which web pages may use this server: a page of another origin may read nothing, and may not make it work either.

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

    `origins`: --cors-allow-origins. `hosts`: --allowed-hosts; if it is empty, any on an address that others reach, and
    on a loopback address (`local`) this machine's own.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str], hosts: Sequence[str], *, local: bool) -> None:
        self._app, self._origins, self._local = app, frozenset(origins), local
        self._hosts = tuple(each.lower().rstrip(".") for each in hosts)

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
        # A page cannot set this header. It is right also where a proxy has replaced the host.
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
        if any(name == each or (each.startswith("*.") and name.endswith(each[1:])) for each in self._hosts):
            return True
        return self._local and is_loopback(name)


def _is_of(origin: str, host: str) -> bool:
    """Whether a header `host` is that of an origin. Without a port, as many proxies pass it on, it is of all ports."""
    (name, place), (ours, whole) = _split(origin), _split(f"//{host}")
    return bool(ours) and (place == whole or (ours == whole and name == ours))


def _split(url: str) -> tuple[str, str]:
    """Its host, and that with its port, in lower case; empty for what is no URL."""
    try:
        parts = urlsplit(url)
        return parts.hostname or "", parts.netloc.lower()
    except ValueError:
        return "", ""


def _forbidden(message: str, code: str) -> ApiError:
    return ApiError(HTTPStatus.FORBIDDEN, message, code=code)
