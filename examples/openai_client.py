"""Use the server through OpenAI's own client: one answer, the same answer as a stream, and the speculative metrics.

pip install openai
python -m eagle_server --speculative-num-steps 3 --topk 4    # in another terminal
python examples/openai_client.py
"""

from __future__ import annotations

import argparse

import openai

PROMPT = "def fibonacci(n):\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:30000/v1", help="the server's address, /v1 included")
    parser.add_argument("--api-key", default="none", help="needed if the server was started with --api-key")
    parser.add_argument("--prompt", default=PROMPT)
    options = parser.parse_args()
    client = openai.OpenAI(base_url=options.url, api_key=options.api_key)
    model = client.models.list().data[0].id
    print(f"model: {model}")

    # The whole answer at once. The seed makes the sampled text repeatable.
    asked = {"model": model, "prompt": options.prompt, "max_tokens": 48, "temperature": 0.7, "seed": 1}
    whole = client.completions.create(**asked)
    print(f"\nanswer:\n{options.prompt}{whole.choices[0].text}")
    assert whole.usage is not None
    print(f"\ntokens: {whole.usage.prompt_tokens} in the prompt, {whole.usage.completion_tokens} generated")

    # This field is not part of OpenAI's API, so the client keeps it as a plain dict.
    metrics = whole.model_dump()["metrics"]["speculative_decoding"]
    print(f"speculation: {metrics['mean_acceptance_length']:.2f} tokens per forward pass of the target")

    # The same request as a stream. One event may carry several tokens: everything that one cycle accepted.
    events = [event.choices[0].text for event in client.completions.create(**asked, stream=True)]
    print(f"stream: {len(events)} events, same text: {''.join(events) == whole.choices[0].text}")

    # Without speculation the text is the same. Only the time changes.
    plain = client.completions.create(**asked, extra_body={"speculative": False})
    print(f"without speculation, same text: {plain.choices[0].text == whole.choices[0].text}")


if __name__ == "__main__":
    main()
