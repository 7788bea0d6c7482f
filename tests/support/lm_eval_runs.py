"""Run lm-eval on the tasks in lm_eval_tasks/. A separate process, because its imports raise warnings.

Reads a JSON list of arguments for simple_evaluate from stdin. Writes a list of {"results", "samples"} to a file.
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
    """The scores of each task, and the server's answer to each sample."""
    done = lm_eval.simple_evaluate(**arguments, task_manager=tasks, bootstrap_iters=0)
    answers = {name: [each["resps"] for each in samples] for name, samples in done["samples"].items()}
    return {"results": done["results"], "samples": answers}


if __name__ == "__main__":
    mine = TaskManager(include_path=str(TASKS), include_defaults=False)  # lm-eval's own tasks take many seconds to read
    Path(sys.argv[1]).write_text(json.dumps([run(mine, arguments) for arguments in json.load(sys.stdin)]))
