"""LiteLLM in a conversation with tools against the server at URL: python SCRIPT URL TURNS CAP."""

import json
import os
import sys
from importlib.metadata import version

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # do not fetch the list of prices
import litellm

TURNS, CAP = int(sys.argv[2]), int(sys.argv[3])
SERVER = {
    "model": "openai/m",
    "api_base": f"{sys.argv[1]}/v1",
    "api_key": "unused",
    "max_retries": 0,
    "max_tokens": CAP,
}
KEYS = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}
TOOLS = [{"type": "function", "function": {"name": "lookup", "parameters": KEYS}}]


def conversation(*, streamed: bool) -> list[list[object]]:
    messages, calls, ends = [{"role": "user", "content": f"LiteLLM {streamed}"}], [], []
    while len(ends) < TURNS:
        answer = litellm.completion(messages=messages, tools=TOOLS, stream=streamed, **SERVER)
        if streamed:
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        message = answer.choices[0].message
        messages.append(message.model_dump())
        ends.append(answer.choices[0].finish_reason)
        for call in message.tool_calls or []:
            calls.append([call.function.name, call.function.arguments])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "!"})
        if not message.tool_calls:
            messages.append({"role": "user", "content": "Go on."})
    return [calls, ends, messages[-2]["content"]]


whole, streamed = conversation(streamed=False), conversation(streamed=True)
print(json.dumps({"version": version("litellm"), "whole": whole, "streamed": streamed}))
