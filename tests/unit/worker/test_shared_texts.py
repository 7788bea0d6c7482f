"""What other requests wrote: found by its context, never across texts, in bounded memory."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from eagle_server.worker.drafters.ngram.drafter import NgramTries
from eagle_server.worker.drafters.ngram.shared_texts import SharedTexts, blended
from eagle_server.worker.drafters.ngram.suffix_automaton import Trie
from tests.unit.worker.test_ngram_tries import scheduled

STEPS = 4


def shared(*texts: Sequence[int], capacity: int = 1000) -> SharedTexts:
    memory = SharedTexts(capacity, STEPS)
    for text in texts:
        memory.add(text)
    return memory


def paths(trie: Trie) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(trie.tokens, trie.parents, strict=True):
        assert parent < len(found), "parents come first"
        found.append((*found[parent], token))
    return found[1:]


def test_a_text_goes_on_as_others_did() -> None:
    memory = shared([1, 2, 3, 4, 5, 6, 7], [9, 2, 3, 8])
    trie = memory.continuations([1, 2, 3], 8)
    assert trie.context == 3
    assert paths(trie)[0] == (4,), "the longer context is believed"
    assert set(paths(trie)) == {(4,), (4, 5), (4, 5, 6), (4, 5, 6, 7), (8,)}
    assert paths(memory.continuations([1, 2, 3], 1)) == [(4,)]
    assert memory.continuations([3, 1], 8) == memory.continuations([3], 8) == Trie([], [], [])


def test_nothing_is_found_across_texts() -> None:
    memory = shared([1, 2, 3], [4, 5, 6])
    assert memory.continuations([3, 4], 8) == Trie([], [], [])
    assert paths(memory.continuations([1, 2], 8)) == [(3,)]


def test_pieces_of_one_text_are_read_as_one() -> None:
    text, memory = [1, 2, 3, 4, 5, 6, 7, 8], SharedTexts(1000, STEPS)
    memory.add(text[:4])
    memory.add(text, known=4)
    for end in (2, 4, 6):
        assert (text[end],) in paths(memory.continuations(text[:end], 8))
    assert memory.continuations([0, 3, 4], 8).context == 2


@pytest.mark.parametrize("capacity", [1, 50, 64])
def test_the_newest_texts_are_kept_and_memory_is_bounded(capacity: int) -> None:
    draw, memory = random.Random(0), SharedTexts(capacity, STEPS)
    sizes = [len(each) for each in (memory._tokens, memory._before, memory._newest)]
    for number in range(200):
        memory.add([100 + number, *(draw.randrange(5) for _ in range(draw.randrange(30)))])
        trie = memory.continuations([draw.randrange(5) for _ in range(20)], 6)
        assert len(paths(trie)) <= 6
        assert len(set(paths(trie))) == len(trie.tokens)
        assert all(0 < estimate < 1 for estimate in trie.estimates)
    assert sizes == [len(each) for each in (memory._tokens, memory._before, memory._newest)]
    memory.add([7, 8, 9])
    assert paths(memory.continuations([7, 8], 4)) == ([(9,)] if capacity > 1 else [])
    for _ in range(capacity):
        memory.add([1])
    assert memory.continuations([7, 8], 4) == Trie([], [], []), "forgotten"


def test_a_blend_asks_the_longer_context_first_and_the_own_text_at_equal_length() -> None:
    own, other = Trie([1, 2], [0, 1], [0.6, 0.5], context=2), Trie([1, 3, 4], [0, 0, 2], [0.5, 0.4, 0.9], context=2)
    trie = blended(own, other, 4)
    assert paths(trie) == [(1,), (1, 2), (3,), (3, 4)]
    assert trie.estimates == pytest.approx([0.6 + 0.4 * 0.5, 0.5, 0.4 * 0.4, 0.9])
    longer = blended(own, Trie(other.tokens, other.parents, other.estimates, context=5), 2)
    assert paths(longer) == [(1,), (3,)]
    assert longer.estimates == pytest.approx([0.5 + 0.1 * 0.6, 0.4])
    assert longer.context == 5
    nothing = Trie([], [], [])
    assert blended(own, nothing, 4) is own
    assert blended(nothing, other, 4) is other


def test_requests_read_what_others_wrote_finished_or_running() -> None:
    tries = NgramTries(STEPS, 7, SharedTexts(1000, STEPS))
    short, long = [1, 2, 3, 4, 5], [20, *range(100, 170)]
    tries.trie_of(scheduled(0, short))
    tries.trie_of(scheduled(1, long))
    assert paths(tries.trie_of(scheduled(2, [100, 101])))[0] == (102,), "a running request's prompt"
    assert not tries.trie_of(scheduled(3, [2, 3])).tokens, "too little to tell while it runs"
    short.append(6)
    tries.forget(0)
    assert paths(tries.trie_of(scheduled(3, [4, 5])))[0] == (6,), "to its end"
    salted = replace(scheduled(4, [200, 201, 202]), shares_text=False)
    assert not tries.trie_of(replace(scheduled(5, [100, 101]), shares_text=False)).tokens, "it reads no other text"
    tries.trie_of(salted)
    tries.forget(4)
    assert not tries.trie_of(scheduled(2, [200, 201])).tokens, "and no other reads its text"
    alone = NgramTries(STEPS, 7)
    alone.trie_of(scheduled(1, long))
    assert not alone.trie_of(scheduled(2, [100, 101])).tokens
