"""Made chat templates in the shapes of known ones, each with what its model writes for an answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import tokenizers
from tokenizers import AddedToken

from eagle_server.text.chat_template import ChatTemplate
from eagle_server.text.tokenizer import FastTokenizer
from eagle_tools.training.rows.masking import ChatModel
from tests.api.fake_engine import byte_tokenizer

Message = Mapping[str, Any]
Writes = Callable[[Message], str]


@dataclass(frozen=True)
class Shape:
    """A template; `ends` are its end-of-sequence tokens and `others` its further special tokens."""

    source: str
    writes: Writes
    ends: tuple[str, ...]
    others: tuple[str, ...] = ()
    tools: bool = True
    thinks: bool = False  # the template writes thinking, or its prompt opens it
    variables: Mapping[str, Any] = field(default_factory=dict)

    def tokenizer(self) -> tokenizers.Tokenizer:
        """Bytes and special tokens."""
        made = byte_tokenizer()
        made.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in (*self.ends, *self.others)])
        return made

    def model(self) -> ChatModel:
        tokenizer = FastTokenizer(self.tokenizer())
        ends = [tokenizer.token_id(end) for end in self.ends]
        template = ChatTemplate(self.source, {"bos_token": "<s>", "eos_token": self.ends[0]})
        return ChatModel(tokenizer, template, frozenset(end for end in ends if end is not None))


def _calls(message: Message, form: str) -> str:
    """`form` has NAME and ARGS."""
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return "".join(
        form.replace("NAME", f["name"]).replace("ARGS", json.dumps(f["arguments"], ensure_ascii=False))
        for f in functions
    )


_EACH_CALL = "{% for c in m.tool_calls or [] %}FORM{% endfor %}"


def _calls_in_template(form: str) -> str:
    written = form.replace("NAME", "{{ c.function.name }}").replace("ARGS", "{{ c.function.arguments | tojson }}")
    return _EACH_CALL.replace("FORM", written)


_XML = '<tool_call>\n{"name": "NAME", "arguments": ARGS}\n</tool_call>'
_JSON = '{"name": "NAME", "parameters": ARGS}'
_MISTRAL = '[TOOL_CALLS][{"name": "NAME", "arguments": ARGS}]'
_DEEPSEEK = "<｜tool▁calls▁begin｜>NAME\n```json\nARGS\n```<｜tool▁calls▁end｜>"
_GLM = "<tool_call>NAME\nARGS</tool_call>"

LLAMA3 = Shape(
    "{{ bos_token }}{% if tools %}<|start_header_id|>system<|end_header_id|>\n\n{{ tools | tojson }}<|eot_id|>"
    "{% endif %}"
    "{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
    f"{{{{ m.content | trim }}}}{_calls_in_template(_JSON)}<|eot_id|>{{% endfor %}}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    lambda m: m["content"].strip() + _calls(m, _JSON) + "<|eot_id|>",
    ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    ("<s>", "<|start_header_id|>", "<|end_header_id|>"),
)
QWEN3 = Shape(
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or m.reasoning_content) %}"
    "<think>\n{{ (m.reasoning_content or '').strip('\\n') }}\n</think>\n\n{% endif %}{{ m.content }}"
    f"{_calls_in_template(_XML)}<|im_end|>\n{{% endfor %}}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}",
    lambda m: f"<think>\n{m.get('reasoning_content', '')}\n</think>\n\n{m['content']}{_calls(m, _XML)}<|im_end|>",
    ("<|im_end|>", "<|endoftext|>"),
    ("<|im_start|>",),
    thinks=True,
)
CHATML = Shape(
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for m in messages %}"
    f"<|im_start|>{{{{ m.role }}}}\n{{{{ m.content }}}}{_calls_in_template(_XML)}<|im_end|>\n{{% endfor %}}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    lambda m: m["content"] + _calls(m, _XML) + "<|im_end|>",
    ("<|im_end|>",),
    ("<|im_start|>",),
)
MISTRAL = Shape(
    "{{ bos_token }}{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.index0 == ns.last %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% else %}"
    "{% if m.reasoning_content %}[THINK]{{ m.reasoning_content }}[/THINK]{% endif %}{{ m.content }}"
    f"{_calls_in_template(_MISTRAL)}</s>{{% endif %}}{{% endfor %}}",
    lambda m: (
        (f"[THINK]{m['reasoning_content']}[/THINK]" if "reasoning_content" in m else "")
        + m["content"]
        + _calls(m, _MISTRAL)
        + "</s>"
    ),
    ("</s>",),
    ("<s>", "[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    thinks=True,
)
GEMMA = Shape(
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    lambda m: m["content"].strip() + "<end_of_turn>",
    ("<eos>", "<end_of_turn>"),
    ("<s>", "<start_of_turn>"),
    tools=False,
)
DEEPSEEK = Shape(  # the prompt opens the thinking, and no answer in a history has it
    "{{ bos_token }}{{ tools | tojson if tools }}{% for m in messages %}{% if m.role == 'user' %}"
    "<｜User｜>{{ m.content }}"
    "{% elif m.role == 'tool' %}<｜tool▁output｜>{{ m.content }}{% else %}"
    "<｜Assistant｜>{{ m.content.split('</think>')[-1] }}"
    f"{_calls_in_template(_DEEPSEEK)}<｜end▁of▁sentence｜>{{% endif %}}{{% endfor %}}"
    "{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}",
    lambda m: f"{m['reasoning_content']}\n</think>\n\n{m['content']}{_calls(m, _DEEPSEEK)}<｜end▁of▁sentence｜>",
    ("<｜end▁of▁sentence｜>",),
    ("<s>", "<｜User｜>", "<｜Assistant｜>"),
    thinks=True,
)


def _harmony(m: Message) -> str:
    thoughts = m.get("reasoning_content")
    text = f"<|channel|>analysis<|message|>{thoughts}<|end|><|start|>assistant" if thoughts else ""
    if m.get("tool_calls"):
        return text + _calls(m, " to=functions.NAME<|channel|>commentary json<|message|>ARGS<|call|>")
    return f"{text}<|channel|>final<|message|>{m['content']}<|return|>"


GPT_OSS = Shape(
    "<|start|>system<|message|>{{ tools | tojson if tools }}<|end|>{% for m in messages %}"
    "{% if m.role == 'assistant' %}{% if m.thinking and (loop.last or m.tool_calls) %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}"
    "<|end|>{% endif %}{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}<|start|>assistant to=functions."
    "{{ f.name }}<|channel|>commentary json<|message|>{{ f.arguments | tojson }}<|call|>{% else %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endif %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
    _harmony,
    ("<|return|>", "<|call|>"),  # HARMONY's tokens are in the byte tokenizer
    thinks=True,
)
GLM = Shape(  # what ends an answer is the header of the next message
    "[gMASK]{{ tools | tojson if tools }}{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}"
    "{% elif m.role == 'tool' %}<|observation|>\n{{ m.content }}{% elif m.role == 'assistant' %}<|assistant|>\n"
    "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>\n{% else %}<think></think>\n"
    f"{{% endif %}}{{{{ m.content }}}}{_calls_in_template(_GLM)}{{% endif %}}{{% endfor %}}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    lambda m: (
        f"<think>{m.get('reasoning_content', '')}</think>\n{m['content']}{_calls(m, _GLM)}"
        + ("<|observation|>" if m.get("tool_calls") else "<|user|>")
    ),
    ("<|endoftext|>", "<|user|>", "<|observation|>"),
    ("<|assistant|>", "[gMASK]"),
    thinks=True,
)
PHI = Shape(
    "{{ tools | tojson if tools }}{% for m in messages %}<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}"
    f"{_calls_in_template(_XML)}<|im_end|>{{% endfor %}}"
    "{% if add_generation_prompt %}<|im_start|>assistant<|im_sep|>{% else %}<|endoftext|>{% endif %}",
    lambda m: m["content"] + _calls(m, _XML) + "<|im_end|>",
    ("<|endoftext|>", "<|im_end|>"),
    ("<|im_start|>", "<|im_sep|>"),
)
_GRANITE = "Here is my thought process:"
GRANITE = Shape(
    "{{ tools | tojson if tools }}{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>"
    f"{{% if m.reasoning_content and loop.last %}}{_GRANITE} {{{{ m.reasoning_content }}}} Here is my response: "
    f"{{% endif %}}{{{{ m.content }}}}{_calls_in_template('<|tool_call|>' + _JSON)}<|end_of_text|>\n{{% endfor %}}"
    "{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}",
    lambda m: (
        (f"{_GRANITE} {m['reasoning_content']} Here is my response: " if "reasoning_content" in m else "")
        + m["content"]
        + _calls(m, "<|tool_call|>" + _JSON)
        + "<|end_of_text|>"
    ),
    ("<|end_of_text|>",),
    ("<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"),
    thinks=True,
)
NO_HEADER = (
    Shape(  # a trap: the prompt has no header of the answer, so the model writes it; no template variable says so
        "{% for m in messages %}{{ 'ASSISTANT: ' if m.role == 'assistant' else 'USER: ' }}{{ m.content }}"
        "{{ '</s>' if m.role == 'assistant' else '\\n' }}{% endfor %}",
        lambda m: f"ASSISTANT: {m['content']}</s>",
        ("</s>",),
        tools=False,
    )
)
LATE_END = Shape(  # a trap: the last answer has no end, and the header stands behind every question
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}{{ '' if loop.last else '<|end|>' }}"
    "{% else %}<|q|>{{ m.content }}<|a|>{% endif %}{% endfor %}",
    lambda m: m["content"] + "<|end|>",
    ("<|end|>",),
    ("<|q|>", "<|a|>"),
    tools=False,
)
SHAPES = {
    "llama3": LLAMA3,
    "qwen3": QWEN3,
    "chatml": CHATML,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "deepseek": DEEPSEEK,
    "gpt-oss": GPT_OSS,
    "glm": GLM,
    "phi": PHI,
    "granite": GRANITE,
    "no-header": NO_HEADER,
    "late-end": LATE_END,
}
