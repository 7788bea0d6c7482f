"""The cycle: extend, propose, build the tree, verify, accept, keep. Then the next chunks of incomplete prompts."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch

from eagle_server.ops.upload import upload
from eagle_server.plan import Chunk, CyclePlan, CycleResult
from eagle_server.speculation.accept import Acceptance, Accepted
from eagle_server.speculation.sampling import draw
from eagle_server.speculation.tree import EagleVerifyInput, build_tree
from eagle_server.worker.batch import Batches, DecodeBatch, Prompts
from eagle_server.worker.clock import StageClock
from eagle_server.worker.drafters.interface import Drafter
from eagle_server.worker.output_processing import Decoded, Drawn, process_outputs
from eagle_server.worker.verifier import Verified, Verifier
from eagle_server.worker.verify_token_mask import VerifyTokenMask


class Worker:
    """Runs cycles."""

    def __init__(self, verifier: Verifier, drafter: Drafter[Any], batches: Batches, acceptance: Acceptance) -> None:
        self.verifier, self.drafter, self.batches, self.acceptance = verifier, drafter, batches, acceptance

    @torch.inference_mode()
    def run(self, plan: CyclePlan) -> CycleResult:
        """One cycle: every decoding request gets at least one token, and every chunk advances its prompt.

        The device runs ahead of the host until `process_outputs` copies the results. With grammars the host also reads
        the trees in between: as they grow (`batch.ranking`) and while they are verified.
        """
        clock = StageClock(self.batches.device)
        batch = self.batches.begin(plan)
        for req_pool_index in plan.released:
            self.drafter.forget(req_pool_index)
        decoded = drawn = None
        if batch is not None:
            with clock.stage("extend"):
                state = self.drafter.extend(batch)
            with clock.stage("propose"):
                proposal = self.drafter.propose(state, batch)
            with clock.stage("build_tree"):
                tree = build_tree(proposal, batch.verified_id, batch.seq_lens, batch.speculation_disabled)
            with clock.stage("verify"):
                token_mask = VerifyTokenMask.of(batch.decodes, self.batches.device, tree)
                verified = self.verifier.verify(batch, tree)
            with clock.stage("accept"):
                tree, sampling = token_mask.masked(tree, batch.sampling)
                accepted = self.acceptance.accept(tree, verified.logits, sampling)
                self.drafter.observe(batch, tree, accepted)
            with clock.stage("keep"):
                self.verifier.keep(batch, tree, accepted)
                self._record(batch, tree, verified, accepted)
            decoded = Decoded(verified.logits, accepted, tree)
        if plan.chunks:
            with clock.stage("prefill"):
                drawn = self._prefill(plan.chunks)
        with clock.stage("emit"):
            chunks, decodes = process_outputs(plan, decoded, drawn)
        return CycleResult(chunks, decodes, clock.seconds())

    def _record(self, batch: DecodeBatch, tree: EagleVerifyInput, verified: Verified, accepted: Accepted) -> None:
        """Record the accepted tokens for the next draft-extend, each with its parent node's feature."""
        if not self.drafter.uses_features:
            return
        nodes = accepted.path.clamp(min=0) + tree.retrive_index[:, :1]
        features = verified.features.index_select(0, nodes.view(-1)).unflatten(0, nodes.shape)
        starts = ((decode.req_pool_index, decode.seq_len) for decode in batch.decodes)
        batch.accepted_tokens.record(starts, batch.req_pool_indices, accepted.tokens.clamp(min=0), features)

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
        pairs = self.batches.prompt_features(chunks, prefilled.features) if uses_features else None
        self.drafter.prefill(Prompts(chunks, batch, pairs))
        if uses_features:
            starts = [(chunk.req_pool_index, chunk.start + len(chunk.tokens) - 1) for chunk in last_chunks]
            indices = upload([chunk.req_pool_index for chunk in last_chunks], device)
            newest = upload([row_ends[i] - 1 for i in last], device)
            features = prefilled.features.index_select(0, newest)[:, None]
            self.batches.accepted_tokens.record(starts, indices, tokens, features)
        return Drawn(prefilled.logits, prefilled.logit_rows, tokens, scores.isfinite())
