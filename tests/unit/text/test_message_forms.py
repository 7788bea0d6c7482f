"""Conversations that templates with narrow rules refuse as given are rendered in other forms, without loss."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from eagle_server.text.chat_template import ChatTemplate, Conversation, TemplateError
from eagle_server.text.message_forms import Written, forms, says_all

TURN = "<{{ m.role }}>{{ m.content | trim }}</>"
REPLY = "{% if add_generation_prompt %}<assistant>{% endif %}"
TEMPLATES = {
    "anything": "{% for m in messages %}" + TURN + "{% endfor %}" + REPLY,
    # Qwen3.5's rule.
    "system first": """{% for m in messages %}{% if m.role == 'system' and not loop.first %}
{{- raise_exception('System message must be at the beginning.') }}{% endif %}"""
    + TURN
    + "{% endfor %}"
    + REPLY,
    # Gemma 2's rules.
    "no system, alternating": """{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}
{%- endif %}
{%- for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"""
    + TURN
    + "{% endfor %}"
    + REPLY,
    # Gemma 3's: the system's text begins the first user message.
    "system in the first turn": """{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\\n\\n' %}
{%- set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}
{%- for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
<{{ m.role }}>{{ first if loop.first }}{{ m.content | trim }}</>{% endfor %}"""
    + REPLY,
    # Mistral's: the system's text stands in the last user message.
    "system in the last turn": """{% if messages[0].role == 'system' %}{% set system = messages[0].content %}
{%- set rest = messages[1:] %}{% else %}{% set system = none %}{% set rest = messages %}{% endif %}
{%- for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('conversation roles must alternate') }}{% endif %}
<{{ m.role }}>{% if m.role == 'user' and loop.last and system %}{{ system }}\\n\\n{% endif %}{{ m.content | trim }}</>
{%- endfor %}"""
    + REPLY,
    "the system's texts are left out": "{% for m in messages if m.role != 'system' %}" + TURN + "{% endfor %}" + REPLY,
    "only the first system message": """{% for m in messages if m.role != 'system' or loop.first %}"""
    + TURN
    + "{% endfor %}"
    + REPLY,
    "at least one user": """{% set ns = namespace(found=false) %}{% for m in messages %}{% if m.role == 'user' %}
{%- set ns.found = true %}{% endif %}{% endfor %}{% if not ns.found %}{{ raise_exception('No user query found.') }}
{%- endif %}
{%- for m in messages %}"""
    + TURN
    + "{% endfor %}"
    + REPLY,
}


def conversation(roles: str) -> list[dict[str, Any]]:
    """One message for each letter: s system, d developer, u user, a assistant. Texts are numbered."""
    names = {"s": "system", "d": "developer", "u": "user", "a": "assistant"}
    return [{"role": names[role], "content": f"text {number}."} for number, role in enumerate(roles)]


def rendered(template: str, messages: list[dict[str, Any]]) -> str:
    return ChatTemplate(TEMPLATES[template]).render(Conversation(messages))


ROLES = ["s", "su", "ssu", "sus", "usu", "us", "susau", "suu", "uu", "sua", "suasu", "suaasu", "dsu", "uds", "ss"]


@pytest.mark.parametrize("roles", ROLES)
@pytest.mark.parametrize("template", TEMPLATES)
def test_agents_may_send_any_order_of_roles(template: str, roles: str) -> None:
    messages = conversation(roles)
    text = rendered(template, messages)
    places = [text.index(message["content"]) for message in messages]
    begin = len(list(itertools.takewhile(lambda role: role in "sd", roles)))
    assert sorted(places[begin:]) == places[begin:], "after the system's first texts all stand in their order"
    assert all(text.count(message["content"]) == 1 for message in messages), "no text is lost, none stands twice"


@pytest.mark.parametrize("seed", range(30))
def test_random_conversations_lose_nothing(seed: int) -> None:
    choose = random.Random(seed)
    roles = "".join(choose.choice("ssuuad") for _ in range(choose.randint(1, 12)))
    if "u" not in roles and "s" not in roles and "d" not in roles:
        roles += "u"
    messages = conversation(roles)
    for template in TEMPLATES:
        try:
            text = rendered(template, messages)
        except TemplateError as error:
            assert "must alternate" in str(error) or "alternate" in str(error)
            assert roles.lstrip("sd").startswith("a") or roles.startswith("a"), "an answer before any question"
            continue
        assert all(message["content"] in text for message in messages)


def test_what_a_template_takes_is_rendered_as_given() -> None:
    messages = conversation("ssusua")
    assert (
        rendered("anything", messages) == "".join(f"<{m['role']}>{m['content']}</>" for m in messages) + "<assistant>"
    )
    assert rendered("system first", conversation("suau")).startswith("<system>text 0.</><user>text 1.</><assistant>")


def test_what_no_form_says_is_refused_in_the_templates_words() -> None:
    with pytest.raises(TemplateError, match="must alternate user/assistant"):
        rendered("no system, alternating", conversation("au"))


def test_calls_and_thoughts_of_joined_messages_stay() -> None:
    call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": {}}}
    messages = [
        *conversation("su"),
        {"role": "assistant", "content": "so", "reasoning_content": "hm"},
        {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "ah"},
        {"role": "tool", "content": "1", "tool_call_id": "1"},
        {"role": "tool", "content": "2", "tool_call_id": "2"},
    ]
    *_, last = forms(messages)
    assert [message["role"] for message in last] == ["user", "assistant", "tool", "tool"]
    assert last[0]["content"] == "text 0.\n\ntext 1."
    assert last[1] == {"role": "assistant", "content": "so", "tool_calls": [call], "reasoning_content": "hm\n\nah"}


def test_forms_differ_and_begin_with_what_was_given() -> None:
    messages = conversation("ssusu")
    found = list(forms(messages))
    assert found[0] == messages
    assert all(one != other for one, other in itertools.combinations(found, 2))
    assert list(forms(conversation("uau"))) == [conversation("uau")], "nothing else can be said"


def test_arguments_as_written_are_looked_for() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": []}]
    messages[1]["tool_calls"] = [{"function": {"name": "f", "arguments": Written("{")}}]
    assert says_all("a {", messages)
    assert not says_all("a", messages)
