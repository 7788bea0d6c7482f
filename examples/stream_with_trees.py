"""Stream an answer and print the draft tree of each cycle: which tokens were proposed, and which were accepted.

pip install openai
python -m eagle_server --speculative-num-steps 3 --topk 4    # in another terminal
python examples/stream_with_trees.py
"""

from __future__ import annotations

import argparse
from typing import Any

import openai

PROMPT = "def fibonacci(n):\n"


def branches(tree: dict[str, Any], node: int = 0, indent: str = "") -> list[str]:
    """One line per node below `node`. A star marks the accepted nodes."""
    lines = []
    for child, parent in enumerate(tree["parents"]):
        if parent == node:
            mark = "*" if child in tree["accepted"] else " "
            lines.append(f"  {mark} {indent}{tree['tokens'][child]!r}")
            lines.extend(branches(tree, child, indent + "    "))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:30000/v1", help="the server's address, /v1 included")
    parser.add_argument("--api-key", default="none", help="needed if the server was started with --api-key")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-tokens", type=int, default=24)
    options = parser.parse_args()
    client = openai.OpenAI(base_url=options.url, api_key=options.api_key)
    model = client.models.list().data[0].id
    asked = {"model": model, "prompt": options.prompt, "max_tokens": options.max_tokens, "temperature": 0}
    cycle, text = 0, ""
    for event in client.completions.create(**asked, stream=True, extra_body={"return_trees": True}):
        choice = event.choices[0].model_dump()
        text += choice["text"]
        for tree in choice["trees"]:
            cycle += 1
            print(f"cycle {cycle}: {len(tree['tokens']) - 1} drafted, {len(tree['accepted'])} accepted")
            print(f"    {tree['tokens'][0]!r}  (the newest token, root of the tree)")
            print("\n".join(branches(tree)))
            if tree["bonus"] is not None:  # the answer may end before it
                print(f"  + {tree['bonus']!r}  (the target's own token)")
            print()
    print(f"{options.prompt}{text}")


if __name__ == "__main__":
    main()
