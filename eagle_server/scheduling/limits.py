"""What planning must know of the configuration and the drafter."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SchedulerLimits:
    """Limits of a cycle, and facts about the drafter that planning needs.

    Every decoding request has `num_lookahead_slots` KV slots after its text. `spec_steps` is the depth of the draft
    trees. `uses_features`: the drafter reads the target's features, one cycle later, and may write KV. `lossy` names
    the acceptance rule of sampled (not greedy) requests if it changes their distribution.
    """

    context_length: int
    max_running_requests: int
    chunked_prefill_size: int  # prompt tokens per cycle
    num_lookahead_slots: int
    spec_steps: int
    uses_features: bool
    lossy: str | None = None
