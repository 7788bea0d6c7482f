"""`python -m eagle_server.api.health FILE`: ask the server that wrote its URL to FILE (--url-file) for its health.

The health check of the images: it follows --port, --host and TLS wherever they were set. Exit status 0: healthy.
"""

from __future__ import annotations

import ssl
import sys
import urllib.request
from pathlib import Path

TIMEOUT_SECONDS = 2.0


def main(file: str) -> int:
    try:
        url = Path(file).read_text(encoding="utf-8").strip()
        # Nothing secret is sent, and a certificate does not name a loopback address.
        context = ssl._create_unverified_context() if url.startswith("https:") else None
        direct = urllib.request.ProxyHandler({})  # HTTP_PROXY is for downloads
        handlers = [direct] if context is None else [direct, urllib.request.HTTPSHandler(context=context)]
        urllib.request.build_opener(*handlers).open(f"{url}/health", timeout=TIMEOUT_SECONDS).close()
    except (OSError, ValueError) as error:
        sys.stderr.write(f"not healthy: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
