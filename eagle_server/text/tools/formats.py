"""The formats in which models write tool calls, and which of them a chat template uses.

    hermes        <tool_call>{"name": "f", "arguments": {}}</tool_call>, one or more (Hermes 2 Pro, Qwen2.5, Qwen3)
    qwen3_coder   <tool_call><function=f><parameter=x>1</parameter></function></tool_call>, one or more (Qwen3-Coder)
    llama3_json   {"name": "f", "parameters": {}} instead of an answer, or after <|python_tag|> (Llama 3.1, 3.2, 3.3)
    pythonic      [f(x=1), g(y="a")] instead of an answer (Llama 4, Llama 3.2 small, ToolACE)
    mistral       [TOOL_CALLS] [{"name": "f", "arguments": {}}, ...] (Mistral 7B 0.3, Nemo, Large 2)
    mistral_v13   [TOOL_CALLS]f[ARGS]{}, one or more (Magistral, Devstral, Ministral 3)
    granite       <|tool_call|>[{"name": "f", "arguments": {}}, ...] (Granite 3.1 to 3.3)
    deepseek_v3   <calls><call>function<sep>f, a JSON code block</call>...</calls>, with tokens (DeepSeek V3, R1)
    deepseek_v31  <calls><call>f<sep>{}</call>...</calls>, with tokens (DeepSeek V3.1)
    gpt_oss       <|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>, one (gpt-oss)

Sources: the models' chat templates. The names come from vLLM's parsers, if one is for the format alone.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from eagle_server.text.chat_template import ChatTemplate
from eagle_server.text.tools.json_calls import Functions, NamedCall, PartialCall, PartialObject
from eagle_server.text.tools.text_calls import PythonCall, XmlCall


@dataclass(frozen=True)
class ToolFormat:
    """Calls in one format: `opening`, `bracket`, a call, further calls after `separator`, `closing`.

    A call begins with `begin` and is read by `call`; `call_end` may follow it. `after_name` stands between name and
    arguments in formats where only the arguments are a JSON object. Without a `separator` (None) each call has its own
    opening. `markers` may be special tokens. `arguments` is the key that the model writes in a JSON object; the parser
    accepts "arguments" and "parameters". `bare`: a call at the beginning of the text needs no `opening`, if it names an
    offered function. `single`: a call ends the answer.
    """

    name: str
    template: re.Pattern[str]  # found in chat templates that use this format
    opening: str = ""
    bracket: str = ""
    separator: str | None = None
    closing: str = ""
    begin: str = "{"
    call: Callable[[int, Functions, tuple[str, ...]], PartialCall] = PartialObject
    after_name: str = ""
    call_end: str = ""
    markers: tuple[str, ...] = ()
    arguments: str = "arguments"
    bare: bool = False
    single: bool = False
    id_length: int | None = None  # characters of a call's id, if the chat template demands a certain number

    @property
    def ends(self) -> tuple[str, ...]:
        """Texts that end a call wherever they stand outside its strings and brackets."""
        after = self.closing if self.bracket else self.separator or ""
        return tuple(dict.fromkeys(end for end in (*self.markers, self.call_end.strip(), after) if end))

    def new_id(self) -> str:
        """An id for one call."""
        if self.id_length is None:
            return f"call_{secrets.token_hex(12)}"
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(self.id_length))


HERMES = ToolFormat(
    name="hermes",
    # Line breaks and quotes are escaped in a Jinja string. GLM and Qwen3-Coder have the same marker, but write no JSON.
    template=re.compile(r"<tool_call>(?:\\n|\s)*\{+\s*\\?[\"']name"),
    opening="<tool_call>",
    closing="</tool_call>",
    markers=("<tool_call>", "</tool_call>"),
)
QWEN3_CODER = ToolFormat(
    name="qwen3_coder",
    template=re.compile(r"<tool_call>(?:\\n|\s)*<function="),
    opening="<tool_call>",
    closing="</tool_call>",
    begin="<function=",
    call=XmlCall,
    markers=("<tool_call>", "</tool_call>"),
)
LLAMA3_JSON = ToolFormat(
    name="llama3_json",
    template=re.compile(r'<\|python_tag\|>|\{\\?"name\\?": function name, \\?"parameters\\?": dictionary'),
    opening="<|python_tag|>",
    separator=";",
    markers=("<|python_tag|>",),
    arguments="parameters",
    bare=True,
)
PYTHONIC = ToolFormat(
    name="pythonic",
    template=re.compile(r"\[func_name1\(params_name1=params_value1"),
    bracket="[",
    separator=",",
    closing="]",
    begin="",
    call=PythonCall,
    bare=True,
)
MISTRAL = ToolFormat(
    name="mistral",
    # Some models write [TOOL_CALLS]name{...} instead of a list.
    template=re.compile(r"\[TOOL_CALLS\]\s*\[(?!ARGS\])"),
    opening="[TOOL_CALLS]",
    bracket="[",
    separator=",",
    closing="]",
    markers=("[TOOL_CALLS]",),
    id_length=9,
)
MISTRAL_V13 = ToolFormat(
    name="mistral_v13",
    template=re.compile(r"\[TOOL_CALLS\](?!.*\[CALL_ID\]).*\[ARGS\]", re.DOTALL),
    opening="[TOOL_CALLS]",
    begin="",
    call=partial(NamedCall, before="", after="[ARGS]"),
    after_name="[ARGS]",
    markers=("[TOOL_CALLS]", "[ARGS]"),
    id_length=9,
)
GRANITE = ToolFormat(
    name="granite",
    template=re.compile(r"<\|tool_call\|>"),
    opening="<|tool_call|>",
    bracket="[",
    separator=",",
    closing="]",
    markers=("<|tool_call|>",),
)
_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEP, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
DEEPSEEK_V3 = ToolFormat(
    name="deepseek_v3",
    template=re.compile(rf"{_SEP}.*\\n```json", re.DOTALL),
    opening=_CALLS,
    separator="",
    closing=_CALLS_END,
    begin=f"{_CALL}function{_SEP}",
    call=partial(NamedCall, before=f"{_CALL}function{_SEP}", after="\n```json\n"),
    after_name="\n```json\n",
    call_end=f"\n```{_CALL_END}",
    markers=(_CALLS, _CALLS_END, _CALL, _SEP, _CALL_END),
)
DEEPSEEK_V31 = ToolFormat(
    name="deepseek_v31",
    template=re.compile(_SEP),
    opening=_CALLS,
    separator="",
    closing=_CALLS_END,
    begin=_CALL,
    call=partial(NamedCall, before=_CALL, after=_SEP),
    after_name=_SEP,
    call_end=_CALL_END,
    markers=(_CALLS, _CALLS_END, _CALL, _SEP, _CALL_END),
)
START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
HARMONY = (START, CHANNEL, MESSAGE, CONSTRAIN, END, RETURN, CALL)
GPT_OSS = ToolFormat(
    name="gpt_oss",
    template=re.compile(re.escape(f"{CHANNEL}commentary")),
    opening=f"{CHANNEL}commentary to=functions.",
    begin="",
    call=partial(NamedCall, before="", after=MESSAGE, words=True),
    after_name=f" {CONSTRAIN}json{MESSAGE}",
    markers=HARMONY,
    single=True,
)
FORMATS = {
    format.name: format
    for format in (
        HERMES,
        QWEN3_CODER,
        LLAMA3_JSON,
        PYTHONIC,
        MISTRAL,
        MISTRAL_V13,
        GRANITE,
        DEEPSEEK_V3,
        DEEPSEEK_V31,
        GPT_OSS,
    )
}


def find_format(choice: str, template: ChatTemplate) -> ToolFormat | None:
    """The format that --tool-call-parser names. `auto`: the one that the chat template for tools uses, if any."""
    if choice != "auto":
        return FORMATS.get(choice)
    return next((format for format in FORMATS.values() if format.template.search(template.tool_source)), None)
