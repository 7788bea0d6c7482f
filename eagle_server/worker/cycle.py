"""The record of one cycle, and output processing: from the record to what each scheduled request gets.

One copy brings tokens, trees and what the budget learns from to the host. Log-probabilities, if a request asks for
them, are copied after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from eagle_server.ops.device import upload
from eagle_server.plan import Chunk, CyclePlan, Decode, Failure, SequenceOutput
from eagle_server.request import DraftTree, FinishReason, TokenLogprob
from eagle_server.speculation.accept import Accepted
from eagle_server.speculation.tree import Tree
from eagle_server.worker.batch.batch import DecodeBatch
from eagle_server.worker.batch.draft_tree import draft_tree
from eagle_server.worker.budget.budget import CycleBudget
from eagle_server.worker.clock import StageClock
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
class Drawn:
    """Prefilled chunks: logits float32 [n, vocab], `logit_rows` of them per chunk, and the last chunks' tokens."""

    logits: Tensor
    logit_rows: tuple[int, ...]
    tokens: Tensor  # int64 [last chunks, 1]
    finite: Tensor  # bool [last chunks, 1]


@dataclass(eq=False)
class Cycle:
    """What the stages of one cycle find, by stage. `tree` is set by drafting, and again after the token masks.

    Except `host`, fields without a value are set only in cycles with decodes. `draft_batch` and what belongs to it are
    about the requests that draft, in the order of `budget.drafting`; the rest is about all decodes of the plan, in its
    order.
    """

    plan: CyclePlan
    clock: StageClock

    # The batch and its budget.
    batch: DecodeBatch = field(init=False)
    budget: CycleBudget = field(init=False)

    # Drafting.
    draft_batch: DecodeBatch | None = None  # None: no request drafts
    extended: int = 0  # rows of draft-extend, with backlogs
    fed: int = 0  # nodes that each draft step feeds
    estimated: Tree | None = None  # their trees as proposed, with corrected scores; None: there are none
    tree: Tree = field(init=False)  # of all decodes; later as they are verified

    # Verification. If nothing is restricted and no request wants logprobs, `logits` are not read by the host, so the
    # next forward may overwrite them.
    logits: Tensor = field(init=False)  # float32 [n, vocab], of the computed nodes
    restricted: bool = False  # grammars or sampling parameters may have excluded tokens
    accepted: Accepted = field(init=False)

    # Prompts.
    drawn: Drawn | None = None

    # What was expected.
    expected: float = 0.0  # estimated number of accepted draft tokens
    predicted_seconds: float = 0.0  # of decoding, by the cost model

    host: HostCopy = field(init=False)

    @property
    def steps(self) -> int:
        """Levels that were drafted."""
        return 0 if self.draft_batch is None else self.budget.steps

    @property
    def drafting_requests(self) -> int:
        """How many requests drafted."""
        return 0 if self.draft_batch is None else len(self.draft_batch.decodes)

    @property
    def rows(self) -> int:
        """Of the verify forward."""
        return len(self.logits) if self.plan.decodes else 0

    def start_copy(self) -> None:
        """Start to copy what the host reads."""
        tensors: dict[str, Tensor] = {}
        if self.plan.decodes:
            accepted, tree, estimated = self.accepted, self.tree, self.estimated
            tensors |= {"path": accepted.path, "tokens": accepted.tokens, "drafted": accepted.drafted}
            tensors["finite"] = accepted.finite
            returns_trees = any(decode.trees for decode in self.plan.decodes)
            if returns_trees or (self.budget.is_lesson and estimated is not None):
                tensors |= {"nodes": tree.tokens, "parents": tree.parents}
            if returns_trees and tree.scores is not None:
                tensors["scores"] = tree.scores
            if estimated is not None and estimated.scores is not None:
                tensors["estimates"] = estimated.scores
                if self.budget.is_lesson and estimated.guesses is not None:
                    tensors |= {"above": estimated.parents, "guesses": estimated.guesses, "depths": tree.depths}
                    if tree.proposed is not None:
                        tensors["proposed"] = tree.proposed
        if self.drawn is not None:
            tensors |= {"first_tokens": self.drawn.tokens, "first_finite": self.drawn.finite}
        self.host = HostCopy(tensors)

    def outputs(self) -> tuple[tuple[SequenceOutput, ...], tuple[SequenceOutput, ...]]:
        """The outputs of the plan's chunks and decodes, in its order.

        Waits for the copy. Log-probabilities and failures wait for all of the device's work.
        """
        return self._chunks(), self._decodes()

    def _decodes(self) -> tuple[SequenceOutput, ...]:
        if not self.plan.decodes:
            return ()
        paths, tokens, drafted, finite = self.host.lists("path", "tokens", "drafted", "finite")
        out, roots, logits = [], _root_rows(self.tree), self.logits
        for number, decode in enumerate(self.plan.decodes):  # the batch may have padding after them
            path = [node for node in paths[number] if node >= 0]
            rows = [roots[number] + node for node in path]  # a request's nodes have consecutive rows
            failed = None
            if not finite[number]:  # the tokens before the failure are valid
                good = leading_finite(self.accepted.scores[number], path)
                failed = _failure(decode, logits, rows[good]) if self.restricted else NOT_FINITE
                rows = rows[:good]
            kept = tokens[number][: len(rows)]
            logprobs = _logprobs(logits, rows, kept, decode.sampling.params.logprobs)
            tree = self._draft_tree(number, paths[number], kept) if decode.trees else None
            out.append(SequenceOutput(tuple(kept), drafted[number], logprobs, failed=failed, tree=tree))
        return tuple(out)

    def _draft_tree(self, number: int, path: list[int], kept: list[int]) -> DraftTree:
        nodes, parents = (each[number] for each in self.host.lists("nodes", "parents"))
        scores = self.host.lists("scores")[0][number] if "scores" in self.host else None
        steps = self.steps if number in self.budget.drafting else 0
        return draft_tree(nodes, parents, scores, path, kept, steps)

    def _chunks(self) -> tuple[SequenceOutput, ...]:
        if self.drawn is None:
            return ()
        out, last, start = [], 0, 0
        tokens, finite = self.host.lists("first_tokens", "first_finite")
        logits = self.drawn.logits
        for chunk, count in zip(self.plan.chunks, self.drawn.logit_rows, strict=True):
            sampled: tuple[int, ...] = ()
            logprobs = prompt_logprobs = tuple[TokenLogprob, ...]()
            failed = None
            if chunk.next_token is None:
                newest = start + count - 1
                if finite[last][0]:
                    sampled = tuple(tokens[last])
                    logprobs = _logprobs(logits, [newest], sampled, chunk.sampling.params.logprobs)
                else:
                    failed = _failure(chunk, logits, newest)
                last += 1
            if chunk.prompt_logprobs:
                rows = range(start, start + len(chunk.following))
                alternatives = chunk.sampling.params.logprobs or 0
                prompt_logprobs = _logprobs(logits, rows, chunk.following, alternatives)
            start += count
            out.append(SequenceOutput(sampled, 0, logprobs, prompt_logprobs, failed))
        return tuple(out)


def _root_rows(tree: Tree) -> Sequence[int]:
    """The row of each request's root."""
    if tree.counts is None:
        return range(0, tree.parents.numel(), tree.size)
    return to_host(tree.retrive_index[:, 0])[0]  # type: ignore[no-any-return]


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
