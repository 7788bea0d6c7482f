"""Pydantic AI agents with a tool, without and with a type of the output: python SCRIPT URL TURNS CAP."""

import json
import sys
from importlib.metadata import version

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, UnexpectedModelBehavior, capture_run_messages
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

TURNS, CAP = int(sys.argv[2]), int(sys.argv[3])
PROVIDER = OpenAIProvider(base_url=f"{sys.argv[1]}/v1", api_key="unused")


class Done(BaseModel):
    """The end."""

    answer: str


def conversation(kind: type, output: object) -> dict[str, object]:
    """The calls that reached the tool, how often a run ended without an output, and the last output."""
    keys, broken, history, output_type = [], [], [], output
    agent = Agent(kind("m", provider=PROVIDER), output_type=output_type, model_settings={"max_tokens": CAP}, retries=9)

    @agent.tool_plain
    def lookup(key: str) -> str:
        """Look a key up."""
        keys.append(key)
        return f"{key}!"

    prompt = f"{kind.__name__} {output}"
    for _ in range(TURNS):
        with capture_run_messages() as messages:
            try:
                result = agent.run_sync(prompt, message_history=history)
            except UnexpectedModelBehavior as error:
                broken.append(str(error))
                history, prompt = list(messages), "Go on."
                continue
        last = result.output
        if not isinstance(last, str) or "done" in last:
            return {"keys": keys, "broken": broken, "last": last if isinstance(last, str) else last.model_dump_json()}
        history, prompt = result.all_messages(), "Go on."
    raise SystemExit("no end")


kinds = {"chats": OpenAIChatModel, "responses": OpenAIResponsesModel}
outputs = {"text": str, "form": NativeOutput(Done)}
found = {f"{api} {name}": conversation(kind, output) for api, kind in kinds.items() for name, output in outputs.items()}
print(json.dumps({"version": version("pydantic-ai-slim"), **found}))
