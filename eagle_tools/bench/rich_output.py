"""rich for benchmarks: without the extra `tools` they end here, in one line, before they measure."""

from eagle_tools import require_extra

require_extra("bench")

from rich.console import Console  # noqa: E402
from rich.progress import Progress, track  # noqa: E402
from rich.table import Table  # noqa: E402

__all__ = ["Console", "Progress", "Table", "track"]
