"""The formats in which models write tool calls, and which of them a chat template uses.

    hermes        <tool_call>{"name": "f", "arguments": {}}</tool_call>, one or more (Hermes 2 Pro, Qwen2.5, Qwen3)
    llama3_json   {"name": "f", "parameters": {}} instead of an answer, or after <|python_tag|> (Llama 3.1, 3.2, 3.3)
    mistral       [TOOL_CALLS] [{"name": "f", "arguments": {}}, ...] (Mistral 7B 0.3, Nemo, Large 2)

Sources: the models' chat templates. The names are those of vLLM's parsers.
"""

from __future__ import annotations

import re
import secrets
import string
from dataclasses import dataclass

from eagle_server.text.chat_template import ChatTemplate


@dataclass(frozen=True)
class ToolFormat:
    """Calls in one format: `opening`, `bracket`, an object, further objects after `separator`, `closing`.

    `arguments` is the key that the model writes; the parser accepts "arguments" and "parameters" for all formats.
    `bare`: an object at the beginning of the text is a call without `opening`, if it names an offered function.
    """

    name: str
    opening: str
    bracket: str
    separator: str
    closing: str
    arguments: str
    template: re.Pattern[str]  # found in chat templates that use this format
    bare: bool = False
    id_length: int | None = None  # of a call's id, where the chat template demands a certain length

    def new_id(self) -> str:
        """An id for one call."""
        if self.id_length is None:
            return f"call_{secrets.token_hex(12)}"
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(self.id_length))


HERMES = ToolFormat(
    name="hermes",
    opening="<tool_call>",
    bracket="",
    separator="",
    closing="</tool_call>",
    arguments="arguments",
    # Line breaks and quotes are escaped in a Jinja string. GLM and Qwen3-Coder have the same marker, but write no JSON.
    template=re.compile(r"<tool_call>(?:\\n|\s)*\{+\s*\\?[\"']name"),
)
LLAMA3_JSON = ToolFormat(
    name="llama3_json",
    opening="<|python_tag|>",
    bracket="",
    separator=";",
    closing="",
    arguments="parameters",
    template=re.compile(r'<\|python_tag\|>|\{\\?"name\\?": function name, \\?"parameters\\?": dictionary'),
    bare=True,
)
MISTRAL = ToolFormat(
    name="mistral",
    opening="[TOOL_CALLS]",
    bracket="[",
    separator=",",
    closing="]",
    arguments="arguments",
    # Newer models write [TOOL_CALLS]name[ARGS]{...} or [TOOL_CALLS]name{...} instead of a list.
    template=re.compile(r"\[TOOL_CALLS\]\s*\[(?!ARGS\])"),
    id_length=9,
)
FORMATS = {each.name: each for each in (HERMES, LLAMA3_JSON, MISTRAL)}


def find_format(choice: str, template: ChatTemplate) -> ToolFormat | None:
    """The format that --tool-call-parser names. `auto`: the one that the chat template for tools uses, if any."""
    if choice != "auto":
        return FORMATS.get(choice)
    return next((each for each in FORMATS.values() if each.template.search(template.tool_source)), None)
