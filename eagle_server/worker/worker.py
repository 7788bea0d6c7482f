"""The cycle: extend, propose, build the tree, verify, accept, keep."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from eagle_server.plan import Chunk, CyclePlan, CycleResult, Decode, Emitted
from eagle_server.request import TokenLogprob
from eagle_server.speculation.accept import Accepted, accept
from eagle_server.speculation.sampling import SamplingBatch, draw
from eagle_server.speculation.tree import EagleVerifyInput, build_tree
from eagle_server.worker.batch import Batches, Pending
from eagle_server.worker.drafters.interface import Drafter
from eagle_server.worker.host import host_tensor, logprobs_to_host, to_host
from eagle_server.worker.verifier import Verified, Verifier

NOT_FINITE = "the model's logits are not finite (NaN or inf); its weights or the prompt's numerics are broken"


class Worker:
    """Runs plans. Owns nothing of a request but what its drafter has yet to see."""

    def __init__(self, verifier: Verifier, drafter: Drafter[Any], batches: Batches) -> None:
        self.verifier, self.drafter, self.batches = verifier, drafter, batches
        self._stages: dict[str, float] = {}

    @torch.inference_mode()
    def run(self, plan: CyclePlan) -> CycleResult:
        """One cycle: every decoding request emits at least one token, every chunk advances its prompt."""
        self._stages = {}
        self.batches.begin(plan)
        batch = self.batches.decode(plan.decodes) if plan.decodes else None
        decoded: tuple[Emitted, ...] = ()
        with self._stage("extend"):
            draft = self.drafter.extend(self.batches.extend(plan), batch)
        if batch is not None:
            with self._stage("propose"):
                candidates = self.drafter.propose(draft, batch)
            with self._stage("build_tree"):
                tree = build_tree(candidates, batch.verified_id, batch.seq_lens)
            with self._stage("verify"):
                verified = self.verifier.verify(batch, tree)
            with self._stage("accept"):
                accepted = accept(tree, verified.logits, batch.sampling)
            with self._stage("keep"):
                self.verifier.keep(batch, tree, accepted)
                decoded = self._emit(plan.decodes, tree, verified, accepted)
        with self._stage("prefill"):
            prefilled = self._prefill(plan.chunks) if plan.chunks else ()
        return CycleResult(prefilled, decoded, self._stages)

    def _emit(
        self, decodes: tuple[Decode, ...], tree: EagleVerifyInput, verified: Verified, accepted: Accepted
    ) -> tuple[Emitted, ...]:
        """Read the accepted tokens, and leave them pending for the drafter with their nodes' features."""
        paths, tokens, finite = to_host(accepted.path, accepted.tokens, accepted.finite)
        size = tree.draft_token_num
        taken = [[node + r * size for node in path if node >= 0] for r, path in enumerate(paths)]
        if self.drafter.feeds:
            device, counts = verified.features.device, [len(rows) for rows in taken]
            nodes = host_tensor([node for rows in taken for node in rows], device)
            features = verified.features.index_select(0, nodes).split(counts)
            flat = host_tensor([token for drawn, n in zip(tokens, counts, strict=True) for token in drawn[:n]], device)
            emitted = flat.split(counts)
            for d, f, t in zip(decodes, features, emitted, strict=True):
                self.batches.pending[d.row] = Pending(d.seq_len, t, f)
        out = []
        for d, rows, drawn, ok in zip(decodes, taken, tokens, finite, strict=True):
            kept = drawn[: len(rows)]
            logprobs: tuple[TokenLogprob, ...] = ()
            if d.sampling.logprobs is not None:
                index = host_tensor(rows, verified.logits.device)
                picked = host_tensor(kept, index.device)
                logprobs = logprobs_to_host(verified.logits[index], picked, d.sampling.logprobs)
            out.append(Emitted(tuple(kept), size - 1, logprobs, failed=None if ok else NOT_FINITE))
        return tuple(out)

    def _prefill(self, chunks: tuple[Chunk, ...]) -> tuple[Emitted, ...]:
        """Prompt chunks: the last one of a prompt draws its next token. All rows stay pending for the drafter."""
        batch = self.batches.prefill(chunks)
        done = self.verifier.prefill(batch, chunks)
        out: list[Emitted] = []
        logits = done.logits.split(done.logit_rows)
        for chunk, rows, features in zip(chunks, logits, done.features.split(batch.counts), strict=True):
            emitted = self._first_token(chunk, rows) if chunk.next_token is None else Emitted()
            following = chunk.next_token if chunk.next_token is not None else emitted.tokens[0]
            if chunk.prompt_logprobs:
                emitted = _with_prompt_logprobs(emitted, chunk, rows)
            out.append(emitted)
            if self.drafter.feeds:
                shifted = host_tensor([*chunk.tokens[1:], following], features.device)
                self.batches.pending[chunk.row] = Pending(chunk.start, shifted, features)
        return tuple(out)

    def _first_token(self, chunk: Chunk, logits: torch.Tensor) -> Emitted:
        position = host_tensor([chunk.start + len(chunk.tokens)], logits.device)
        sampling = SamplingBatch.of([chunk.sampling], logits.device)
        drawn, scores = draw(logits[None, -1:], position[None], sampling)
        ((token,),), ((finite,),) = to_host(drawn, scores.isfinite())
        logprobs: tuple[TokenLogprob, ...] = ()
        if chunk.sampling.logprobs is not None:
            logprobs = logprobs_to_host(logits[-1:], drawn[0], chunk.sampling.logprobs)
        return Emitted((token,), 0, logprobs, failed=None if finite else NOT_FINITE)

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._stages[name] = self._stages.get(name, 0.0) + time.perf_counter() - start


def _with_prompt_logprobs(emitted: Emitted, chunk: Chunk, logits: torch.Tensor) -> Emitted:
    """Log-probabilities of the prompt tokens that follow this chunk's rows."""
    following = [*chunk.tokens[1:], *([] if chunk.next_token is None else [chunk.next_token])]
    tokens = host_tensor(following, logits.device)
    entries = logprobs_to_host(logits[: len(following)], tokens, chunk.sampling.logprobs or 0)
    return Emitted(emitted.tokens, 0, emitted.logprobs, entries, emitted.failed)
