"""How models write calls of functions, and which of these ways a chat template teaches.

    hermes        <tool_call>{"name": "f", "arguments": {}}</tool_call>, maybe several (Hermes 2 Pro, Qwen2.5, Qwen3)
    llama3_json   {"name": "f", "parameters": {}} instead of an answer, maybe after <|python_tag|> (Llama 3.1, 3.2, 3.3)
    mistral       [TOOL_CALLS] [{"name": "f", "arguments": {}}, ...] (Mistral 7B 0.3, Nemo, Large 2)

Sources: the models' chat templates; vLLM's documentation of tool calling has the names.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Mapping
from dataclasses import dataclass

from eagle_server.text.chat_template import ChatTemplate
from eagle_server.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ToolFormat:
    """One way of writing calls: `opening`, `bracket`, an object, further objects after `separator`, `closing`.

    `arguments` is the key that models write; either is understood. `bare`: an object at the beginning of the text is a
    call without `opening`, if it names a function that was offered.
    """

    name: str
    opening: str
    bracket: str
    separator: str
    closing: str
    arguments: str
    template: re.Pattern[str]  # found in chat templates that teach it
    bare: bool = False
    id_length: int | None = None  # letters and digits of a call's id, where templates insist on a number

    def new_id(self) -> str:
        """For one call."""
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
    # In a string of Jinja line breaks and quotes are escaped. GLM and Qwen3-Coder write no JSON after the same marker.
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
MARKERS = frozenset({HERMES.opening, HERMES.closing, LLAMA3_JSON.opening, MISTRAL.opening})  # may be special tokens


def find_format(choice: str, template: ChatTemplate) -> ToolFormat | None:
    """The format of --tool-call-parser: by name, none, or for `auto` the one that the template for tools teaches."""
    if choice != "auto":
        return FORMATS.get(choice)
    return next((each for each in FORMATS.values() if each.template.search(template.tool_source)), None)


def marker_tokens(format: ToolFormat, tokenizer: Tokenizer) -> Mapping[int, str]:
    """The format's markers that are special tokens here, so that decoding leaves them out."""
    found = {}
    for marker in (format.opening, format.closing):
        token = tokenizer.token_id(marker) if marker in MARKERS else None
        if token is not None and not tokenizer.decode([token]):
            found[token] = marker
    return found
