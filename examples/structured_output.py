"""Ask for JSON of a schema. The answer always parses and fits; drafters propose only what the schema allows.

pip install openai
python -m eagle_server --speculative-num-steps 3 --topk 4    # in another terminal
python examples/structured_output.py
"""

from __future__ import annotations

import argparse
import json

import openai

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["file", "directory"]},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:30000/v1", help="the server's address, /v1 included")
    parser.add_argument("--api-key", default="none", help="needed if the server was started with --api-key")
    options = parser.parse_args()
    client = openai.OpenAI(base_url=options.url, api_key=options.api_key)
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": "entry = "}],
        response_format={"type": "json_schema", "json_schema": {"name": "entry", "schema": SCHEMA}},
        max_completion_tokens=120,
        temperature=0.7,
        seed=3,
    )
    entry = json.loads(answer.choices[0].message.content or "")
    print(json.dumps(entry, indent=2))
    print(f"finish reason: {answer.choices[0].finish_reason}")
    metrics = answer.model_dump()["metrics"]["speculative_decoding"]
    print(f"speculation: {metrics['mean_acceptance_length']:.2f} tokens per forward pass of the target")


if __name__ == "__main__":
    main()
