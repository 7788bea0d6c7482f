"""The address of a client: of the connection, or the one that a trusted proxy names."""

from __future__ import annotations

import ipaddress
from typing import Any

from starlette.types import Scope
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

UNIX = "unix"  # the address of clients on a Unix socket
_IPV6_NETWORK = 64  # bits; one client has all addresses of such a network


class TrustedProxies(ProxyHeadersMiddleware):
    """ASGI middleware: a request over a connection of a trusted proxy has the client that `x-forwarded-for` names.

    Every proxy appends the address it was called from, so the last address that is no trusted proxy's is the client's.
    What stands before it, the client may have written itself.
    """

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope.get("client") is None:
            scope["client"] = (UNIX, 0)
        await super().__call__(scope, receive, send)


def address_of(scope: Scope) -> str:
    """Who sends a request, for fairness between clients without API keys: an IPv4 address, or an IPv6 network."""
    host: str = (scope.get("client") or (UNIX, 0))[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((int(address), _IPV6_NETWORK), strict=False))
