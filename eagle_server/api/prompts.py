"""Prompts in tokens, from text, token ids or messages."""

from __future__ import annotations

from collections.abc import Sequence

from eagle_server.api.choice import Prompt
from eagle_server.api.errors import ApiError, bad_request
from eagle_server.api.schemas.chat import Message, Rendering
from eagle_server.text.chat_template import ChatTemplate, TemplateError, Turn
from eagle_server.text.tokenizer import Tokenizer

CHARACTERS_PER_PIECE = 4  # normalizers may compose characters, so a token may stand for a few more than it has


def completion_prompt(
    source: str | list[int], tokenizer: Tokenizer, vocab_size: int, limit: int, *, echo: bool
) -> Prompt:
    """A text or token ids of at most `limit` tokens.

    Raises:
        ApiError: it is empty, too long or has a token that is none.
    """
    if isinstance(source, str):
        prompt = Prompt(encode(source, tokenizer, limit, "prompt", special=True), source)
    else:
        check_token_ids("prompt", source, vocab_size)
        prompt = Prompt(source, tokenizer.decode(source) if echo else "")
    if not prompt.token_ids:
        raise bad_request("the prompt is empty: it has no tokens", "prompt", "invalid_value")
    return prompt


def chat_prompt(
    messages: Sequence[Message], rendering: Rendering, template: ChatTemplate, tokenizer: Tokenizer, limit: int
) -> Prompt:
    """Messages under the model's template.

    Raises:
        ApiError: the template does not take them, or they are too long.
    """
    text = render(messages, rendering, template)
    token_ids = encode(text, tokenizer, limit, "messages", special=template.adds_special)
    if not token_ids:
        raise bad_request("the prompt is empty: it has no tokens", "messages", "invalid_value")
    return Prompt(token_ids, text)


def render(messages: Sequence[Message], rendering: Rendering, template: ChatTemplate) -> str:
    """The text of a conversation.

    Raises:
        ApiError: the template does not take it.
    """
    turn = Turn(
        [message.values for message in messages],
        rendering.offered_tools,
        rendering.chat_template_kwargs,
        add_generation_prompt=rendering.generation_prompt,
        continue_final_message=rendering.continue_final_message,
    )
    try:
        return template.render(turn)
    except TemplateError as error:
        raise bad_request(str(error), error.param, "invalid_value") from None


def encode(text: str, tokenizer: Tokenizer, limit: int, param: str, *, special: bool) -> list[int]:
    """Token ids of a text, which is refused unread if it must have more than `limit`."""
    most = limit * tokenizer.longest_piece * CHARACTERS_PER_PIECE
    if len(text) > most:
        message = f"the prompt has {len(text)} characters; {limit} tokens never stand for more than {most}"
        raise bad_request(message, param, "context_length_exceeded")
    return tokenizer.encode(text, special=special)


def too_long(tokens: int, max_tokens: int, limit: int, param: str) -> ApiError:
    """The error of a prompt that leaves no room for what is to be generated."""
    message = (
        f"this model's maximum context length is {limit} tokens, however you requested "
        f"{tokens + max_tokens} tokens ({tokens} in your prompt; {max_tokens} for the completion); "
        f"reduce the prompt or max_tokens"
    )
    return bad_request(message, param if tokens >= limit else "max_tokens", "context_length_exceeded")


def check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """
    Raises:
        ApiError: one of them is no token.
    """
    wrong = next((token for token in token_ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise bad_request(f"{name}: token id {wrong} is outside the vocabulary of {vocab_size}", name, "invalid_value")
