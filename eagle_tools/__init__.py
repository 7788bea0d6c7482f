"""Tools around the server: benchmarks, training, draft trees in the terminal, chat. A server needs none of them."""

from pathlib import Path

import eagle_server

DEMO = Path(eagle_server.__file__).parent / "assets" / "demo"  # the embedded pair, its other heads and held-out prompts
