"""Generate without a server: the engine runs in this process.

python examples/python_api.py
"""

from __future__ import annotations

from eagle_server import LLM, SamplingParams


def main() -> None:
    llm = LLM("demo", speculative_num_steps=3, topk=4, progress=False)  # options as in a YAML file of --config

    # All prompts run together; each has its own answer and metrics.
    sampling = SamplingParams(max_tokens=32, temperature=0.7, seed=1)
    prompts = ["def fibonacci(n):\n", "import os\n", "class Stack:\n"]
    outputs = llm.generate(prompts, sampling)
    for output in outputs:
        print(f"{output.prompt}{output.outputs[0].text}\n---")
        if output.metrics is not None:
            print(f"{output.metrics.mean_acceptance_length:.2f} tokens per forward pass of the target\n")

    # Without speculation the texts are the same.
    plain = llm.generate(prompts, max_tokens=32, temperature=0.7, seed=1, speculative=False)
    same = [each.outputs[0].text for each in plain] == [each.outputs[0].text for each in outputs]
    print(f"without speculation, same texts: {same}")

    # A chat, whose answer a grammar forms.
    question = [{"role": "user", "content": "Which is the largest? 1, 2 or 3"}]
    [chat] = llm.chat(question, max_tokens=8, temperature=0, structured_outputs={"choice": ["one", "two", "three"]})
    print(f"chat: {chat.outputs[0].text}")


if __name__ == "__main__":
    main()
