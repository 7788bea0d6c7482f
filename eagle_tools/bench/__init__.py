"""Benchmarks. They need the extra `tools`: without it, each ends here, before it measures."""

from eagle_tools import require_extra

require_extra("bench")
