"""Output processing: one copy of tokens and trees to the host, and from it what each scheduled request gets.

Log-probabilities, if a request asks for them, are copied after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from eagle_server.ops.upload import upload
from eagle_server.plan import Chunk, CyclePlan, Decode, Failure, SequenceOutput
from eagle_server.request import FinishReason, TokenLogprob
from eagle_server.speculation.accept import Accepted
from eagle_server.speculation.tree import Tree
from eagle_server.worker.batch.draft_tree import draft_tree, drafted_nodes
from eagle_server.worker.host import HostCopy, is_finite, leading_finite, logprobs_to_host, to_host

NOT_FINITE = Failure(
    FinishReason.ERROR,
    "the model's logits are not finite (NaN or inf); its weights or the prompt's numerics are broken",
)
NONE_ALLOWED = Failure(
    FinishReason.REFUSED,
    "no token may follow: the grammar, allowed_token_ids, bad_words, logit_bias, min_tokens and penalties together "
    "leave none",
)


@dataclass(frozen=True)
class Decoded:
    """A verified batch: its trees, the logits of their computed nodes float32 [n, vocab], and what was accepted.

    restricted: grammars or sampling parameters may have excluded tokens. If not, and without logprobs, `logits` are not
    read: the next forward may overwrite them.
    """

    logits: Tensor
    accepted: Accepted
    tree: Tree
    restricted: bool = False
    estimates: tuple[Tensor, ...] = ()  # more to copy, which `outputs` returns


@dataclass(frozen=True)
class Drawn:
    """Prefilled chunks: logits float32 [n, vocab], `logit_rows` of them per chunk, and the last chunks' tokens."""

    logits: Tensor
    logit_rows: tuple[int, ...]
    tokens: Tensor  # int64 [last chunks, 1]
    finite: Tensor  # bool [last chunks, 1]


Outputs = tuple[tuple[SequenceOutput, ...], tuple[SequenceOutput, ...], Sequence[NDArray[Any]]]


class OutputCopy:
    """The results of a cycle on their way to the host. The copy starts at once."""

    def __init__(self, plan: CyclePlan, decoded: Decoded | None, drawn: Drawn | None) -> None:
        self._plan, self._decoded, self._drawn = plan, decoded, drawn
        accepted = drafts = estimates = tuple[Tensor, ...]()
        if decoded is not None:
            a = decoded.accepted
            accepted = (a.path, a.tokens, a.drafted, a.finite)
            if any(decode.trees for decode in plan.decodes):
                drafts = drafted_nodes(decoded.tree)
            estimates = decoded.estimates
        first = () if drawn is None else (drawn.tokens, drawn.finite)
        self._drafts = len(drafts)
        self._values, self._estimates = HostCopy(*accepted, *drafts, *first), HostCopy(*estimates)

    def outputs(self) -> Outputs:
        """The outputs of the plan's chunks and decodes, in its order, and `Decoded.estimates`.

        Waits for the copy; log-probabilities, and what came of a failure, for all of the device's work.
        """
        values, decoded, drawn = self._values.lists(), self._decoded, self._drawn
        trees = values[4 : 4 + self._drafts]
        decodes = () if decoded is None else _decodes(self._plan.decodes, decoded, trees, *values[:4])
        chunks = () if drawn is None else _chunks(self._plan.chunks, drawn, *values[-2:])
        return chunks, decodes, self._estimates.arrays()


def _decodes(
    decodes: Sequence[Decode],
    decoded: Decoded,
    trees: Sequence[Any],
    paths: list[list[int]],
    tokens: list[list[int]],
    drafted: list[int],
    finite: list[bool],
) -> tuple[SequenceOutput, ...]:
    out, roots = [], _root_rows(decoded.tree)
    for number, decode in enumerate(decodes):  # the batch may have padding after them
        path = [node for node in paths[number] if node >= 0]
        rows = [roots[number] + node for node in path]  # a request's nodes have consecutive rows
        failed = None
        if not finite[number]:  # the tokens before the failure are valid
            good = leading_finite(decoded.accepted.scores[number], path)
            failed = _failure(decode, decoded.logits, rows[good]) if decoded.restricted else NOT_FINITE
            rows = rows[:good]
        kept = tokens[number][: len(rows)]
        logprobs = _logprobs(decoded.logits, rows, kept, decode.sampling.params.logprobs)
        tree = None
        if decode.trees:
            nodes, parents, *scores = (each[number] for each in trees)
            tree = draft_tree(nodes, parents, scores[0] if scores else None, paths[number], kept)
        out.append(SequenceOutput(tuple(kept), drafted[number], logprobs, failed=failed, tree=tree))
    return tuple(out)


def _root_rows(tree: Tree) -> Sequence[int]:
    """The row of each request's root."""
    if tree.counts is None:
        return range(0, tree.parents.numel(), tree.size)
    return to_host(tree.retrive_index[:, 0])[0]  # type: ignore[no-any-return]


def _chunks(
    chunks: Sequence[Chunk], drawn: Drawn, tokens: list[list[int]], finite: list[list[bool]]
) -> tuple[SequenceOutput, ...]:
    out, last, start = [], 0, 0
    for chunk, count in zip(chunks, drawn.logit_rows, strict=True):
        sampled: tuple[int, ...] = ()
        logprobs = prompt_logprobs = tuple[TokenLogprob, ...]()
        failed = None
        if chunk.next_token is None:
            newest = start + count - 1
            if finite[last][0]:
                sampled = tuple(tokens[last])
                logprobs = _logprobs(drawn.logits, [newest], sampled, chunk.sampling.params.logprobs)
            else:
                failed = _failure(chunk, drawn.logits, newest)
            last += 1
        if chunk.prompt_logprobs:
            rows = range(start, start + len(chunk.following))
            alternatives = chunk.sampling.params.logprobs or 0
            prompt_logprobs = _logprobs(drawn.logits, rows, chunk.following, alternatives)
        start += count
        out.append(SequenceOutput(sampled, 0, logprobs, prompt_logprobs, failed))
    return tuple(out)


def _failure(scheduled: Decode | Chunk, logits: Tensor, row: int) -> Failure:
    """Why a row's best score is not finite. A model may give single tokens -inf itself, but not all of them."""
    if not is_finite(logits[row].max()):
        return NOT_FINITE
    matcher = scheduled.grammar_matcher
    if matcher is None or matcher.failure is None:
        return NONE_ALLOWED
    return Failure(FinishReason.REFUSED, matcher.failure)


def _logprobs(
    logits: Tensor, rows: Sequence[int], tokens: Sequence[int], count: int | None
) -> tuple[TokenLogprob, ...]:
    if count is None or not rows:
        return ()
    chosen = logits.index_select(0, upload(rows, logits.device))
    return logprobs_to_host(chosen, upload(tokens, logits.device), count)
