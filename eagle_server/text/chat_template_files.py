"""Finds a model's chat template, or a default if the model has none."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from eagle_server.text.chat_template import ChatTemplate, TemplateStops
from eagle_server.text.model_files import read_json, read_text
from eagle_server.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

TEMPLATE_FILE = "chat_template.jinja"
OLD_TEMPLATE_FILE = "chat_template.json"
CONFIG_FILE = "tokenizer_config.json"
MAP_FILE = "special_tokens_map.json"

# A model that has these tokens but no template was most likely trained on ChatML.
IM_START, IM_END = "<|im_start|>", "<|im_end|>"
CHATML = """\
{% for message in messages %}
{% if message.tool_calls %}{{ raise_exception('tool_calls need a model with a chat template') }}{% endif %}
{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# A base model continues any dialogue. The stop string ends the reply before the user's next line.
DIALOGUE = """\
{% for message in messages %}
{% if message.tool_calls %}{{ raise_exception('tool_calls need a model with a chat template') }}{% endif %}
{% if message.role == 'system' %}{{ message.content + '\n\n' }}
{%- else %}{{ message.role | capitalize + ': ' + message.content + '\n' }}{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""
DIALOGUE_STOPS = ("\nUser:",)


def load_chat_template(location: str, tokenizer: Tokenizer, file: str | None = None) -> ChatTemplate:
    """The template in `file` (--chat-template), else the model's own, else a default.

    `location` is a directory or a Hugging Face id.

    Raises:
        ValueError, OSError: a file cannot be read or is broken; the message is one line.
    """
    config = read_json(location, CONFIG_FILE)
    special_tokens = _special_tokens({**read_json(location, MAP_FILE), **config})
    if file is not None:
        return ChatTemplate(Path(file).read_text(encoding="utf-8"), special_tokens)
    source: object = read_text(location, TEMPLATE_FILE)
    if source is None:
        source = config.get("chat_template") or read_json(location, OLD_TEMPLATE_FILE).get("chat_template")
    if isinstance(source, str):
        return ChatTemplate(source, special_tokens)
    if source:
        return _named(source, special_tokens)
    return _default(tokenizer, special_tokens)


def _named(entries: Any, special_tokens: dict[str, str]) -> ChatTemplate:
    """The templates in a list of {"name", "template"}. Models with a second template for tools have such a list."""
    try:
        templates = {str(entry["name"]): str(entry["template"]) for entry in entries}
        return ChatTemplate(templates["default"], special_tokens, tool_source=templates.get("tool_use"))
    except (KeyError, TypeError):
        raise ValueError(f"{CONFIG_FILE}: chat_template should be a text, or a list with one named default") from None


def _default(tokenizer: Tokenizer, special_tokens: dict[str, str]) -> ChatTemplate:
    end = tokenizer.token_id(IM_END)
    if end is not None and tokenizer.token_id(IM_START) is not None:
        logger.info("the model has no chat template; chats are written as ChatML, whose tokens it has")
        return ChatTemplate(CHATML, special_tokens, stops=TemplateStops(token_ids=(end,)), built_in="ChatML")
    logger.info("the model has no chat template; chats are written as a dialogue of User and Assistant")
    stops = TemplateStops(strings=DIALOGUE_STOPS)
    return ChatTemplate(DIALOGUE, special_tokens, stops=stops, adds_special=True, built_in="dialogue")


def _special_tokens(values: dict[str, Any]) -> dict[str, str]:
    """The special tokens by name, like bos_token. Their values are text, or objects with the text as `content`."""
    tokens = {}
    for name, value in values.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens
