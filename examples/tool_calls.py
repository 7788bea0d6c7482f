"""Let the model call a function, run it, and send its result back.

pip install openai
python -m eagle_server --chat-template examples/demo_chat_template.jinja    # in another terminal
python examples/tool_calls.py
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import openai

NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
FUNCTIONS: dict[str, Any] = {"length": lambda text: len(text), "multiply": lambda a, b: a * b}
PARAMETERS: dict[str, Any] = {
    "length": {"text": {"type": "string", "maxLength": 20}},
    "multiply": {"a": NUMBER, "b": NUMBER},
}


def tool(name: str, properties: dict[str, Any]) -> Any:
    """All parameters are required, and there are no others."""
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:30000/v1", help="the server's address, /v1 included")
    parser.add_argument("--api-key", default="none", help="needed if the server was started with --api-key")
    options = parser.parse_args()
    client = openai.OpenAI(base_url=options.url, api_key=options.api_key)
    asked: Any = {"model": client.models.list().data[0].id, "temperature": 0.7, "seed": 3}
    asked["tools"] = [tool(*each) for each in PARAMETERS.items()]
    messages: list[Any] = [{"role": "user", "content": "3 * 14 = "}]

    # "required": a grammar enforces at least one call. "auto" leaves it to the model, and the demo would make none.
    first = client.chat.completions.create(**asked, messages=messages, tool_choice="required", max_tokens=200)
    messages.append(first.choices[0].message)
    for call in first.choices[0].message.tool_calls or []:
        arguments = json.loads(call.function.arguments)
        result = FUNCTIONS[call.function.name](**arguments)
        print(f"{call.function.name}({', '.join(f'{name}={value!r}' for name, value in arguments.items())}) = {result}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})

    second = client.chat.completions.create(**asked, messages=messages, tool_choice="none", max_tokens=24, stop=["\n"])
    print(f"answer: {second.choices[0].message.content}")


if __name__ == "__main__":
    main()
