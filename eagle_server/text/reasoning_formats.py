"""How models write their thinking before the answer, and which way a chat template uses.

    deepseek-r1   thinking</think>answer; the prompt or the model may write <think> before it (DeepSeek R1, V3.1)
    qwen3         <think>thinking</think>answer; the prompt may write <think>; or an answer alone (Qwen3 and most)
    mistral       [THINK]thinking[/THINK]answer, or an answer alone (Magistral, Ministral 3)
    granite       Here is my thought process: thinking Here is my response: answer (Granite 3.2)
    gpt_oss       <|channel|>analysis<|message|>thinking<|end|>, and other messages in channels (gpt-oss)

Sources: the models' chat templates. The names come from SGLang's or vLLM's parsers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from eagle_server.text.chat_template import ChatTemplate
from eagle_server.text.tools.formats import CALL, CHANNEL, END, HARMONY, MESSAGE, RETURN, START
from eagle_server.text.tools.grammars import literal, terminals

_ANY, _BREAKS, _EMPTY = r"/(.|\n)*/", r"/\n{0,2}/", '""'


@dataclass(frozen=True)
class ReasoningFormat:
    """Thinking begins with one of `openings` and ends with one of `closings`.

    `always`: the model also thinks without an opening. `template` is found in chat templates that use this format.
    `channels`: the tokens of messages with headers (see `ChannelParser`); `answer` is the header of an answer that is
    not a tool call, and `ends` are tokens that end the model's turn.
    """

    name: str
    openings: tuple[str, ...]
    closings: tuple[str, ...]
    template: re.Pattern[str]
    always: bool = False
    channels: tuple[str, ...] = ()
    answer: str = ""
    ends: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """The markers that may be special tokens."""
        return self.channels or self.openings + self.closings

    def state_after(self, prompt: str, *, reply: str | None = None) -> bool | None:
        """Whether the model thinks after a prompt: True, False, or None if only its first words will tell.

        `reply` is the beginning of the answer that the model continues; None: the prompt has none.
        """
        if reply is not None:
            last = [max(map(reply.rfind, markers)) for markers in (self.openings, self.closings)]
            return last[0] > last[1]
        tail = prompt.rstrip()
        if tail.endswith(self.closings) and not self.channels:
            return False
        return True if tail.endswith(self.openings) or self.always else None

    def lark(self, tokens: Mapping[str, int], *, is_open: bool | None) -> str:
        """Rules of llguidance's Lark: `thinking` is all text before the answer. See `state_after` for `is_open`.

        `header` follows where the answer is no tool call: calls have their own.

        `tokens` has the ids of markers that are special tokens. At most two line breaks come before the answer.
        """
        opening = "(" + " | ".join(terminals(marker, tokens) for marker in self.openings) + ")"
        start = f"{opening}? reasoned" if is_open else f"({opening} reasoned)?"
        header = f"header: {terminals(self.answer, tokens) or _EMPTY}\n"
        if self.closings[0].startswith(tuple(tokens)):  # text never contains a special token
            return f"{header}thinking: {start}\nreasoned: {_ANY} {terminals(self.closings[0], tokens)} {_BREAKS}\n"
        ends = "|".join(map(literal, self.closings))
        return f"{header}thinking: {start}\nreasoned: thought {_BREAKS}\nthought[suffix=/{ends}/]: {_ANY}\n"


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
GPT_OSS = ReasoningFormat(
    "gpt_oss",
    (f"{CHANNEL}analysis{MESSAGE}",),
    (f"{END}{START}assistant",),
    re.compile(re.escape(f"{CHANNEL}analysis{MESSAGE}")),
    channels=HARMONY,
    answer=f"{CHANNEL}final{MESSAGE}",
    ends=(RETURN, CALL),
)
REASONING_FORMATS = {format.name: format for format in (DEEPSEEK_R1, QWEN3, MISTRAL, GRANITE, GPT_OSS)}


def find_reasoning_format(choice: str, template: ChatTemplate) -> ReasoningFormat | None:
    """The format that --reasoning-parser names. `auto`: the one that the chat template uses, if any."""
    if choice != "auto":
        return REASONING_FORMATS.get(choice)
    return next((format for format in REASONING_FORMATS.values() if format.template.search(template.source)), None)
