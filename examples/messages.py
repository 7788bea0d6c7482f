"""Use the server through Anthropic's own client: count a prompt's tokens, stream an answer, prescribe its beginning.

pip install anthropic
python -m eagle_server --speculative-num-steps 3 --topk 4    # in another terminal
python examples/messages.py
"""

from __future__ import annotations

import argparse
from typing import Any

import anthropic


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="the server's address, without /v1")
    parser.add_argument("--api-key", default="none", help="needed if the server was started with --api-key")
    options = parser.parse_args()
    client = anthropic.Anthropic(base_url=options.url, api_key=options.api_key)
    question: Any = {"role": "user", "content": "def square(x):"}
    asked: Any = {"model": client.models.list().data[0].id, "system": "# Functions of numbers"}
    print(f"tokens of the prompt: {client.messages.count_tokens(**asked, messages=[question]).input_tokens}")

    asked |= {"max_tokens": 32, "extra_body": {"temperature": 0}}
    print("streamed:")
    with client.messages.stream(**asked, messages=[question]) as stream:
        for text in stream.text_stream:
            print(text, end="", flush=True)
        print(f"\nstop reason: {stream.get_final_message().stop_reason}")

    # An assistant's message at the end is continued.
    begun = {"role": "assistant", "content": "    return x"}
    answer = client.messages.create(**asked, messages=[question, begun])
    print(f"continued:\n{begun['content']}{answer.content[0].text}")


if __name__ == "__main__":
    main()
