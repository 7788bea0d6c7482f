"""Prompts: rendering with the chat template, tokenizing with a limit, and errors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from eagle_server.api.errors import ApiError, bad_request
from eagle_server.api.generation.request_state import Prompt
from eagle_server.api.schemas.base import TEXT_ONLY
from eagle_server.api.schemas.chat import Message, Rendering
from eagle_server.api.schemas.generation import GenerationBody
from eagle_server.text.chat_template import ChatTemplate, Conversation, TemplateError
from eagle_server.text.tokenizer import TextTooLong, Tokenizer, TooManyTokens

CHARACTERS_PER_PIECE = 4  # a normalizer may compose characters, so a token's source text may be longer than the token


def render(messages: Sequence[Message], rendering: Rendering, template: ChatTemplate) -> str:
    """The text of a conversation under the chat template.

    Raises:
        ApiError: the template does not accept it.
    """
    conversation = Conversation(
        [message.values for message in messages],
        rendering.offered_tools,
        rendering.chat_template_kwargs,
        rendering.hints,
        add_generation_prompt=rendering.generation_prompt,
        continue_final_message=rendering.continue_final_message,
    )
    try:
        return template.render(conversation)
    except TemplateError as error:
        raise bad_request(str(error), rendering.name(error.param), "invalid_value") from None


def encode(
    text: str,
    tokenizer: Tokenizer,
    limit: int,
    param: str,
    *,
    special: bool,
    last: int | None = None,
    limited: str = "this model's maximum context length",
) -> list[int]:
    """Token ids of a text, or only its `last` ones, however many it has. `limited` is the limit's name in errors.

    Raises:
        ApiError: the text has more than `limit` tokens, or cannot be tokenized in the memory that there is. A text that
            is certainly too long is not tokenized.
    """
    most = limit * tokenizer.longest_piece * CHARACTERS_PER_PIECE
    if last is None and len(text) > most:
        message = f"the prompt has {len(text)} characters; {limit} tokens never stand for more than {most}"
        raise bad_request(message, param, "context_length_exceeded")
    try:
        return tokenizer.encode(text, special=special, limit=None if last else limit, last=last)
    except TooManyTokens as error:
        message = f"{limited} is {limit} tokens, however the text has at least {error.count}"
    except TextTooLong as error:
        message = f"the prompt has {error}"
    raise bad_request(message, param, "context_length_exceeded")


def too_long(tokens: int, max_tokens: int, limit: int, body: GenerationBody) -> ApiError:
    """The error for a prompt that leaves no room for the output."""
    wanted, is_full = body.name("max_tokens"), tokens >= limit
    message = (
        f"this model's maximum context length is {limit} tokens, however you requested "
        f"{tokens + max_tokens} tokens ({tokens} in your prompt; {max_tokens} for the completion); "
        f"reduce the prompt{'' if is_full else f' or {wanted}'}"
    )
    return bad_request(message, body.name(body.prompt_param) if is_full else wanted, "context_length_exceeded")


def refuse_media(prompts: Iterable[Prompt], media: Set[int], tokenizer: Tokenizer, param: str) -> None:
    """
    Raises:
        ApiError: a prompt has a token in `media`, which stands for an image, video or audio.
    """
    for prompt in prompts:
        if not media.isdisjoint(prompt.token_ids):
            token = next(token for token in prompt.token_ids if token in media)
            raise bad_request(
                f"the prompt has {tokenizer.piece(token)!r} (token {token}), which stands for an image, video or "
                f"audio; {TEXT_ONLY}: leave it out",
                param,
                "invalid_value",
            )


def check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """
    Raises:
        ApiError: a token id is outside the vocabulary.
    """
    wrong = next((token for token in token_ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise bad_request(f"{name}: token id {wrong} is outside the vocabulary of {vocab_size}", name, "invalid_value")
