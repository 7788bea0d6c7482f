"""Use OpenAI's Responses API: a streamed answer, and a second turn of the same conversation.

pip install openai
python -m eagle_server --speculative-num-steps 3 --topk 4    # in another terminal
python examples/responses.py
"""

from __future__ import annotations

import argparse
from typing import Any

import openai


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:30000/v1", help="the server's address, /v1 included")
    parser.add_argument("--api-key", default="none", help="needed if the server was started with --api-key")
    options = parser.parse_args()
    client = openai.OpenAI(base_url=options.url, api_key=options.api_key)
    asked: Any = {"model": client.models.list().data[0].id, "max_output_tokens": 32, "temperature": 0}
    asked["instructions"] = "# Functions of numbers"
    conversation: list[Any] = [{"role": "user", "content": "def square(x):"}]

    print("first answer:")
    for event in client.responses.create(**asked, input=conversation, stream=True):
        if event.type == "response.output_text.delta":
            print(event.delta, end="", flush=True)
        elif event.type in ("response.completed", "response.incomplete"):  # incomplete: max_output_tokens was reached
            conversation += event.response.output

    # The server keeps no conversations: each request has the whole one. Its beginning is in the prefix cache by now.
    conversation.append({"role": "user", "content": "def cube(x):"})
    second = client.responses.create(**asked, input=conversation)
    print(f"\n\nsecond answer, {second.status}:\n{second.output_text}")
    assert second.usage is not None
    cached = second.usage.input_tokens_details.cached_tokens
    print(f"\ntokens: {second.usage.input_tokens} in the prompt, {cached} of them from the cache")


if __name__ == "__main__":
    main()
