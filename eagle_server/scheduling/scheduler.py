"""The scheduler plans each cycle: admission, chunked prefill, preemption, and commit of the results.

Clients take turns (`admission.py`), and requests are served in order of arrival, with exceptions in `make_chunks`.
Prompt KV goes to the prefix cache chunk by chunk, so that running requests share it. When KV runs out, or another
client waits with less than its share, the newest request of the client that runs most is preempted: its computed KV
goes to the prefix cache and its pages are freed. Later it resumes as a prompt of all its tokens. Random numbers are
keyed by position, so a preemption does not change the output.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from msgspec.structs import replace

from eagle_server.cache.manager import KVCacheManager
from eagle_server.plan import Chunk, CyclePlan, CycleResult, GrammarMatcher, RequestSampling, SequenceOutput
from eagle_server.request import CycleStats, FinishReason, Request, SpecStats, TokenDelta
from eagle_server.scheduling.admission import RequestQueue, SchedulerLimits, remove
from eagle_server.scheduling.checkpoints import save_decoding
from eagle_server.scheduling.sequence import Sequence, make_chunks

# Slots that a request gets beyond those of its next cycle: the page table then changes in one of about 15 cycles. Each
# change is an upload to the device, 0.3 ms of host time in a profile on an H100 (docs/gpu.md).
SPARE_SLOTS = 64


@dataclass
class SchedulerTotals:
    """Counters since the start."""

    cycles: int = 0
    generated: int = 0
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0


class Scheduler:
    """Owns the sequences: `waiting`, in the order of their turns, and `running` (prefilling or decoding), by arrival.

    `cycle` has the statistics of the newest plan and its result. The engine adds the times.
    """

    def __init__(self, limits: SchedulerLimits, kv: KVCacheManager) -> None:
        self.limits, self.kv = limits, kv
        self.queue = RequestQueue(limits, kv)
        self.running: list[Sequence] = []
        self.totals = SchedulerTotals()
        self.cycle = CycleStats()
        self._arrivals = 0
        self._sequences: dict[str, Sequence] = {}  # waiting and running
        self._released: list[int] = []
        self._planned: tuple[CyclePlan, list[Sequence], list[Sequence]] = (CyclePlan(), [], [])

    @property
    def waiting(self) -> Seq[Sequence]:
        """The requests that have no KV, in the order in which they start."""
        return list(self.queue.in_order())

    def has_work(self) -> bool:
        return bool(self.queue.since or self.running)

    def refusal(self, request: Request) -> str | None:
        """The reason why a request can never be served; None if it can."""
        tokens, sampling = len(request.prompt_token_ids), request.sampling
        if tokens == 0:
            return "the prompt is empty"
        if tokens + sampling.max_tokens > self.limits.context_length:
            return (
                f"{tokens} prompt tokens and max_tokens {sampling.max_tokens} exceed the context length "
                f"of {self.limits.context_length}"
            )
        needed = self.kv.pages_for(tokens + sampling.max_tokens + self.limits.num_lookahead_slots)
        if needed > self.kv.allocator.num_pages:
            return (
                f"the request needs {needed * self.kv.page_size} KV slots and the pool has "
                f"{self.kv.allocator.num_pages * self.kv.page_size}; raise --max-total-tokens"
            )
        return None

    def add(
        self,
        request: Request,
        sampling: RequestSampling,
        stop_ids: frozenset[int],
        grammar_matcher: GrammarMatcher | None = None,
    ) -> None:
        """Queue a request for which `refusal` returns None."""
        self._arrivals += 1
        tokens = list(request.prompt_token_ids)
        lossy = self.limits.lossy if sampling.params.temperature > 0 else None
        spec = SpecStats(histogram=[0] * (self.limits.steps + 1), lossy=lossy)
        sequence = Sequence(request, sampling, stop_ids, self._arrivals, tokens, spec, grammar_matcher)
        if request.began is not None:
            sequence.times.queued = request.began
        self._sequences[request.request_id] = sequence
        self.queue.add(sequence)

    def abort(self, request_id: str) -> TokenDelta | None:
        """End a waiting or running request; None if there is no such request."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return None
        if sequence.output_length:  # perhaps the API has found a stop string
            self.queue.growth.ended(sequence.output_length, sequence.request.sampling.max_tokens)
        return self._finish(sequence, [], FinishReason.ABORT)

    def schedule(self) -> CyclePlan:
        """The next cycle's plan. Decodes get KV first, so that they run in every cycle beside chunked prefill."""
        self.cycle = CycleStats()
        for sequence in self.queue.to_preempt(self.running) if self.queue.since else ():
            self._preempt(sequence)
        given_way = self.cycle.preemptions
        decoding = self._grow_decodes()
        is_short = self.cycle.preemptions > given_way  # of KV: admitted requests would lose theirs, too
        if self.queue.since and not is_short:
            self.queue.admit(self.running)
        prefilling = [sequence for sequence in self.running if sequence.prefilling]
        chunks = make_chunks(prefilling, self.limits.chunked_prefill_size)
        moves = self.kv.take_moves()
        if self.limits.checkpoint_interval:
            chunks = [(sequence, self._with_saves(sequence, chunk)) for sequence, chunk in chunks]
        self.cycle.computed = sum(len(chunk.tokens) for _, chunk in chunks)
        released, self._released = tuple(self._released), []
        plan = CyclePlan(
            tuple(chunk for _, chunk in chunks), tuple(sequence.decode() for sequence in decoding), released, moves
        )
        self._planned = (plan, [sequence for sequence, _ in chunks], decoding)
        return plan

    def commit(self, result: CycleResult) -> list[TokenDelta]:
        """Add the result of the newest plan to its sequences. Returns a delta for each request with new output."""
        plan, chunked, decoding = self._planned
        self.totals.cycles += 1
        deltas = []
        draft_computed = result.draft_computed_tokens or [sequence.num_computed_tokens for sequence in decoding]
        for sequence, output, computed in zip(decoding, result.decodes, draft_computed, strict=True):
            before, after = sequence.num_computed_tokens, sequence.num_computed_tokens + len(output.tokens)
            self._advance(sequence, after, computed)
            sequence.state_from = after if result.settled else before
            deltas.append(self._append(sequence, output, decoded=True))
            if self.limits.checkpoint_interval:
                save_decoding(sequence, self.kv, lags=self.limits.uses_features)
        for sequence, chunk, output in zip(chunked, plan.chunks, result.chunks, strict=True):
            # The drafter reads a chunk before the next forwards, up to the last token whose next token is known.
            self._advance(sequence, chunk.end, chunk.start + len(chunk.following))
            sequence.state_from = sequence.num_computed_tokens
            sequence.prompt_logprobs.extend(output.prompt_logprobs)
            if output.failed is None:
                self._publish(sequence)
            if not sequence.prefilling:
                self._count_prefill(sequence)
                deltas.append(self._append(sequence, output, decoded=False))
        return deltas

    def _with_saves(self, sequence: Sequence, chunk: Chunk) -> Chunk:
        """The chunk, with checkpoints for the states at some lengths that it reaches."""
        assert sequence.allocation is not None
        reached = [length for length in sequence.checkpoints if 0 < length - chunk.start <= len(chunk.tokens)]
        saves = [self.kv.save_state(sequence.allocation, length) for length in reached]
        return dataclasses.replace(chunk, saves=tuple(save for save in saves if save is not None))

    def _publish(self, sequence: Sequence) -> None:
        """Share the KV of the prompt's chunks. Slots below draft_computed_tokens are never written again."""
        assert sequence.allocation is not None
        done = not sequence.prefilling
        self.kv.publish(sequence.allocation, sequence.tokens, sequence.draft_computed_tokens, proven=done)
        if done:
            sequence.keys = None
        self.queue.changed |= sequence.followed

    def _count_prefill(self, sequence: Sequence) -> None:
        """Count a finished prefill. The prefill of a resumed request is not counted again."""
        if sequence.times.prefilled is not None:
            return
        sequence.times.prefilled = time.monotonic()
        self.cycle.prompt_tokens += sequence.prompt_length
        if self.kv.radix is not None and not sequence.request.prompt_logprobs:
            self.cycle.cache_queries += sequence.prompt_length
            self.cycle.cache_hits += sequence.cached_tokens

    def _advance(self, sequence: Sequence, num_computed_tokens: int, draft_computed_tokens: int) -> None:
        """Target KV now holds `num_computed_tokens`. `draft_computed_tokens`: what a drafter with KV has computed."""
        sequence.num_computed_tokens = num_computed_tokens
        sequence.draft_computed_tokens = draft_computed_tokens if self.limits.uses_features else num_computed_tokens

    def _grow_decodes(self) -> list[Sequence]:
        """Allocate the window of every decoding sequence; preempt others when KV runs out. Returns the rest."""
        decoding: list[Sequence] = []
        window = self.limits.num_lookahead_slots
        ready = [s for s in self.running if not s.prefilling and s.is_ready]
        if all(self.kv.use(s.allocation, s.num_computed_tokens + window) for s in ready if s.allocation):
            return ready
        # If one needs pages, all get some, so that the page table seldom changes. What has none was preempted.
        for sequence in ready:
            spare = min(SPARE_SLOTS, sequence.most_tokens - sequence.num_computed_tokens)
            while sequence.allocation is not None:
                if self.kv.grow(sequence.allocation, sequence.num_computed_tokens + window, spare):
                    decoding.append(sequence)
                    break
                self._preempt(self._newest())
                self.queue.growth.preempted()
        return [sequence for sequence in decoding if sequence.allocation is not None]

    def _newest(self) -> Sequence:
        """The newest running request of the client that runs most. If several clients do: the newest of them all."""
        held = Counter(sequence.request.client for sequence in self.running)
        most = max(held.values())
        return next(sequence for sequence in reversed(self.running) if held[sequence.request.client] == most)

    def _preempt(self, sequence: Sequence) -> None:
        self.totals.preemptions += 1
        self.cycle.preemptions += 1
        self._release(sequence)
        sequence.prompt_logprobs.clear()
        sequence.is_resumed = True
        self.queue.add(sequence)

    def _release(self, sequence: Sequence, *, cache: bool = True) -> None:
        """Free the KV allocation. KV that both target and draft have computed goes to the prefix cache."""
        assert sequence.allocation is not None
        remove(self.running, sequence)
        self.queue.changed = True
        self._released.append(sequence.req_pool_index)
        state_from = sequence.state_from if self.limits.checkpoint_interval else None
        written = sequence.draft_computed_tokens
        self.kv.release(sequence.allocation, sequence.tokens, written, suspect=not cache, state_from=state_from)
        sequence.allocation = sequence.keys = None
        sequence.num_computed_tokens = sequence.draft_computed_tokens = sequence.state_from = 0
        sequence.checkpoints = []

    def _append(self, sequence: Sequence, output: SequenceOutput, *, decoded: bool) -> TokenDelta:
        """Append the output's tokens up to the first that ends the sequence, and count them."""
        tokens, reason = sequence.append(output.tokens)
        failed, drafted, count, totals = output.failed, output.drafted, len(tokens), self.totals
        if failed is not None and not count:
            reason = None  # a failure is not a length of zero
        sequence.allow_ends()
        totals.generated += count
        accepted = min(count, len(output.tokens) - (failed is None)) if drafted else 0
        if decoded:
            self.cycle.verified.append((drafted, accepted))
        if decoded and drafted:
            spec = sequence.spec
            spec.histogram[accepted] += 1
            spec.drafted += drafted
            totals.accepted += accepted
            totals.drafted += drafted
        if reason is not None:
            self.queue.growth.ended(sequence.output_length, sequence.request.sampling.max_tokens)
            return self._finish(sequence, tokens, reason, output=output)
        if failed is not None:
            return self._finish(sequence, tokens, failed.reason, output=output, error=failed.message, cache=False)
        return self._delta(sequence, tokens, output)

    def _finish(
        self,
        sequence: Sequence,
        tokens: list[int],
        reason: FinishReason,
        *,
        output: SequenceOutput | None = None,
        error: str | None = None,
        cache: bool = True,
    ) -> TokenDelta:
        if sequence.allocation is not None:
            self._release(sequence, cache=cache)
        else:
            self.queue.remove(sequence)
        self._sequences.pop(sequence.request.request_id, None)
        delta = self._delta(sequence, tokens, output or SequenceOutput())
        delta.finish_reason, delta.error = reason, error
        delta.spec = sequence.spec if sequence.spec.cycles else None
        delta.timing = sequence.times.timing()
        return delta

    def _delta(self, sequence: Sequence, tokens: list[int], output: SequenceOutput) -> TokenDelta:
        request, prompt_logprobs, tree = sequence.request, None, output.tree
        if request.prompt_logprobs and sequence.prompt_logprobs:
            prompt_logprobs, sequence.prompt_logprobs = sequence.prompt_logprobs, []
        if tree is not None:
            tree = replace(tree.cut(len(tokens)), seconds=sequence.times.decode)
        return TokenDelta(
            request_id=request.request_id,
            token_ids=tokens,
            logprobs=None if request.sampling.logprobs is None else list(output.logprobs[: len(tokens)]),
            prompt_logprobs=prompt_logprobs,
            cached_tokens=sequence.cached_tokens,
            tree=tree,
        )
