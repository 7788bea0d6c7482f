"""LangChain's chat model in a conversation with tools against the server at URL: python SCRIPT URL TURNS CAP."""

import json
import sys
from importlib.metadata import version

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

TURNS, CAP = int(sys.argv[2]), int(sys.argv[3])
chat = ChatOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="unused", model="m", max_retries=0, max_tokens=CAP)


def lookup(key: str) -> str:
    """Look a key up."""
    return f"{key}!"


def conversation(*, streamed: bool) -> list[list[object]]:
    model, messages, calls, ends = chat.bind_tools([lookup]), [HumanMessage(f"LangChain {streamed}")], [], []
    while len(ends) < TURNS:
        answer = None
        if streamed:
            for piece in model.stream(messages):
                answer = piece if answer is None else answer + piece
        else:
            answer = model.invoke(messages)
        messages.append(answer)
        ends.append(answer.response_metadata["finish_reason"])
        for call in [*answer.tool_calls, *answer.invalid_tool_calls]:
            calls.append([call["name"], call["args"]])
            messages.append(ToolMessage("!", tool_call_id=call["id"]))
        if not (answer.tool_calls or answer.invalid_tool_calls):
            messages.append(HumanMessage("Go on."))
    return [calls, ends, messages[-2].content]


whole, streamed = conversation(streamed=False), conversation(streamed=True)
print(json.dumps({"version": version("langchain-openai"), "whole": whole, "streamed": streamed}))
