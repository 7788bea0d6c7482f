"""The lengths of a text at which the states of recurrent layers are saved, so that later texts continue from there."""

from __future__ import annotations

from bisect import bisect_right, insort

from eagle_server.cache.block_events import block_size_of
from eagle_server.cache.manager import LEAST_BETWEEN, KVCacheManager
from eagle_server.scheduling.sequence import Sequence

_BETWEEN_OUTPUTS = 64  # output tokens between copies; a copy costs about half a cycle's traffic of states


def prompt_checkpoints(prompt: tuple[int, int], cached: int, interval: int, page_size: int) -> list[int]:
    """Lengths of a prompt at which its state is saved, in order.

    They are: `cached`, the end of the prefix that other texts share; the last whole block of the prompt; and multiples
    of the interval. If two are close together, only the first is taken. The last block must be whole because the next
    turn of a conversation may leave out the last tokens, the generation prompt.

    Args:
        prompt: the tokens that are computed already, and all tokens.
    """
    start, length = prompt
    last, block = (length - 1) // page_size * page_size, block_size_of(page_size)
    lengths = [start]
    for wanted in (cached, last // block * block, *range(interval, length, interval)):
        if start < wanted <= last and all(abs(wanted - taken) >= LEAST_BETWEEN for taken in lengths[:3]):
            lengths.append(wanted)
    return sorted(lengths[1:])


def checkpoint_to_await(leader: Sequence, common: int, cached: int) -> int:
    """The last checkpoint that a prompt finds if it waits for `leader`, with which it shares `common` tokens.

    There is one at `cached` already. If none is near `common`, and the leader has not computed these tokens, the leader
    gets a checkpoint there.
    """
    after = bisect_right(leader.checkpoints, common)
    nearest = max(cached, leader.checkpoints[after - 1] if after else 0)
    if common - nearest < LEAST_BETWEEN or leader.num_computed_tokens >= common:
        return nearest
    insort(leader.checkpoints, common)
    return common


def save_decoding(sequence: Sequence, kv: KVCacheManager, *, lags: bool) -> None:
    """Copy the state of a decoding request now and then, near the end of the text that the prefix cache will have.

    Without `lags` and with pages of one token, the state at the request's end is the right one, and nothing is copied.
    `lags`: the draft's KV may be shorter than the target's; it is if the request did not draft. A copy is kept until
    the draft's KV reaches the next one.
    """
    allocation, page = sequence.allocation, kv.page_size
    if allocation is None or (page == 1 and not lags):
        return
    copies = sorted(length for length in allocation.checkpoints if length > sequence.num_prefill_tokens)
    newest = max([*copies, *sequence.checkpoints], default=sequence.num_prefill_tokens)
    if sequence.request.sampling.max_tokens - sequence.output_length == 1:  # the last token is not drafted
        length, between = sequence.draft_computed_tokens, LEAST_BETWEEN
    else:
        length, between = sequence.num_computed_tokens, _BETWEEN_OUTPUTS
    length = length // page * page
    if length < max(sequence.state_from, newest + between) or kv.checkpoints_are_short:
        return
    if not copies or newest <= sequence.draft_computed_tokens:
        for earlier in copies[:-1]:
            kv.give_up_state(allocation, earlier)
        kv.save_state_now(allocation, length)
