"""Token rows of conversations: what the model would have generated, found by rendering turn by turn.

For each answer the template writes two texts: the prompt, as the server renders it for a request, and the conversation
with the answer. What the second adds is what the model generates, up to its first end-of-sequence token. No pattern is
searched, so the mask is right for any template whose two texts agree. All others are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eagle_server.models.checkpoints.weights import resolve_checkpoint
from eagle_server.models.config_json import read_config, token_ids
from eagle_server.text.chat_template import ChatTemplate, Conversation
from eagle_server.text.chat_template_files import load_chat_template
from eagle_server.text.model_files import read_json
from eagle_server.text.reasoning_formats import ReasoningFormat, find_reasoning_format
from eagle_server.text.tokenizer import Tokenizer, load_tokenizer
from eagle_tools.training.rows.chat_records import ChatRecord
from eagle_tools.training.rows.token_rows import TokenRow

_GENERATION_CONFIG = "generation_config.json"
_PROBE = "?"  # a message after an answer, to see what ends the answer


class MaskError(ValueError):
    """A conversation whose generated ids cannot be told from its prompt. The message is one line."""


@dataclass(frozen=True)
class ChatModel:
    """What renders and tokenizes for a model. `ends`: every id that ends an answer."""

    tokenizer: Tokenizer
    template: ChatTemplate
    ends: frozenset[int]

    @classmethod
    def load(cls, path: str, template_file: str | None = None) -> ChatModel:
        """The files of a checkpoint directory or Hub id.

        Raises:
            ValueError, OSError: a file is absent or broken; the message is one line.
        """
        directory = resolve_checkpoint(path)
        tokenizer = load_tokenizer(str(directory))
        template = load_chat_template(str(directory), tokenizer, template_file)
        generation = read_json(str(directory), _GENERATION_CONFIG)
        ends = {*token_ids(read_config(directory), "config.json"), *token_ids(generation, _GENERATION_CONFIG)}
        return cls(tokenizer, template, frozenset(ends.union(template.stops.token_ids)))

    @property
    def thinking(self) -> ReasoningFormat | None:
        """How the model writes thinking, as the server's `--reasoning-parser auto` finds it."""
        return find_reasoning_format("auto", self.template)


def token_rows(model: ChatModel, record: ChatRecord) -> Iterator[TokenRow]:
    """A row for each answer of a conversation: its prompt is all that comes before it.

    Raises:
        MaskError, TemplateError: the template does not say what was generated, or refuses the conversation.
    """
    answers = [place for place, message in enumerate(record.messages) if message["role"] == "assistant"]
    if not answers:
        raise MaskError("no message of the assistant: `regenerate` lets the model answer")
    for gen, place in enumerate(answers):
        prompt, generated = _prompt_and_generated(model, record, place)
        mask = (0,) * len(prompt) + (1,) * len(generated)
        ended = generated[-1] in model.ends
        reason = "tool_calls" if record.messages[place].get("tool_calls") else "stop"
        yield TokenRow(record.id, gen, (*prompt, *generated), mask, reason if ended else None)


def _prompt_and_generated(model: ChatModel, record: ChatRecord, place: int) -> tuple[list[int], list[int]]:
    """The ids of the prompt of the answer at `place`, and those of the answer with its end."""
    answer = record.messages[place]
    for token in model.ends:
        piece = model.tokenizer.decode([token], special=True)
        if any(piece in text for text in _texts(answer)):
            raise MaskError(f"message {place + 1} has {piece!r} in its text, which ends an answer")
    prompt = _rendered(model, record, record.messages[:place], prompt=True)
    written = _written_after(model, record, place, prompt)
    if not written.strip():
        raise MaskError(f"message {place + 1} is empty: nothing was generated")
    prompt_ids, generated = _encoded(model, prompt, written)
    end = next((number for number, token in enumerate(generated) if token in model.ends), None)
    if end is not None:
        return prompt_ids, generated[: end + 1]
    prompt_ids, generated = _encoded(model, prompt, written.rstrip())
    return prompt_ids, generated + _end_after(model, record, place)


def _written_after(model: ChatModel, record: ChatRecord, place: int, prompt: str) -> str:
    """The text that the model writes after `prompt`, and maybe more after its end."""
    whole = _rendered(model, record, record.messages[: place + 1], prompt=False)
    if whole.startswith(prompt):
        return whole[len(prompt) :]
    thinking, thoughts = model.thinking, record.messages[place].get("reasoning_content", "").strip()
    openings, closing = ((), "") if thinking is None else (thinking.openings, thinking.closings[0])
    for opening in openings if thoughts else ():
        before = prompt.rstrip().removesuffix(opening)
        if len(before) < len(prompt.rstrip()) and whole.startswith(before):
            written = whole[len(before) :]
            if written.startswith(opening):  # only the line break after the opening differs
                return written.removeprefix(opening).lstrip("\n")
            if thoughts not in written:  # thinking is left out
                return f"{thoughts}\n{closing}\n\n{written}"
    raise MaskError(
        f"message {place + 1}: the template's prompt ends with {prompt[-40:]!r}, and it writes the answer otherwise"
        + ("; the answer has no reasoning_content" if thinking is not None and not thoughts else "")
        + "; `regenerate` needs no template"
    )


def _end_after(model: ChatModel, record: ChatRecord, place: int) -> list[int]:
    """The end of an answer that the template writes as the beginning of the next message, if it does so: 0 or 1 ids."""
    answer = {name: value for name, value in record.messages[place].items() if name != "reasoning_content"}
    before = [*record.messages[:place], answer]
    if place + 1 < len(record.messages):
        following: Mapping[str, Any] = record.messages[place + 1]
    else:
        following = {"role": "tool" if answer.get("tool_calls") else "user", "content": _PROBE}
    whole = _rendered(model, record, before, prompt=False).rstrip()
    longer = _rendered(model, record, [*before, following], prompt=False)
    if not longer.startswith(whole):
        return []
    first = model.tokenizer.encode(longer[len(whole) :].lstrip(), special=False)[:1]
    return first if model.ends.issuperset(first) else []


def _rendered(model: ChatModel, record: ChatRecord, messages: Sequence[Mapping[str, Any]], *, prompt: bool) -> str:
    conversation = Conversation(messages, record.tools, record.variables, add_generation_prompt=prompt)
    return model.template.render(conversation)


def _encoded(model: ChatModel, prompt: str, written: str) -> tuple[list[int], list[int]]:
    """The ids of the prompt, as the server encodes it, and of the text after it.

    Both together are encoded first: some tokenizers put a space before a text that stands alone.
    """
    special = model.template.adds_special
    prompt_ids = model.tokenizer.encode(prompt, special=special)
    together = model.tokenizer.encode(prompt + written, special=special)
    if together[: len(prompt_ids)] == prompt_ids:
        return prompt_ids, together[len(prompt_ids) :]
    return prompt_ids, model.tokenizer.encode(written, special=False)


def _texts(message: Mapping[str, Any]) -> Iterator[str]:
    yield message["content"]
    yield message.get("reasoning_content", "")
    for call in message.get("tool_calls", ()):
        yield str(call["function"]["arguments"])
