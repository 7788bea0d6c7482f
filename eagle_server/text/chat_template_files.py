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
TOOL_TEMPLATE_FILE = "additional_chat_templates/tool_use.jinja"  # where transformers writes the second of two templates
OLD_TEMPLATE_FILE = "chat_template.json"
CONFIG_FILE = "tokenizer_config.json"
PROCESSOR_FILE = "processor_config.json"
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
    tool_source = None if source is None else read_text(location, TOOL_TEMPLATE_FILE)
    if source is None:
        source = config.get("chat_template")
    for file_of_processor in (OLD_TEMPLATE_FILE, PROCESSOR_FILE):
        source = source or read_json(location, file_of_processor).get("chat_template")
    if not source:
        return _default(tokenizer, special_tokens)
    templates = _named(source)
    return ChatTemplate(templates["default"], special_tokens, tool_source=tool_source or templates.get("tool_use"))


def _named(source: Any) -> dict[str, str]:
    """Templates by name. `source`: one text, a list of {"name", "template"}, or an object. `tool_use` is for tools."""
    if isinstance(source, str):
        return {"default": source}
    try:
        entries = source.items() if isinstance(source, dict) else ((each["name"], each["template"]) for each in source)
        templates = {str(name): str(template) for name, template in entries}
    except (KeyError, TypeError, ValueError):
        templates = {}
    if "default" not in templates:
        raise ValueError(f"{CONFIG_FILE}: chat_template should be a text, or a list with one named default")
    return templates


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
