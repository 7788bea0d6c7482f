"""The suffix automaton against counting by hand, and the tries that it proposes."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable, Iterable, Sequence
from heapq import nlargest
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_server.worker.drafters.ngram import suffix_automaton
from eagle_server.worker.drafters.ngram.suffix_automaton import LONGEST, SHORTEST, SuffixAutomaton, Trie

STEPS = 3
texts = st.lists(st.integers(0, 2), max_size=60) | st.lists(st.sampled_from([0, 0, 0, 0, 1]), max_size=60)


def automaton(tokens: Sequence[int], steps: int = STEPS) -> SuffixAutomaton:
    grown = SuffixAutomaton(steps)
    grown.extend(tokens)
    return grown


def occurrences(tokens: Sequence[int], part: Sequence[int]) -> int:
    return sum(list(tokens[i : i + len(part)]) == list(part) for i in range(len(tokens) - len(part) + 1))


def path(trie: Trie, node: int) -> list[int]:
    """Tokens from the root to a node."""
    return [] if node == 0 else [*path(trie, trie.parents[node - 1]), trie.tokens[node - 1]]


@settings(max_examples=60, deadline=None)
@given(texts)
def test_counts_are_those_of_every_substring_after_every_token(tokens: list[int]) -> None:
    grown = SuffixAutomaton(STEPS)
    for end in range(1, len(tokens) + 1):
        grown.extend(tokens[end - 1 : end])
        so_far = tokens[:end]
        for start in range(max(0, end - LONGEST - STEPS), end):
            assert grown.count(so_far[start:]) == occurrences(so_far, so_far[start:])
    parts = {tuple(tokens[i : i + n]) for n in range(1, LONGEST + STEPS + 1) for i in range(len(tokens) - n + 1)}
    assert all(grown.count(part) == occurrences(tokens, part) for part in parts)
    assert grown.count([7]) == 0


@settings(max_examples=60, deadline=None)
@given(texts)
def test_the_match_is_the_longest_suffix_that_occurred_before(tokens: list[int]) -> None:
    longest = max((n for n in range(1, len(tokens)) if occurrences(tokens, tokens[-n:]) > 1), default=0)
    grown = automaton(tokens)
    assert grown.match()[1] == min(longest, LONGEST)


@settings(max_examples=100, deadline=None)
@given(texts, texts)
def test_a_tail_of_another_text_matches_its_longest_suffix_that_occurs(tokens: list[int], tail: list[int]) -> None:
    tail = tail[-LONGEST:]
    grown = automaton(tokens)
    state, length = grown.match_of(tail)
    assert length == max((n for n in range(1, len(tail) + 1) if occurrences(tokens, tail[-n:])), default=0)
    if length:
        assert grown._count[state] == occurrences(tokens, tail[-length:])
        following = {
            tokens[i + length] for i in range(len(tokens) - length) if tokens[i : i + length] == tail[-length:]
        }
        assert set(grown._successors(state)) == following


@settings(max_examples=60, deadline=None)
@given(texts)
def test_what_follows_a_state_adds_up_to_its_count_less_the_end(tokens: list[int]) -> None:
    """So a trie needs no sum over a state's successors, of which there may be as many as tokens."""
    grown = automaton(tokens)
    ends = grown._suffixes()
    for start in range(len(tokens)):
        for length in range(1, min(LONGEST + STEPS, len(tokens) - start + 1)):
            state, _ = grown.match_of(tokens[start : start + length])
            follow = sum(grown._count[to] for to in grown._successors(state).values())
            assert follow == grown._count[state] - (state in ends)


def test_a_token_that_thousands_of_others_followed_is_continued_by_comparing_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = [token for other in range(10, 5000) for token in ((5, 7) if other % 3 == 0 else (5, other))]
    grown, compared = automaton([*text, 5]), list[int]()

    def counted(count: int, tokens: Iterable[int], key: Callable[[int], Any]) -> list[int]:
        given = list(tokens)
        compared.append(len(given))
        return nlargest(count, given, key=key)

    monkeypatch.setattr(suffix_automaton, "nlargest", counted)
    trie = grown.continuations(12)
    assert trie.tokens[0] == 7
    assert 0 < max(compared) <= 1024


def test_a_token_takes_less_than_a_quarter_kilobyte() -> None:
    """A text in which nearly every token starts a new state, over a large vocabulary."""
    source = random.Random(0)
    text = [source.randrange(50_000) for _ in range(20_000)]
    tracemalloc.start()
    grown = automaton(text)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown.length == len(text)
    assert taken < 250 * len(text)


@settings(max_examples=100, deadline=None)
@given(texts, st.integers(0, 12))
def test_a_trie_holds_continuations_parents_first_within_budget_and_depth(tokens: list[int], budget: int) -> None:
    trie = automaton(tokens).continuations(budget)
    assert len(trie.tokens) == len(trie.parents) == len(trie.estimates) <= budget
    assert all(0 <= parent <= i for i, parent in enumerate(trie.parents))
    assert len({*zip(trie.parents, trie.tokens, strict=True)}) == len(trie.tokens), "siblings differ"
    chances = [1.0]
    for i, (parent, estimate) in enumerate(zip(trie.parents, trie.estimates, strict=True)):
        assert 0 < estimate < 1
        chances.append(chances[parent] * estimate)
        drafted = path(trie, i + 1)
        assert len(drafted) <= STEPS
        # It follows a suffix of what stands before it, of SHORTEST tokens at least.
        context = [*tokens, *drafted[:-1]][-SHORTEST:]
        assert occurrences(tokens, [*context, drafted[-1]]) > 0
    assert chances[1:] == sorted(chances[1:], reverse=True), "the best come first"
    for parent in range(len(trie.tokens) + 1):
        children = [e for e, p in zip(trie.estimates, trie.parents, strict=True) if p == parent]
        assert sum(children) < 1 + 1e-9


def test_a_text_that_never_repeated_itself_proposes_nothing() -> None:
    assert automaton(range(50)).continuations(8) == Trie([], [], [])
    assert automaton([]).continuations(8) == Trie([], [], [])


def test_a_longer_match_outweighs_what_followed_a_shorter_one() -> None:
    """After 1 2 3 came 4, once; after 2 3 came 9, twice. The text ends in 1 2 3."""
    text = [1, 2, 3, 4, 8, 2, 3, 9, 7, 2, 3, 9, 6, 1, 2, 3]
    trie = automaton(text).continuations(4)
    assert (trie.tokens[0], trie.parents[0]) == (4, 0)
    assert 9 in [token for token, parent in zip(trie.tokens, trie.parents, strict=True) if parent == 0]


def test_a_period_is_continued_past_the_end_of_the_text() -> None:
    trie = automaton([5, 6, 7] * 3, steps=8).continuations(8)
    assert path(trie, 8) == [5, 6, 7, 5, 6, 7, 5, 6]
    assert trie.estimates[0] > 0.8


@pytest.mark.parametrize("text", [[0] * 20_000, [0, 1] * 10_000], ids=["one token", "two in turn"])
def test_periodic_texts_cost_no_more_than_others(text: list[int]) -> None:
    """Quadratic growth would take minutes."""
    grown = automaton(text, steps=8)
    assert grown.count(text[:5]) > 9_000
    assert path(grown.continuations(8), 8) == text[:8]
