"""Chat templates: the sandbox, the sources, and the defaults for models without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers import AddedToken, models

from eagle_server.text.chat_template import ChatTemplate, Conversation, TemplateError
from eagle_server.text.chat_template_files import load_chat_template
from eagle_server.text.tokenizer import FastTokenizer, Tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]


def tokenizer(*special: str) -> Tokenizer:
    made = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    made.add_special_tokens([AddedToken(token, special=True) for token in special])
    return FastTokenizer(made)


def write(directory: Path, **files: Any) -> str:
    for name, content in files.items():
        path = directory / name.replace("__", ".")
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(directory)


def test_the_environment_is_that_of_transformers() -> None:
    """The expected text is the output of transformers.apply_chat_template."""
    template = ChatTemplate(
        "{{ bos_token }}{% for m in messages %}\n  {% if loop.last %}{% break %}{% endif %}\n"
        "{{ m | tojson }}{% endfor %}{% generation %}x{% endgeneration %}"
        "{{ strftime_now('%Y') | length }}{{ {'b': 'é<', 'a': 1} | tojson(indent=1) }}",
        {"bos_token": "<s>"},
    )
    assert template.render(Conversation([*MESSAGES, *MESSAGES])) == (
        '<s>{"role": "user", "content": "hi"}x4{\n "b": "é<",\n "a": 1\n}'
    )


@pytest.mark.deep
def test_it_renders_as_transformers_does() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    source = (
        "{%- if tools %}\n    {{- tools | tojson }}\n{%- endif %}\n"
        "{% for m in messages %}\n  {% if m.role == 'user' %}\n"
        "U:{{ m.content | trim }}\n  {% else %}\nA:{{ m.content }}\n  {% endif %}\n{% endfor %}\n"
        "{% if add_generation_prompt %}{{ 'A:' }}{% endif %}"
    )
    messages = [*MESSAGES, {"role": "assistant", "content": " yo "}, *MESSAGES]
    tools = [{"b": "é<", "a": [1, None]}]
    [[theirs], _] = render_jinja_template([messages], tools=tools, chat_template=source, add_generation_prompt=True)
    assert ChatTemplate(source).render(Conversation(messages, tools)) == theirs


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.os }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ messages[0].content + 1 }}",
        "{{ raise_exception('no') }}",
    ],
)
def test_what_a_template_may_not_do_is_one_error(source: str) -> None:
    with pytest.raises(TemplateError) as refused:
        ChatTemplate(source).render(Conversation(MESSAGES))
    assert len(str(refused.value).splitlines()) == 1


def test_a_broken_template_is_known_at_once() -> None:
    with pytest.raises(ValueError, match="the chat template is broken"):
        ChatTemplate("{% if %}")


def test_a_template_that_drops_the_final_message_cannot_continue_it() -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "So "}]
    conversation = Conversation(begun, add_generation_prompt=False, continue_final_message=True)
    trimming = ChatTemplate("{% for m in messages %}{{ m.content | trim }};{% endfor %}")
    assert trimming.render(conversation) == "hi;So "
    with pytest.raises(TemplateError, match="leaves the final message out"):
        ChatTemplate("{{ messages[0].content }}").render(conversation)


def test_the_models_own_template_is_found(tmp_path: Path) -> None:
    location = write(
        tmp_path,
        tokenizer_config__json={
            "chat_template": "config{{ bos_token }}{{ eos_token }}",
            "bos_token": {"content": "<s>"},
        },
        special_tokens_map__json={"eos_token": "</s>", "bos_token": "old"},
    )
    assert load_chat_template(location, tokenizer()).render(Conversation(MESSAGES)) == "config<s></s>"
    write(tmp_path, chat_template__jinja="file{{ bos_token }}")
    assert load_chat_template(location, tokenizer()).render(Conversation(MESSAGES)) == "file<s>"
    own = tmp_path / "own"
    own.write_text("flag")
    assert load_chat_template(location, tokenizer(), str(own)).render(Conversation(MESSAGES)) == "flag"


def test_a_model_may_have_a_template_for_tools(tmp_path: Path) -> None:
    entries = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }}"}]
    template = load_chat_template(write(tmp_path, tokenizer_config__json={"chat_template": entries}), tokenizer())
    assert template.render(Conversation(MESSAGES)) == "plain"
    assert template.render(Conversation(MESSAGES, tools=[{}])) == "1"
    write(tmp_path, tokenizer_config__json={"chat_template": entries[1:]})
    with pytest.raises(ValueError, match="one named default"):
        load_chat_template(str(tmp_path), tokenizer())


def test_models_without_a_template_speak_chatml_if_they_have_its_tokens(tmp_path: Path) -> None:
    template = load_chat_template(str(tmp_path), tokenizer("<|im_start|>", "<|im_end|>"))
    assert template.render(Conversation(MESSAGES)) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert template.stops.token_ids == (2,)
    assert not template.adds_special
    write(tmp_path, tokenizer_config__json={"eos_token": "<|im_end|>"})
    assert load_chat_template(str(tmp_path), tokenizer()).special_tokens == {"eos_token": "<|im_end|>"}
    dialogue = load_chat_template(str(tmp_path), tokenizer())
    system = [{"role": "system", "content": "Be kind."}, *MESSAGES]
    assert dialogue.render(Conversation(system)) == "Be kind.\n\nUser: hi\nAssistant:"
    assert dialogue.stops.strings == ("\nUser:",)
    assert dialogue.adds_special
    called = [{"role": "assistant", "content": "", "tool_calls": [{}]}]
    with pytest.raises(TemplateError, match="chat template"):
        dialogue.render(Conversation(called))


def test_developers_are_the_system_unless_the_template_knows_them() -> None:
    conversation = Conversation([{"role": "developer", "content": ""}])
    assert ChatTemplate("{{ messages[0].role }}").render(conversation) == "system"
    assert ChatTemplate("{# developer #}{{ messages[0].role }}").render(conversation) == "developer"


def test_hints_reach_templates_that_read_them_and_no_others() -> None:
    source = "{{ messages[0].content }}{% if enable_thinking is defined %} thinks: {{ enable_thinking }}{% endif %}"
    messages = [{"role": "user", "content": "hi"}]
    hints = {"reasoning_effort": "none", "enable_thinking": False}
    assert ChatTemplate(source).render(Conversation(messages, hints=hints)) == "hi thinks: False"
    assert ChatTemplate("{{ messages[0].content }}").render(Conversation(messages, hints=hints)) == "hi"
    wins = Conversation(messages, variables={"enable_thinking": True}, hints=hints)
    assert ChatTemplate(source).render(wins) == "hi thinks: True"


TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
TOOLS = "{{ tools | length }} tools\n" + TEMPLATE
# SmolVLM, Idefics and LLaVA go through parts; Qwen2-VL takes both.
PARTS = (
    "{% for m in messages %}{{ m.role }}: {% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}{% endif %}"
    "{% endfor %};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
BOTH = (
    "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}<{{ c.text }}>{% endfor %}{% endif %};{% endfor %}"
)


@pytest.mark.parametrize("files", [True, False], ids=["jinja files", "in the config"])
@pytest.mark.parametrize(
    "templates", [TEMPLATE, {"default": TEMPLATE}, {"default": TEMPLATE, "tool_use": TOOLS, "rag": "never"}], ids=str
)
def test_what_transformers_saves_is_read(tmp_path: Path, templates: Any, files: bool) -> None:
    """Written by save_pretrained; the expected text is that of apply_chat_template."""
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[])), chat_template=templates
    )
    made.save_pretrained(tmp_path, save_jinja_files=files)
    template = load_chat_template(str(tmp_path), tokenizer())
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    for tools in ([], [tool]):
        expected = made.apply_chat_template(MESSAGES, tools=tools or None, tokenize=False, add_generation_prompt=True)
        if tools and "tools" not in expected:
            with pytest.raises(TemplateError, match="no place for tools"):
                template.render(Conversation(MESSAGES, tools=tools))
        else:
            assert template.render(Conversation(MESSAGES, tools=tools)) == expected


def test_a_processors_template_is_read(tmp_path: Path) -> None:
    for name in ("chat_template__json", "processor_config__json"):
        location = write(tmp_path, **{name: {"chat_template": "processor"}})
        assert load_chat_template(location, tokenizer()).render(Conversation(MESSAGES)) == "processor"
        (tmp_path / name.replace("__", ".")).unlink()


def test_templates_that_go_through_parts_get_parts() -> None:
    messages = [{"role": "system", "content": "s"}, *MESSAGES, {"role": "assistant", "content": "So "}]
    assert ChatTemplate(PARTS).render(Conversation(messages)) == "system: s;user: hi;assistant: So ;a:"
    going_on = Conversation(messages, add_generation_prompt=False, continue_final_message=True)
    assert ChatTemplate(PARTS).render(going_on) == "system: s;user: hi;assistant: So "
    assert ChatTemplate(BOTH).render(Conversation(messages)) == "system: s;user: hi;assistant: So ;"
