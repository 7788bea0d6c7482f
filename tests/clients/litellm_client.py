# /// script
# dependencies = ["litellm==1.106.2", "mcp==2.3.0"]
# ///
"""LiteLLM's OpenAI and vLLM providers against the server at URL: python litellm_client.py URL.

LiteLLM 1.106 imports mcp when a request has tools, but does not install it.
"""

import json
import os
import sys
from importlib.metadata import version

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # do not fetch the list of prices
import litellm

SERVER = {"api_base": f"{sys.argv[1]}/v1", "api_key": "unused", "temperature": 0, "max_retries": 0}
CHAT = {"messages": [{"role": "user", "content": "Write a function"}], "max_tokens": 24, **SERVER}
TEXT = {"model": "text-completion-openai/demo", "prompt": "def fibonacci(n):\n", "max_tokens": 24, **SERVER}
NUMBERS = {"a": {"type": "integer", "maximum": 99}, "b": {"type": "integer", "maximum": 99}}
ADD = {
    "name": "add",
    "parameters": {"type": "object", "properties": NUMBERS, "required": ["a", "b"], "additionalProperties": False},
}
TOOLS = {
    "tools": [{"type": "function", "function": ADD}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_tokens": 200,
}


def content(model: str) -> str:
    return litellm.completion(model=model, **CHAT).choices[0].message.content


called = litellm.completion(model="openai/demo", **{**CHAT, **TOOLS}).choices[0].message.tool_calls
chat_events = litellm.completion(model="openai/demo", stream=True, **CHAT)
text_events = litellm.text_completion(stream=True, **TEXT)
print(
    json.dumps(
        {
            "version": version("litellm"),
            "completion": litellm.text_completion(**TEXT).choices[0].text,
            "completion_stream": [event.choices[0].text or "" for event in text_events],
            "chat": content("openai/demo"),
            "chat_by_vllm_provider": content("hosted_vllm/demo"),
            "chat_stream": [event.choices[0].delta.content or "" for event in chat_events],
            "tool_calls": [[call.function.name, json.loads(call.function.arguments)] for call in called],
        }
    )
)
