# /// script
# dependencies = ["pydantic-ai-slim[openai]==2.68.0"]
# ///
"""Pydantic AI agents against the server at URL: python pydantic_ai_client.py URL."""

import json
import sys
from importlib.metadata import version

from pydantic import BaseModel, ConfigDict, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

MODEL = OpenAIChatModel("demo", provider=OpenAIProvider(base_url=f"{sys.argv[1]}/v1", api_key="unused"))
SHORT, LONG = ({"max_tokens": limit, "temperature": 0} for limit in (24, 200))


class Entry(BaseModel):
    """A line of a listing. A small model would add properties without end, so others are forbidden."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=12)
    size: int = Field(ge=0, le=999)


def entry(output: object) -> dict[str, object]:
    return Agent(MODEL, output_type=output, model_settings=LONG).run_sync("an entry").output.model_dump()


with Agent(MODEL, model_settings=SHORT).run_stream_sync("Write a function") as stream:
    pieces = list(stream.stream_text(delta=True, debounce_by=None))
print(
    json.dumps(
        {
            "version": version("pydantic-ai-slim"),
            "chat": Agent(MODEL, model_settings=SHORT).run_sync("Write a function").output,
            "chat_stream": pieces,
            "entry": entry(ToolOutput(Entry)),
            "entry_by_schema": entry(NativeOutput(Entry)),
        }
    )
)
