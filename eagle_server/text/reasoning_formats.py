"""How models write their thinking before the answer, and which way a chat template uses.

    deepseek-r1   thinking</think>answer; the prompt or the model may write <think> before it (DeepSeek R1, V3.1)
    qwen3         <think>thinking</think>answer; the prompt may write <think>; or an answer alone (Qwen3 and most)
    mistral       [THINK]thinking[/THINK]answer, or an answer alone (Magistral, Ministral 3)
    granite       Here is my thought process: thinking Here is my response: answer (Granite 3.2)

Sources: the models' chat templates. The names are those of SGLang's or vLLM's parsers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from eagle_server.text.chat_template import ChatTemplate
from eagle_server.text.tool_grammars import terminal

_ANY, _BREAKS = r"/(.|\n)*/", r"/\n{0,2}/"


@dataclass(frozen=True)
class ReasoningFormat:
    """Thinking begins with one of `openings` and ends with one of `closings`.

    `always`: the model thinks also where nobody wrote an opening. `template` is found in chat templates that use this
    format.
    """

    name: str
    openings: tuple[str, ...]
    closings: tuple[str, ...]
    template: re.Pattern[str]
    always: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        return self.openings + self.closings

    def state_after(self, prompt: str, *, reply: str | None = None) -> bool | None:
        """Whether the model thinks after a prompt: True, False, or None if its first words will tell.

        `reply` is the beginning of the answer, where the prompt has one that the model continues.
        """
        if reply is not None:
            last = [max(map(reply.rfind, markers)) for markers in (self.openings, self.closings)]
            return last[0] > last[1]
        tail = prompt.rstrip()
        if tail.endswith(self.closings):
            return False
        return True if tail.endswith(self.openings) or self.always else None

    def lark(self, tokens: Mapping[str, int], *, is_open: bool | None) -> str:
        """Rules of llguidance's Lark: `thinking` is all that comes before the answer. See `state_after` for `is_open`.

        `tokens` has the ids of markers that are special tokens. The line breaks before the answer are at most two.
        """
        opening = "(" + " | ".join(terminal(each, tokens) for each in self.openings) + ")"
        start = f"{opening}? reasoned" if is_open else f"({opening} reasoned)?"
        if self.closings[0] in tokens:  # no text has a special token
            return f"thinking: {start}\nreasoned: {_ANY} {terminal(self.closings[0], tokens)} {_BREAKS}\n"
        ends = "|".join(re.sub(r"[^\w ]", lambda found: f"\\x{{{ord(found[0]):X}}}", each) for each in self.closings)
        return f"thinking: {start}\nreasoned: thought {_BREAKS}\nthought[suffix=/{ends}/]: {_ANY}\n"


DEEPSEEK_R1 = ReasoningFormat(
    "deepseek-r1",
    ("<think>",),
    ("</think>",),
    re.compile(r"(?s)｜Assistant｜.*</?think>|</?think>.*｜Assistant｜"),
    always=True,
)
QWEN3 = ReasoningFormat("qwen3", ("<think>",), ("</think>",), re.compile(r"</?think>"))
MISTRAL = ReasoningFormat("mistral", ("[THINK]",), ("[/THINK]",), re.compile(r"\[/?THINK\]"))
GRANITE = ReasoningFormat(
    "granite",
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
    re.compile(r"Here(?: is|\\?'s) my thought process:"),
)
REASONING_FORMATS = {each.name: each for each in (DEEPSEEK_R1, QWEN3, MISTRAL, GRANITE)}


def find_reasoning_format(choice: str, template: ChatTemplate) -> ReasoningFormat | None:
    """The format that --reasoning-parser names. `auto`: the one that the chat template uses, if any."""
    if choice != "auto":
        return REASONING_FORMATS.get(choice)
    return next((each for each in REASONING_FORMATS.values() if each.template.search(template.source)), None)
