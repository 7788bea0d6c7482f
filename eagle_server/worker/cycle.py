"""The record of one cycle, and output processing: from the record to what each scheduled request gets.

One copy brings tokens, log-probabilities, trees and what the budget learns from to the host.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from eagle_server.plan import Chunk, CyclePlan, Decode, Failure, SequenceOutput
from eagle_server.request import DraftTree, FinishReason, TokenLogprob
from eagle_server.speculation.accept import Accepted
from eagle_server.speculation.tree import Tree
from eagle_server.worker import logprobs
from eagle_server.worker.batch.batch import Batches, DecodeBatch, PromptBatch
from eagle_server.worker.batch.draft_tree import draft_tree
from eagle_server.worker.budget.budget import CycleBudget
from eagle_server.worker.clock import StageClock
from eagle_server.worker.host import HostCopy, is_finite, leading_finite, to_host
from eagle_server.worker.verifier import Prefilled

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
    """Prefilled chunks: logits [n, vocab], `logit_rows` of them per chunk, and the last chunks' tokens."""

    logits: Tensor
    logit_rows: tuple[int, ...]
    tokens: Tensor  # int64 [last chunks, 1]
    finite: Tensor  # bool [last chunks, 1]
    last: tuple[Chunk, ...]
    restricted: bool  # as `Cycle.restricted`


@dataclass(eq=False)
class Cycle:
    """What the stages of one cycle find, by stage. `tree` is set by drafting, and again after the token masks.

    Except `host`, fields without a value are set only in cycles with decodes. `draft_batch` and what belongs to it are
    about the requests that draft, in the order of `budget.drafting`; the rest is about all decodes of the plan, in its
    order.
    """

    plan: CyclePlan
    clock: StageClock
    began: float = field(default_factory=time.perf_counter)

    # The batch and its budget.
    batch: DecodeBatch = field(init=False)
    budget: CycleBudget = field(init=False)

    # Drafting.
    draft_batch: DecodeBatch | None = None  # None: no request drafts
    read: int = 0  # rows of backlogs and prompts that the drafter had not read
    extended: int = 0  # rows of draft-extend
    estimated: Tree | None = None  # their trees as proposed, with corrected scores; None: there are none
    tree: Tree = field(init=False)  # of all decodes; later as they are verified

    # Verification. Unless something is restricted, `logits` are not read after `start_copy`: the next forward may
    # overwrite them.
    logits: Tensor = field(init=False)  # [n, vocab], of the computed nodes, as in `Verified`
    restricted: bool = False  # grammars or sampling parameters may have excluded tokens
    accepted: Accepted = field(init=False)

    # Prompts.
    prefilled: tuple[PromptBatch, Prefilled] | None = None  # what verification has computed of them
    drawn: Drawn | None = None

    # What was expected.
    expected: float = 0.0  # estimated number of accepted draft tokens
    predicted_seconds: float = 0.0  # of decoding, by the cost model

    host: HostCopy = field(init=False)

    def after(self, batch: DecodeBatch, batches: Batches) -> DecodeBatch:
        """The requests of this cycle's `batch` as they will be in the next one, and those that join it."""
        after = batch.after(self.accepted)
        return after if self.drawn is None or not self.joining else batches.join(after, self.joining, self.drawn.tokens)

    @property
    def joining(self) -> tuple[Chunk, ...]:
        """The last chunks of prompts: their requests decode in the next cycle."""
        return () if self.drawn is None else self.drawn.last

    @property
    def stage_seconds(self) -> dict[str, float]:
        """{}: this cycle is not measured."""
        return self.clock.seconds() if self.clock.is_measured else {}

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

    @property
    def joined(self) -> int:
        """Rows of prompts in the verify forward, with their padding."""
        return 0 if self.prefilled is None else sum(self.prefilled[0].counts) + self.prefilled[1].padding

    def start_copy(self) -> None:
        """Start to copy what the host reads."""
        tensors: dict[str, Tensor] = {}
        if self.plan.decodes:
            accepted, tree, estimated = self.accepted, self.tree, self.estimated
            tensors |= {"path": accepted.path, "tokens": accepted.tokens, "drafted": accepted.drafted}
            tensors["finite"] = accepted.finite
            if any(decode.sampling.params.logprobs is not None for decode in self.plan.decodes):
                tensors |= logprobs.of_decodes(self.plan.decodes, self.logits, tree, accepted)
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
            if any(chunk.prompt_logprobs or chunk.sampling.params.logprobs is not None for chunk in self.plan.chunks):
                tensors |= logprobs.of_chunks(self.plan.chunks, self.drawn.logits, self.drawn.tokens)
        self.host = HostCopy(tensors)

    def outputs(self) -> tuple[tuple[SequenceOutput, ...], tuple[SequenceOutput, ...]]:
        """The outputs of the plan's chunks and decodes, in its order.

        Waits for the copy. Failures under restrictions wait for all of the device's work.
        """
        return self._chunks(), self._decodes()

    def _decodes(self) -> tuple[SequenceOutput, ...]:
        if not self.plan.decodes:
            return ()
        paths, tokens, drafted, finite = self.host.lists("path", "tokens", "drafted", "finite")
        out, known, place = [], self._logprobs("decoded"), 0
        for number, decode in enumerate(self.plan.decodes):  # the batch may have padding after them
            path, failed = paths[number], None
            count = len(path) if path[-1] >= 0 else path.index(-1)
            if not finite[number]:  # the tokens before the failure are valid
                good = leading_finite(self.accepted.scores[number], path[:count])
                failed, count = self._failure(number, path[good]) if self.restricted else NOT_FINITE, good
            kept = tuple(tokens[number][:count])
            ranked: tuple[TokenLogprob, ...] = ()
            if known is not None and (alternatives := decode.sampling.params.logprobs) is not None:
                ranked = known.at(place, kept, alternatives)
                place += len(path)
            tree = self._draft_tree(number, path, kept) if decode.trees else None
            out.append(SequenceOutput(kept, drafted[number], ranked, failed=failed, tree=tree))
        return tuple(out)

    def _logprobs(self, kind: logprobs.Kind) -> logprobs.HostLogprobs | None:
        """None: no request wants some."""
        return logprobs.HostLogprobs.of(self.host, kind) if f"{kind}_logprob" in self.host else None

    def _failure(self, number: int, node: int) -> Failure:
        row = to_host(self.tree.retrive_index[number, node])[0]
        return _failure(self.plan.decodes[number], self.logits, row)

    def _draft_tree(self, number: int, path: Sequence[int], kept: Sequence[int]) -> DraftTree:
        nodes, parents = (each[number] for each in self.host.lists("nodes", "parents"))
        scores = self.host.lists("scores")[0][number] if "scores" in self.host else None
        steps = self.steps if number in self.budget.drafting else 0
        return draft_tree(nodes, parents, scores, path, kept, steps)

    def _chunks(self) -> tuple[SequenceOutput, ...]:
        if self.drawn is None:
            return ()
        out, last, start = [], 0, 0
        tokens, finite = self.host.lists("first_tokens", "first_finite")
        logits, known = self.drawn.logits, self._logprobs("prompt")
        for chunk, count in zip(self.plan.chunks, self.drawn.logit_rows, strict=True):
            sampled: tuple[int, ...] = ()
            ranked = prompt_ranked = tuple[TokenLogprob, ...]()
            failed = None
            if chunk.next_token is None:
                newest = start + count - 1
                if finite[last][0]:
                    sampled = tuple(tokens[last])
                    alternatives = chunk.sampling.params.logprobs
                    if known is not None and alternatives is not None:
                        ranked = known.at(newest, sampled, alternatives)
                else:
                    failed = _failure(chunk, logits, newest) if self.drawn.restricted else NOT_FINITE
                last += 1
            if known is not None and chunk.prompt_logprobs:
                prompt_ranked = known.at(start, chunk.following, chunk.sampling.params.logprobs or 0)
            start += count
            out.append(SequenceOutput(sampled, 0, ranked, prompt_ranked, failed))
        return tuple(out)


def _failure(scheduled: Decode | Chunk, logits: Tensor, row: int) -> Failure:
    """Why a row's best score is not finite. A model may give single tokens -inf itself, but not all of them."""
    if not is_finite(logits[row].max()):
        return NOT_FINITE
    matcher = scheduled.grammar_matcher
    if matcher is None or matcher.failure is None:
        return NONE_ALLOWED
    return Failure(FinishReason.REFUSED, matcher.failure)
