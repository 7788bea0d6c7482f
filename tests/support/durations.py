"""Test files by their seconds: `python tests/support/durations.py FILE.xml ...`, reports of pytest --junit-xml."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

MOST = 20


def seconds_by_file(report: Path) -> Counter[str]:
    """Seconds of each test module, in all processes together."""
    seconds = Counter[str]()
    for case in ET.parse(report).getroot().iter("testcase"):
        seconds[case.get("classname", "")] += float(case.get("time", 0))  # type: ignore[assignment]
    return seconds


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        found = seconds_by_file(path) if path.is_file() else Counter[str]()
        print(f"{path}: {sum(found.values()):.0f} s in {len(found)} files")
        for name, spent in found.most_common(MOST):
            print(f"{spent:8.1f} s  {name}")
