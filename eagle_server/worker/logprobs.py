"""Log-probabilities of a cycle's tokens. They come to the host in the one copy of its results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from eagle_server.ops.device import upload
from eagle_server.plan import Chunk, Decode
from eagle_server.request import TokenLogprob
from eagle_server.speculation.accept import Accepted
from eagle_server.speculation.tree import Tree
from eagle_server.worker.host import HostCopy

Kind = Literal["decoded", "prompt"]
_NAMES = ("logprob", "top_logprobs", "top_tokens")


def of_decodes(decodes: Sequence[Decode], logits: Tensor, tree: Tree, accepted: Accepted) -> dict[str, Tensor]:
    """At all places of the paths, steps + 1 for each request that wants some, in their order. At least one does.

    logits: [n, vocab], of the computed nodes.
    """
    wanted = {number: decode.sampling.params.logprobs for number, decode in enumerate(decodes)}
    counts = {number: count for number, count in wanted.items() if count is not None}
    numbers = upload(list(counts), logits.device)
    path, tokens = (each.index_select(0, numbers).clamp(min=0) for each in (accepted.path, accepted.tokens))
    rows = tree.retrive_index.index_select(0, numbers).gather(1, path)
    return _ranked("decoded", logits.index_select(0, rows.view(-1)), tokens.view(-1), max(counts.values()))


def of_chunks(chunks: Sequence[Chunk], logits: Tensor, first_tokens: Tensor) -> dict[str, Tensor]:
    """In all of the chunks' rows whose logits are known.

    logits: [rows, vocab]. first_tokens: int64 [last chunks, 1], which their last rows have drawn.
    """
    tokens, drawn = list[int](), list[int]()
    for chunk in chunks:
        tokens.extend(chunk.following if chunk.prompt_logprobs else ())
        if chunk.next_token is None:
            drawn.append(len(tokens))
            tokens.append(0)
    known = upload(tokens, logits.device).index_copy_(0, upload(drawn, logits.device), first_tokens[:, 0])
    return _ranked("prompt", logits, known, max(chunk.sampling.params.logprobs or 0 for chunk in chunks))


class HostLogprobs:
    """Log-probabilities on the host, with the best ones at each place and their tokens."""

    def __init__(self, chosen: list[float], best: list[list[float]], ids: list[list[int]]) -> None:
        self._chosen, self._best, self._ids = chosen, best, ids

    @classmethod
    def of(cls, host: HostCopy, kind: Kind) -> HostLogprobs:
        return cls(*host.lists(*(f"{kind}_{name}" for name in _NAMES)))

    def at(self, first: int, tokens: Sequence[int], count: int) -> tuple[TokenLogprob, ...]:
        """The entries of tokens that stand from place `first` on, with `count` alternatives each."""
        places = range(first, first + len(tokens))
        tops = (list(zip(self._ids[i][:count], self._best[i][:count], strict=True)) for i in places)
        return tuple(TokenLogprob(*entry) for entry in zip(tokens, self._chosen[first:], tops, strict=False))


def _ranked(kind: Kind, logits: Tensor, tokens: Tensor, count: int) -> dict[str, Tensor]:
    """Raw log-probabilities of tokens int64 [n] under logits [n, vocab], and the `count` likeliest tokens."""
    logp = logits.float().log_softmax(-1)
    found = logp.gather(1, tokens[:, None])[:, 0], *logp.topk(min(count, logits.shape[-1]), dim=-1)
    return {f"{kind}_{name}": tensor for name, tensor in zip(_NAMES, found, strict=True)}
