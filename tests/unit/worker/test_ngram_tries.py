"""Whose text an automaton reads: requests grow, end, are preempted, and hand their rows on."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from eagle_server.plan import Chunk, Decode
from eagle_server.speculation.merge import estimates
from eagle_server.worker.batch.batch import DecodeBatch
from eagle_server.worker.drafters.ngram import drafter as ngram_drafter
from eagle_server.worker.drafters.ngram.drafter import _GROWTH, _PER_CYCLE, NgramDrafter, NgramTries, packed, trie_tree
from eagle_server.worker.drafters.ngram.suffix_automaton import SuffixAutomaton, Trie
from tests.support.sampling import request_sampling

STEPS, BUDGET = 4, 6


def scheduled(row: int, tokens: Sequence[int]) -> Decode:
    sampling = request_sampling(temperature=0.0)
    return Decode(row, len(tokens) - 1, tokens[-1] if tokens else 0, sampling, tokens)


def from_scratch(tokens: Sequence[int]) -> Trie:
    automaton = SuffixAutomaton(STEPS)
    automaton.extend(tokens)
    return automaton.continuations(BUDGET)


def test_a_text_that_grew_by_several_tokens_is_read_on() -> None:
    tries, text = NgramTries(STEPS, BUDGET + 1), [1, 2, 3, 1, 2]
    for more in ([], [3], [1, 2, 3, 4], [1], [2, 3]):
        text.extend(more)
        assert tries.trie_of(scheduled(7, text)) == from_scratch(text)


def test_a_row_that_another_request_took_over_is_read_anew() -> None:
    """Even where its text begins with all that the row's last one held."""
    tries, text = NgramTries(STEPS, BUDGET + 1), [1, 2, 3, 1, 2]
    tries.trie_of(scheduled(0, text))
    for other in ([1, 2, 3, 1, 2, 9, 1], [4, 5, 4], [1, 2, 3, 1, 2]):
        assert tries.trie_of(scheduled(0, other)) == from_scratch(other)


def test_a_resumed_request_is_read_in_its_new_row() -> None:
    tries, text = NgramTries(STEPS, BUDGET + 1), [1, 2, 3, 1, 2]
    first = tries.trie_of(scheduled(0, text))
    tries.forget(0)
    assert tries.trie_of(scheduled(3, text)) == first
    tries.forget(5)  # one that never decoded


def test_a_text_that_was_cut_is_read_anew() -> None:
    tries, text = NgramTries(STEPS, BUDGET + 1), [1, 2, 3, 1, 2, 3, 1]
    tries.trie_of(scheduled(0, text))
    del text[4:]
    assert tries.trie_of(scheduled(0, text)) == from_scratch(text)


def tokens_read(tries: NgramTries) -> int:
    return sum(reader.automaton.length for reader in tries._readers.values())


def propose(tries: NgramTries, decodes: Sequence[Decode]) -> list[list[int]]:
    """The tokens that a cycle drafts for these requests."""
    lens = tuple(len(decode.all_tokens) for decode in decodes)
    seq_lens = torch.tensor(lens)
    batch = SimpleNamespace(decodes=tuple(decodes), seq_lens_host=lens, seq_lens=seq_lens, verified_id=seq_lens)
    nodes = NgramDrafter(tries).propose(None, cast(DecodeBatch, cast(Any, batch)))
    return [[token for token in row[1:] if token >= 0] for row in nodes.tokens.tolist()]


def long_text(length: int) -> list[int]:
    """Two phrases, one at the beginning and one that ends the text, between tokens that occur once."""
    return [1, 2, 3, 4, 5, *range(10, length), 1, 2, 3]


def test_a_cycle_reads_a_limited_number_of_tokens_of_all_long_texts() -> None:
    tries, texts = NgramTries(STEPS, BUDGET + 1), [long_text(n) for n in (9000, 8000, 20)]
    before = 0
    while before < sum(map(len, texts)):
        drafted = propose(tries, [scheduled(row, text) for row, text in enumerate(texts)])
        assert drafted[0][:2] == drafted[2][:2] == [4, 5], "drafted from what was read so far"
        now = tokens_read(tries)
        assert 0 < now - before <= _PER_CYCLE + 3 * _GROWTH
        before = now
    assert NgramTries(STEPS, BUDGET + 1).trie_of(scheduled(2, texts[2])) == from_scratch(texts[2])


def test_a_prompt_is_read_while_it_is_prefilled() -> None:
    tries, text, size = NgramTries(STEPS, BUDGET + 1), long_text(20_000), 4000
    for start in range(0, len(text), size):
        assert tokens_read(tries) == start
        tries.read_prompts(
            (Chunk(4, start, tuple(text[start : start + size]), 0, scheduled(4, text).sampling, all_tokens=text),)
        )
    assert tokens_read(tries) == len(text)
    assert tries.trie_of(scheduled(4, text)) == from_scratch(text)


def test_of_a_text_beyond_the_limit_the_newest_tokens_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_drafter, "_MOST", 100)
    tries, text = NgramTries(STEPS, BUDGET + 1), [token % 7 for token in range(90)]
    for _ in range(30):
        text.extend(text[-40:-31])
        found = tries.trie_of(scheduled(0, text))
        assert 40 <= tokens_read(tries) <= 100
        assert found == from_scratch(text[-tokens_read(tries) :])
    other = list(range(250))
    tries.trie_of(scheduled(1, other))
    assert tries._readers[1].start == 200


def test_requests_without_a_match_and_padding_draft_nothing() -> None:
    """Of a batch of 4 the first finds something; the second does not, and the others are padding."""
    drafter = NgramDrafter(NgramTries(STEPS, BUDGET + 1))
    decodes = (scheduled(0, [1, 2, 1]), scheduled(1, [1, 2, 3]))
    seq_lens, roots = torch.tensor([2, 2, 1, 1]), torch.full((4,), 9)
    batch = SimpleNamespace(decodes=decodes, seq_lens_host=(2, 2, 1, 1), seq_lens=seq_lens, verified_id=roots)
    nodes = drafter.propose(None, cast(DecodeBatch, cast(Any, batch)))
    assert nodes.tokens.shape == nodes.parents.shape == (4, BUDGET + 1)
    assert nodes.steps == STEPS
    assert nodes.tokens[0].tolist() == [9, 2, 1, 2, 1, -1, -1]
    assert nodes.parents[0].tolist() == [-1, 0, 1, 2, 3, 0, 0]
    assert (nodes.tokens[1:, 1:] == -1).all()
    assert (nodes.parents[1:, 1:] == 0).all()


def test_a_trie_travels_as_integers_and_scores_are_those_of_paths() -> None:
    trie = Trie([5, 6, 9], [0, 1, 0], [0.25, 0.999, 0.125])
    numbers = torch.from_numpy(packed([trie], size=2, width=4))
    nodes = trie_tree(torch.tensor([8, 9]), torch.tensor([3, 4]), numbers, STEPS)
    assert nodes.tokens.tolist() == [[8, 5, 6, 9, -1], [9, *[-1] * 4]]
    assert nodes.parents.tolist() == [[-1, 0, 1, 0, 0], [-1, *[0] * 4]]
    assert nodes.scores is not None
    expected = torch.tensor([[0.25, 0.25 * 0.999, 0.125, 0.0], [0.0] * 4])
    torch.testing.assert_close(nodes.scores.exp(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(estimates(nodes)[0], torch.tensor([0.25, 0.999, 0.125, 0.0]), rtol=1e-5, atol=0)


def test_what_is_expected_of_a_trie_is_the_sum_of_its_paths_chances() -> None:
    assert Trie([5, 6, 7], [0, 1, 0], [0.5, 0.5, 0.25]).expected == 1.0
    assert Trie([], [], []).expected == 0.0
