"""The cycle: extend, propose, build the tree, verify, accept, keep. Then the next chunks of incomplete prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from eagle_server.attention.batches import CAPTURED_PIECES
from eagle_server.ops.device import mirrors, upload
from eagle_server.plan import Chunk, CyclePlan, CycleResult, TreeShape
from eagle_server.speculation.accept import Acceptance
from eagle_server.speculation.sampling import draw
from eagle_server.speculation.tree import Tree, root_alone
from eagle_server.worker.ahead import ForwardAhead
from eagle_server.worker.batch.batch import Batches, DecodeBatch, PromptBatch, PromptPieces
from eagle_server.worker.clock import PREFILL, StageClock
from eagle_server.worker.cycle import Cycle, Drawn
from eagle_server.worker.drafters.interface import Drafter
from eagle_server.worker.drafting import TreeDrafting
from eagle_server.worker.graphs import GraphKey
from eagle_server.worker.verifier import Verified, Verifier

# So many eager mixed forwards of one kind cost about as much as its capture: on an H100 a prompt beside eight requests
# of an 8B model took up to 17 ms; a capture takes 100 by estimate.
_MISSES = 4


def do_nothing() -> None:
    """The host has nothing else to do."""


class Worker:
    """Runs cycles.

    overlaps: True with captured graphs. The device may then run the next cycle's first forward while the host reads.
    """

    def __init__(
        self,
        verifier: Verifier,
        drafting: TreeDrafting,
        batches: Batches,
        acceptance: Acceptance,
        *,
        overlaps: bool = False,
    ) -> None:
        self.verifier, self.drafting, self.batches, self.acceptance = verifier, drafting, batches, acceptance
        self.overlaps = overlaps
        self.observers: list[Callable[[Cycle], None]] = []  # see every cycle with decodes after acceptance
        self._verified: ForwardAhead[Verified] = ForwardAhead()
        # The last cycle's chunks, rows and features, if the drafter has not read them.
        self._prompts: tuple[tuple[Chunk, ...], PromptBatch, Tensor | None] | None = None
        self._reading = StageClock(batches.device)  # what it took to read the last ones
        # Mixed forwards that no graph held, for `warm_up_mixed`: tree, requests, their longest text, pieces of prompts.
        self.uncaptured: dict[GraphKey, tuple[TreeShape, int, int, int]] = {}
        self._missed = Counter[GraphKey]()  # how often

    @property
    def drafter(self) -> Drafter[Any]:
        return self.drafting.drafter

    @torch.inference_mode()
    def run(self, plan: CyclePlan, meanwhile: Callable[[], None] = do_nothing) -> CycleResult:
        """One cycle: each decode of the plan gets at least one token, unless it fails, and each chunk advances its
        prompt.

        The device runs ahead of the host until the host reads the outputs. With grammars the host also reads the trees
        in between: as they grow (`batch.ranking`) and while they are verified.

        Args:
            meanwhile: the host's other work. With `overlaps` it is done while the device computes.
        """
        if not self.overlaps:
            meanwhile()
        self.read_prompts()
        clock = StageClock(self.batches.device, measured=plan.warm_up is not None or self.drafting.measures_next)
        clock.take(self._reading)
        cycle, self._reading = Cycle(plan, clock), StageClock(self.batches.device)
        self.batches.begin(plan)
        if plan.released:
            self.drafting.forget(plan.released)
            self._verified.forget(plan.released)
        if self.verifier.states is not None:
            with cycle.clock.stage("keep"):
                self.verifier.settle(plan.states)
        if plan.decodes:
            self._decode(cycle)
        if plan.chunks:
            with cycle.clock.stage(PREFILL):
                cycle.drawn = self._prefill(cycle)
        with cycle.clock.stage("emit"):
            cycle.start_copy()
            if not self.overlaps:
                chunks, decodes = cycle.outputs()
        if self.overlaps:
            self._run_ahead(cycle)
            meanwhile()
        computed = self.drafting.computed_tokens(plan.decodes)  # before the host waits for the outputs
        if self.overlaps:
            chunks, decodes = cycle.outputs()
        self.drafting.learn(cycle, decodes)
        return CycleResult(
            chunks,
            decodes,
            cycle.stage_seconds,
            draft_computed_tokens=computed,
            settled=self.verifier.settled,
            steps=cycle.steps,
            drafting=cycle.drafting_requests,
            rows=cycle.rows,
            expected=cycle.expected,
            predicted_seconds=cycle.predicted_seconds,
        )

    def _decode(self, cycle: Cycle) -> None:
        """Draft, verify, accept, keep."""
        batch, clock = self.batches.decode(cycle.plan.decodes), cycle.clock
        cycle.batch = batch
        self.drafting.draft(cycle)
        with clock.stage("verify"):
            tree = self.verifier.compacted(cycle.tree)
            token_mask = self.batches.token_mask(batch.decodes, tree)
            may_be_ahead = self.overlaps and cycle.draft_batch is None
            verified = self._take_verified(batch, clock) if may_be_ahead else None
            chunks = cycle.plan.chunks
            if verified is None and self.verifier.mixes(chunks):
                prompts = self.batches.prefill(chunks)
                verified, prefilled = self.verifier.mixed(batch, tree, prompts, chunks, self._pieces(cycle, tree))
                cycle.prefilled = prompts, prefilled
            elif verified is None:
                verified = self.verifier.verify(batch, tree)
        with clock.stage("accept"):
            sampling = batch.sampling
            if token_mask is not None:
                tree, sampling = token_mask.masked(tree, sampling)
            cycle.tree, cycle.logits, cycle.restricted = tree, verified.logits, bool(sampling.transforms)
            cycle.accepted = self.acceptance.accept(tree, verified.logits, sampling)
        for observe in self.observers:
            observe(cycle)
        with clock.stage("keep"):
            self.verifier.keep(batch, tree, cycle.accepted)
            self._record(cycle, verified.features)

    def _pieces(self, cycle: Cycle, tree: Tree) -> PromptPieces | None:
        """The cycle's chunks for a captured mixed forward; None: no graph holds it.

        Warm-up captures. What other cycles have missed is in `uncaptured`, for a moment without requests. If none
        comes, the cycle that misses it for the `_MISSES`th time captures it.
        """
        batch, plan = cycle.batch, cycle.plan
        pieces = self.batches.pieces(plan.chunks) if self.overlaps else None
        key = None if pieces is None else self.verifier.mixed_key(batch, tree, pieces)
        if pieces is None or key is None:
            return None
        if plan.warm_up is not None or self.verifier.graphs.holds(key):
            return pieces
        if key not in self._missed and len(self._missed) == len(self.batches.sizes) * len(CAPTURED_PIECES):
            return None
        self._missed[key] += 1
        if self._missed[key] >= _MISSES:
            self.uncaptured.pop(key, None)
            return pieces
        shape = cycle.budget.shape if cycle.draft_batch is not None else TreeShape(0, 1)
        self.uncaptured[key] = (shape, batch.size, max(batch.seq_lens_host), len(pieces.layout.q_lens))
        return None

    @torch.inference_mode()
    def read_prompts(self) -> None:
        """Let the drafter read the last cycle's prompts. On a CPU the results, which do not need it, are sent first."""
        prompts, self._prompts = self._prompts, None
        if prompts is not None:
            with self._reading.stage(PREFILL):
                self.drafter.prefill(self.batches.prompts(*prompts))

    def _run_ahead(self, cycle: Cycle) -> None:
        """The next cycle's first forwards: its drafts, or, if nothing was drafted, verification of the roots.

        A plain cycle gives each request exactly one token, so the host knows the next lengths, and the device the
        tokens. A captured forward overwrites the last one's logits, so there must be nothing left to read from these.
        Nothing is computed if every request gets its last token in this cycle.
        """
        plan = cycle.plan
        if not plan.decodes:
            return
        if plan.warm_up is not None:
            cycle.batch.after(cycle.accepted)  # compiles its kernel
            return
        # What this cycle has not taken is out of date.
        self._verified.discard(cycle.clock)
        self.drafting.discard(cycle.clock)
        if cycle.joining and self.verifier.states is not None:
            return
        if cycle.draft_batch is not None:
            self.drafting.run_ahead(cycle)
            return
        if all(decode.tokens_left == 1 for decode in plan.decodes) and not cycle.joining:
            return
        if cycle.restricted or (cycle.drawn is not None and cycle.drawn.restricted):
            return
        own = StageClock(self.batches.device, measured=self.drafting.measures_next)
        with own.stage("verify"):
            after = cycle.after(cycle.batch, self.batches)
            verified = self.verifier.verify(after, root_alone(after.verified_id, after.seq_lens))
        requests = [(decode.req_pool_index, decode.seq_len + 1) for decode in plan.decodes]
        requests += [(chunk.req_pool_index, chunk.end) for chunk in cycle.joining]
        self._verified.put(verified, requests, after.size, own)

    def _take_verified(self, batch: DecodeBatch, clock: StageClock) -> Verified | None:
        """The verify forward of the roots, if it has run for these requests."""
        requests = [(decode.req_pool_index, decode.seq_len) for decode in batch.decodes]
        return self._verified.take(requests, batch.size, clock)

    def _record(self, cycle: Cycle, features: Tensor) -> None:
        """Record the accepted tokens for the next draft-extend, each with its parent node's feature."""
        if not self.drafter.uses_features:
            return
        batch = cycle.batch
        starts = [(decode.req_pool_index, decode.seq_len) for decode in batch.decodes]
        batch.accepted_tokens.record_paths(starts, batch.req_pool_indices, cycle.tree, cycle.accepted, features)

    def _prefill(self, cycle: Cycle) -> Drawn:
        """Prompt chunks through target and drafter. The last chunk of a prompt samples the first output token."""
        chunks = cycle.plan.chunks
        if cycle.prefilled is None:
            batch = self.batches.prefill(chunks)
            prefilled = self.verifier.prefill(batch, chunks)
        else:
            batch, prefilled = cycle.prefilled
        device = prefilled.logits.device
        last = [i for i, chunk in enumerate(chunks) if chunk.next_token is None]
        logit_ends, row_ends = list(accumulate(prefilled.logit_rows)), list(accumulate(batch.counts))
        ends = [logit_ends[i] - 1 for i in last]
        positions = upload([chunks[i].end for i in last], device)
        last_chunks = [chunks[i] for i in last]
        sampling = self.batches.prompt_sampling(last_chunks)
        logits = prefilled.logits.index_select(0, upload(ends, device))[:, None]
        tokens, scores = draw(logits, positions[:, None], sampling)
        uses_features = self.drafter.uses_features
        prompts = (chunks, batch, prefilled.features if uses_features else None)
        if uses_features and self.batches.unread.has_room and cycle.plan.warm_up is None:
            self.batches.unread.add(chunks, self.batches.table.slots, prefilled.features)
        elif self.overlaps or mirrors(device):  # the device works while the host reads the results
            self.drafter.prefill(self.batches.prompts(*prompts))
        else:
            self._prompts = prompts
        if uses_features:
            starts = [(chunk.req_pool_index, chunk.end - 1) for chunk in last_chunks]
            indices = upload([chunk.req_pool_index for chunk in last_chunks], device)
            newest = upload([row_ends[i] - 1 for i in last], device)
            features = prefilled.features.index_select(0, newest)[:, None]
            self.batches.accepted_tokens.record(starts, indices, tokens, features)
        restricted = bool(sampling.transforms)
        return Drawn(prefilled.logits, prefilled.logit_rows, tokens, scores.isfinite(), tuple(last_chunks), restricted)
