"""Runs of lm-eval on the tasks beside this file, in a process of their own: its imports warn, and are not for pytest's.

Reads a list of simple_evaluate's arguments from stdin; writes a list of {"results", "samples"} to the file it is given.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

TASKS = Path(__file__).parent / "lm_eval_tasks"


def run(tasks: TaskManager, arguments: dict[str, Any]) -> dict[str, Any]:
    """Scores of each task, and for each sample what the server answered."""
    done = lm_eval.simple_evaluate(**arguments, task_manager=tasks, bootstrap_iters=0)
    answers = {name: [each["resps"] for each in samples] for name, samples in done["samples"].items()}
    return {"results": done["results"], "samples": answers}


if __name__ == "__main__":
    mine = TaskManager(include_path=str(TASKS), include_defaults=False)  # reading lm-eval's own takes many seconds
    Path(sys.argv[1]).write_text(json.dumps([run(mine, arguments) for arguments in json.load(sys.stdin)]))
