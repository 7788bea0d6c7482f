"""The cycle: extend, propose, build the tree, verify, accept, keep."""

from __future__ import annotations

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
from eagle_server.worker.output_processing import Decoded, Drawn, emit
from eagle_server.worker.verifier import Verified, Verifier
from eagle_server.worker.verify_token_mask import VerifyTokenMask


class Worker:
    """Runs plans. Owns nothing of a request but what its drafter has yet to see."""

    def __init__(self, verifier: Verifier, drafter: Drafter[Any], batches: Batches, acceptance: Acceptance) -> None:
        self.verifier, self.drafter, self.batches, self.acceptance = verifier, drafter, batches, acceptance

    @torch.inference_mode()
    def run(self, plan: CyclePlan) -> CycleResult:
        """One cycle: every decoding request emits at least one token, every chunk advances its prompt.

        The device works ahead of the host until `emit` copies what was accepted; with grammars the host follows the
        trees in between, as they grow (`batch.token_mask`) and while they are verified.
        """
        clock = StageClock(self.batches.device)
        batch = self.batches.begin(plan)
        for row in plan.released:
            self.drafter.forget(row)
        decoded = drawn = None
        if batch is not None:
            with clock.stage("extend"):
                draft = self.drafter.extend(batch)
            with clock.stage("propose"):
                candidates = self.drafter.propose(draft, batch)
            with clock.stage("build_tree"):
                tree = build_tree(candidates, batch.verified_id, batch.seq_lens, batch.speculation_disabled)
            with clock.stage("verify"):
                constrained = VerifyTokenMask.of(batch.decodes, self.batches.device, tree)
                verified = self.verifier.verify(batch, tree)
            with clock.stage("accept"):
                sampling = constrained.sampling(batch.sampling)
                accepted = self.acceptance.accept(tree, verified.logits, sampling)
                self.drafter.observe(batch, tree, accepted)
            with clock.stage("keep"):
                self.verifier.keep(batch, tree, accepted)
                self._leave(batch, tree, verified, accepted)
            decoded = Decoded(verified.logits, accepted, tree)
        if plan.chunks:
            with clock.stage("prefill"):
                drawn = self._prefill(plan.chunks)
        with clock.stage("emit"):
            prefilled, emitted = emit(plan, decoded, drawn)
        if self.drafter.feeds:
            for decode, each in zip(plan.decodes, emitted, strict=True):
                self.batches.carry.counts[decode.row] = len(each.tokens)
        return CycleResult(prefilled, emitted, clock.seconds())

    def _leave(self, batch: DecodeBatch, tree: EagleVerifyInput, verified: Verified, accepted: Accepted) -> None:
        """Leave the accepted tokens for the drafter, each with its parent node's feature."""
        if not self.drafter.feeds:
            return
        nodes = accepted.path.clamp(min=0) + tree.retrive_index[:, :1]
        features = verified.features.index_select(0, nodes.view(-1)).unflatten(0, nodes.shape)
        batch.carry.put(batch.rows, accepted.tokens.clamp(min=0), features)

    def _prefill(self, chunks: tuple[Chunk, ...]) -> Drawn:
        """Prompt chunks through target and drafter; the last one of a prompt draws its next token."""
        batch = self.batches.prefill(chunks)
        done = self.verifier.prefill(batch, chunks)
        device = done.logits.device
        last = [i for i, chunk in enumerate(chunks) if chunk.next_token is None]
        ends = [sum(done.logit_rows[: i + 1]) - 1 for i in last]
        positions = upload([chunks[i].start + len(chunks[i].tokens) for i in last], device)
        turns = [chunks[i] for i in last]
        sampling = VerifyTokenMask.of(turns, device).sampling(self.batches.prompt_sampling(turns))
        logits = done.logits.index_select(0, upload(ends, device))[:, None]
        tokens, scores = draw(logits, positions[:, None], sampling)
        if self.drafter.feeds:
            self.drafter.prefill(Prompts(batch, self.batches.prompt_features(chunks, done.features)))
            rows = upload([chunks[i].row for i in last], device)
            newest = upload([sum(batch.counts[: i + 1]) - 1 for i in last], device)
            self.batches.carry.put(rows, tokens, done.features.index_select(0, newest)[:, None])
            self.batches.carry.counts.update((chunks[i].row, 1) for i in last)
        return Drawn(done.logits, done.logit_rows, tokens, scores.isfinite())
