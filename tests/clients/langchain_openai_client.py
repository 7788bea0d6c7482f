# /// script
# dependencies = ["langchain-openai==1.7.3"]
# ///
"""LangChain's chat and completion models against the server at URL: python langchain_openai_client.py URL."""

import json
import sys
from importlib.metadata import version

from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict, Field

SERVER = {"base_url": f"{sys.argv[1]}/v1", "api_key": "unused", "model": "demo", "temperature": 0, "max_retries": 0}


class Entry(BaseModel):
    """A line of a listing. A small model would add properties without end, so others are forbidden."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=12)
    size: int = Field(ge=0, le=999)


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def entry(method: str) -> dict[str, object]:
    return long.with_structured_output(Entry, method=method).invoke("entry").model_dump()


text = OpenAI(**SERVER, max_tokens=24)
chat = ChatOpenAI(**SERVER, max_tokens=24)
long = ChatOpenAI(**SERVER, max_tokens=200)
called = long.bind_tools([add], tool_choice="required", parallel_tool_calls=False).invoke("add")
print(
    json.dumps(
        {
            "version": version("langchain-openai"),
            "completion": text.invoke("def fibonacci(n):\n"),
            "completion_stream": list(text.stream("def fibonacci(n):\n")),
            "chat": chat.invoke("Write a function").content,
            "chat_stream": [event.content for event in chat.stream("Write a function")],
            "tool_calls": [[call["name"], call["args"]] for call in called.tool_calls],
            "entry": entry("function_calling"),
            "entry_by_schema": entry("json_schema"),
        }
    )
)
