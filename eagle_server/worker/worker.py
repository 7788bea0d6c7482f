"""The cycle: extend, propose, build the tree, verify, accept, keep. Then the next chunks of incomplete prompts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from eagle_server.ops.upload import upload
from eagle_server.plan import Chunk, CyclePlan, CycleResult
from eagle_server.speculation.accept import Acceptance, Accepted
from eagle_server.speculation.sampling import draw
from eagle_server.speculation.tree import Tree, root_alone
from eagle_server.worker.ahead import ForwardAhead
from eagle_server.worker.batch.batch import Batches, DecodeBatch, PromptBatch
from eagle_server.worker.batch.verify_token_mask import VerifyTokenMask
from eagle_server.worker.clock import StageClock
from eagle_server.worker.drafters.interface import Drafter
from eagle_server.worker.drafting import Drafts, TreeDrafting
from eagle_server.worker.output_processing import Decoded, Drawn, OutputCopy
from eagle_server.worker.verifier import Verified, Verifier


def do_nothing() -> None:
    """The host has nothing else to do."""


class Worker:
    """Runs cycles. `overlaps`: the device runs the next cycle's first forward while the host reads the results."""

    def __init__(self, verifier: Verifier, drafting: TreeDrafting, batches: Batches, acceptance: Acceptance) -> None:
        self.verifier, self.drafting, self.batches, self.acceptance = verifier, drafting, batches, acceptance
        self._verified: ForwardAhead[Verified] = ForwardAhead()
        # The last cycle's chunks, rows and features, if the drafter has not read them.
        self._prompts: tuple[tuple[Chunk, ...], PromptBatch, Tensor | None] | None = None
        self._read = StageClock(batches.device)  # what it took to read the last ones
        self.overlaps = False

    @property
    def drafter(self) -> Drafter[Any]:
        return self.drafting.drafter

    @torch.inference_mode()
    def run(self, plan: CyclePlan, meanwhile: Callable[[], None] = do_nothing) -> CycleResult:
        """One cycle: every decoding request gets at least one token, and every chunk advances its prompt.

        The device runs ahead of the host until the host reads `OutputCopy`. With grammars the host also reads the trees
        in between: as they grow (`batch.ranking`) and while they are verified.

        Args:
            meanwhile: the host's other work. With `overlaps` it is done while the device computes.
        """
        if not self.overlaps:
            meanwhile()
        self.read_prompts()
        clock, self._read = self._read, StageClock(self.batches.device)
        self.batches.begin(plan)
        self.drafting.forget(plan.released)
        self._verified.forget(plan.released)
        if self.verifier.states is not None:
            with clock.stage("keep"):
                self.verifier.settle(plan.states)
        batch = decoded = drawn = drafts = None
        if plan.decodes:
            batch = self.batches.decode(plan.decodes)
            drafts = self.drafting.draft(batch, clock)
            with clock.stage("verify"):
                tree = self.verifier.compacted(drafts.tree)
                token_mask = VerifyTokenMask.of(batch.decodes, self.batches.device, tree)
                verified = self._take_verified(batch, clock) if drafts.batch is None else None
                verified = verified or self.verifier.verify(batch, tree)
            with clock.stage("accept"):
                tree, sampling = token_mask.masked(tree, batch.sampling)
                accepted = self.acceptance.accept(tree, verified.logits, sampling)
                learned = self.drafting.observe(batch, drafts, tree, accepted)
            with clock.stage("keep"):
                self.verifier.keep(batch, tree, accepted)
                self._record(batch, tree, verified, accepted)
            decoded = Decoded(verified.logits, accepted, tree, bool(sampling.transforms), learned)
        if plan.chunks:
            with clock.stage("prefill"):
                drawn = self._prefill(plan.chunks)
        with clock.stage("emit"):
            copy = OutputCopy(plan, decoded, drawn)
            outputs = None if self.overlaps else copy.outputs()
        if outputs is None:
            if batch is not None and drafts is not None and decoded is not None:
                self._run_ahead(plan, batch, drafts, decoded, clock)
            meanwhile()
            outputs = copy.outputs()
        chunks, decodes, estimates = outputs
        result = CycleResult(chunks, decodes, clock.seconds(), settled=self.verifier.settled)
        return self.drafting.finish(plan, result, drafts, estimates, 0 if decoded is None else len(decoded.logits))

    @torch.inference_mode()
    def read_prompts(self) -> None:
        """Let the drafter read the last cycle's prompts. On a CPU the results, which do not need it, are sent first."""
        prompts, self._prompts = self._prompts, None
        if prompts is not None:
            with self._read.stage("prefill"):
                self.drafter.prefill(self.batches.prompts(*prompts))

    def _run_ahead(
        self, plan: CyclePlan, batch: DecodeBatch, drafts: Drafts, decoded: Decoded, clock: StageClock
    ) -> None:
        """The next cycle's first forward: draft-extend, or, if nothing was drafted, verification of the roots.

        A plain cycle gives each request exactly one token, so the host knows the next lengths, and the device the
        tokens. A captured forward overwrites the last one's logits, so there must be nothing left to read from these.
        What no request could use after this cycle, which gives it one token at least, is not computed.
        """
        self._verified.discard(clock)
        self.drafting.extended.discard(clock)
        if any(chunk.next_token is None for chunk in plan.chunks):
            return  # its request joins the next cycle
        if drafts.batch is not None:
            self.drafting.extend_ahead(drafts, decoded.accepted)
            return
        if all(decode.tokens_left == 1 for decode in batch.decodes):
            return
        if decoded.restricted or any(decode.sampling.params.logprobs is not None for decode in batch.decodes):
            return
        own, after = StageClock(self.batches.device), batch.after(decoded.accepted)
        with own.stage("verify"):
            verified = self.verifier.verify(after, root_alone(after.verified_id, after.seq_lens))
        requests = [(decode.req_pool_index, decode.seq_len + 1) for decode in batch.decodes]
        self._verified.put(verified, requests, len(after.seq_lens_host), own)

    def _take_verified(self, batch: DecodeBatch, clock: StageClock) -> Verified | None:
        """The verify forward of the roots, if it has run for these requests."""
        requests = [(decode.req_pool_index, decode.seq_len) for decode in batch.decodes]
        return self._verified.take(requests, len(batch.seq_lens_host), clock)

    def _record(self, batch: DecodeBatch, tree: Tree, verified: Verified, accepted: Accepted) -> None:
        """Record the accepted tokens for the next draft-extend, each with its parent node's feature."""
        if not self.drafter.uses_features:
            return
        starts = [(decode.req_pool_index, decode.seq_len) for decode in batch.decodes]
        batch.accepted_tokens.record_paths(starts, batch.req_pool_indices, tree, accepted, verified.features)

    def _prefill(self, chunks: tuple[Chunk, ...]) -> Drawn:
        """Prompt chunks through target and drafter. The last chunk of a prompt samples the first output token."""
        batch = self.batches.prefill(chunks)
        prefilled = self.verifier.prefill(batch, chunks)
        device = prefilled.logits.device
        last = [i for i, chunk in enumerate(chunks) if chunk.next_token is None]
        logit_ends, row_ends = list(accumulate(prefilled.logit_rows)), list(accumulate(batch.counts))
        ends = [logit_ends[i] - 1 for i in last]
        positions = upload([chunks[i].start + len(chunks[i].tokens) for i in last], device)
        last_chunks = [chunks[i] for i in last]
        sampling = VerifyTokenMask.of(last_chunks, device).sampling(self.batches.prompt_sampling(last_chunks))
        logits = prefilled.logits.index_select(0, upload(ends, device))[:, None]
        tokens, scores = draw(logits, positions[:, None], sampling)
        uses_features = self.drafter.uses_features
        prompts = (chunks, batch, prefilled.features if uses_features else None)
        if self.overlaps or device.type != "cpu":  # the device works while the host reads the results
            self.drafter.prefill(self.batches.prompts(*prompts))
        else:
            self._prompts = prompts
        if uses_features:
            starts = [(chunk.req_pool_index, chunk.start + len(chunk.tokens) - 1) for chunk in last_chunks]
            indices = upload([chunk.req_pool_index for chunk in last_chunks], device)
            newest = upload([row_ends[i] - 1 for i in last], device)
            features = prefilled.features.index_select(0, newest)[:, None]
            self.batches.accepted_tokens.record(starts, indices, tokens, features)
        return Drawn(prefilled.logits, prefilled.logit_rows, tokens, scores.isfinite())
