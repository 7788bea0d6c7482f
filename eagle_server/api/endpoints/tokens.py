"""vLLM's endpoints for tokens: /tokenize, /detokenize and /tokenizer_info."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request, Response

from eagle_server.api.connection import while_connected
from eagle_server.api.generation.prompts import check_token_ids, encode, render
from eagle_server.api.guard.body import process_text, read_body
from eagle_server.api.routes import HeadRoute, json_response
from eagle_server.api.schemas.messages import CountTokensRequest
from eagle_server.api.schemas.tokens import DetokenizeRequest, TokenizeRequest
from eagle_server.api.service import Service, service_of
from eagle_server.text.token_spelling import TokenSpelling

router = APIRouter(route_class=HeadRoute)

MAX_TEXT_TOKENS = 2**19  # of a text that is only tokenized; it may be longer than the model's context
LIMITED = "the maximum length of a text that is only tokenized"


class Tokenized(msgspec.Struct):
    """Token ids of a text. `token_strs` are the vocabulary's spellings, if asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct):
    """Text of token ids, special tokens included."""

    prompt: str


class CountedTokens(msgspec.Struct):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int


class TokenizerInfo(msgspec.Struct):
    """What clients need to build prompts themselves.

    `bos_token` and `eos_token` are the tokenizer's own, as in vLLM. Generation ends at any of `eos_tokens`.
    """

    vocab_size: int
    max_model_len: int
    bos_token: str | None
    eos_token: str | None
    eos_token_ids: list[int]
    eos_tokens: list[str]
    chat_template: str


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    body, service = await read_body(TokenizeRequest, request), service_of(request)
    limit = service.ready_for(body.model).max_request_tokens
    work = process_text(body, lambda: json_response(_tokenized(body, service, limit)))
    return await while_connected(request.receive, work)


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request) -> Response:
    body, service = await read_body(CountTokensRequest, request), service_of(request)
    service.check_model(body.model)
    work = process_text(body, lambda: json_response(_counted(body, service)))
    return await while_connected(request.receive, work)


@router.post("/detokenize")
async def detokenize(request: Request) -> Response:
    body, service = await read_body(DetokenizeRequest, request), service_of(request)
    ready = service.ready_for(body.model)
    work = process_text(body, lambda: json_response(_detokenized(body, service, ready.vocab_size)))
    return await while_connected(request.receive, work)


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> Response:
    service = service_of(request)
    ready = service.ready_for(None)
    ends = list(ready.eos_token_ids)
    pieces = [_piece(token_id, service.spelling) for token_id in ends]
    special_tokens = service.chat_template.special_tokens
    info = TokenizerInfo(
        vocab_size=ready.vocab_size,
        max_model_len=ready.max_request_tokens,
        bos_token=special_tokens.get("bos_token"),
        eos_token=special_tokens.get("eos_token", next(iter(pieces), None)),
        eos_token_ids=ends,
        eos_tokens=pieces,
        chat_template=service.chat_template.source,
    )
    return json_response(info)


def _detokenized(body: DetokenizeRequest, service: Service, vocab_size: int) -> Detokenized:
    check_token_ids("tokens", body.tokens, vocab_size)
    return Detokenized(service.spelling.tokenizer.decode(body.tokens, special=True))


def _tokenized(body: TokenizeRequest, service: Service, limit: int) -> Tokenized:
    template, tokenizer = service.chat_template, service.spelling.tokenizer
    if body.messages is not None:
        text, special, param = render(body.messages, body, template), template.adds_special, "messages"
    else:
        text, special, param = body.prompt or "", True, "prompt"
    special = special if body.add_special_tokens is None else body.add_special_tokens
    tokens = encode(text, tokenizer, MAX_TEXT_TOKENS, param, special=special, limited=LIMITED)
    pieces = [_piece(token_id, service.spelling) for token_id in tokens] if body.return_token_strs else None
    return Tokenized(len(tokens), limit, tokens, pieces)


def _counted(body: CountTokensRequest, service: Service) -> CountedTokens:
    template, tokenizer = service.chat_template, service.spelling.tokenizer
    text = render(body.chat.messages, body.chat, template)
    special = template.adds_special
    tokens = encode(text, tokenizer, MAX_TEXT_TOKENS, "messages", special=special, limited=LIMITED)
    return CountedTokens(len(tokens))


def _piece(token_id: int, spelling: TokenSpelling) -> str:
    """The vocabulary's spelling, or the token's text if the vocabulary has none."""
    piece = spelling.tokenizer.piece(token_id)
    return spelling(token_id) if piece is None else piece
