"""Transforms of all rows of a batch at once, against plain Python over the text of each row."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from eagle_server.ops.sampling.truncate import above_min_p
from eagle_server.plan import Decode, RequestSampling
from eagle_server.request import SamplingParams
from eagle_server.speculation import transforms
from eagle_server.speculation.bad_words import PATH_START, WordBeginnings
from eagle_server.speculation.sampling import SamplingBatch, draw, transformed
from eagle_server.worker.batch.penalizer_state import PenalizerStates
from tests.support import sampling_reference as reference
from tests.support.sampling import request_sampling
from tests.support.trees import path_to, tree_of

VOCAB, CPU = 8, torch.device("cpu")
TOKENS = st.integers(0, VOCAB - 1)


@st.composite
def params(choose: st.DrawFn) -> SamplingParams:
    """Any subset of the parameters. The vocabulary is small, so that tokens repeat and bad words occur."""
    biases = st.lists(st.tuples(TOKENS, st.sampled_from([-100.0, -1.5, 0.0, 2.25])), max_size=4)
    words = st.lists(st.lists(TOKENS, min_size=1, max_size=4).map(tuple), max_size=5)
    allowed = st.none() | st.lists(TOKENS, min_size=1, max_size=6).map(tuple)
    return SamplingParams(
        max_tokens=9,
        seed=0,
        logit_bias=tuple(choose(biases)),
        allowed_token_ids=choose(allowed),
        bad_words=tuple(choose(words)),
        min_tokens=choose(st.integers(0, 4)),
        stop_token_ids=tuple(choose(st.lists(TOKENS, max_size=2))),
        repetition_penalty=choose(st.sampled_from([1.0, 1.0, 0.5, 1.75])),
        frequency_penalty=choose(st.sampled_from([0.0, 0.0, 0.5, -0.25])),
        presence_penalty=choose(st.sampled_from([0.0, 0.0, 1.25, -1.0])),
    )


def sampling(asked: SamplingParams, prompt: Sequence[int]) -> RequestSampling:
    return request_sampling(
        key=0,
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        stop_ids=asked.stop_token_ids if asked.min_tokens else (),
        allowed_from=len(prompt) + asked.min_tokens,
        repetition_penalty=asked.repetition_penalty,
        frequency_penalty=asked.frequency_penalty,
        presence_penalty=asked.presence_penalty,
        logit_bias=asked.logit_bias,
        allowed_token_ids=asked.allowed_token_ids,
        bad_words=asked.bad_words,
        prompt_length=len(prompt),
    )


@st.composite
def batches(choose: st.DrawFn) -> tuple[list[SamplingParams], list[list[int]], list[list[int]], list[list[int]], ...]:
    """Requests with prompt, output and a tree of parents and drafted tokens. -1 is padding under the root."""
    bs, size = choose(st.integers(1, 3)), choose(st.integers(1, 7))
    asked = [choose(params()) for _ in range(bs)]
    prompts = [choose(st.lists(TOKENS, min_size=1, max_size=5)) for _ in range(bs)]
    outputs = [choose(st.lists(TOKENS, min_size=0 if size == 1 else 1, max_size=6)) for _ in range(bs)]
    links, drafts = [], []
    for _ in range(bs):
        real = choose(st.integers(1, size))
        links.append([-1] + [choose(st.integers(0, node - 1)) if node < real else 0 for node in range(1, size)])
        drafts.append([choose(TOKENS) if node < real else -1 for node in range(1, size)])
    return asked, prompts, outputs, links, drafts


@given(batches(), st.integers(0, 99))
def test_every_node_is_transformed_given_its_own_text(batch, seed: int) -> None:
    asked, prompts, outputs, links, drafts = batch
    bs, size = len(links), len(links[0])
    steps = size - 1
    logits = 3 * torch.randn(bs, size, VOCAB, generator=torch.Generator().manual_seed(seed))
    texts = [[*prompt, *output] for prompt, output in zip(prompts, outputs, strict=True)]
    tokens = [[text[-1], *drafted] for text, drafted in zip(texts, drafts, strict=True)]
    tree = tree_of(links, tokens, [len(text) - 1 for text in texts], size)
    settings = [sampling(*each) for each in zip(asked, prompts, strict=True)]
    scheduled = [Decode(row, 0, 0, setting, texts[row]) for row, setting in enumerate(settings)]
    penalizer_state = PenalizerStates(bs, VOCAB, CPU, steps).state_of(scheduled)
    paths = tree if size > 1 else None
    given_logits = logits.clone()
    batch_sampling = replace(SamplingBatch.of(settings, CPU, steps), penalizer_state=penalizer_state)
    found = transformed(given_logits, tree.positions + 1, batch_sampling, paths)
    assert torch.equal(given_logits, logits), "log-probabilities are read from these"
    for request in range(bs):
        for node in range(size):
            if tokens[request][node] < 0:
                continue
            path = [tokens[request][n] for n in path_to(links[request], node)][1:]
            stops = asked[request].stop_token_ids
            output = [*outputs[request], *path]
            row = logits[request, node].tolist()
            expected = reference.transformed(row, asked[request], prompts[request], output, stops)
            assert found[request, node].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


@given(
    st.lists(st.integers(-6, 6), min_size=2, max_size=12),
    st.sampled_from([0.01, 0.11, 0.4, 0.93, 1.0]),
    st.sampled_from([0.5, 1.0, 1.7]),
)
def test_min_p_keeps_what_has_that_part_of_the_best_ones_probability(values, min_p: float, temperature: float) -> None:
    logits = torch.tensor(values, dtype=torch.float32) / 3
    asked = SamplingParams(max_tokens=1, seed=0, temperature=temperature, min_p=min_p)
    expected = reference.token_probs(logits.tolist(), asked)
    kept = above_min_p(logits.view(1, 1, -1), torch.tensor([temperature]), torch.tensor([min_p]))
    found = (kept / temperature).softmax(-1)[0, 0]
    assert found.tolist() == pytest.approx(expected, abs=1e-6)


def test_min_p_comes_after_top_k_and_top_p() -> None:
    """With .4 .3 .2 .1, top-p 0.6 keeps two tokens. Of these, min_p .8 keeps only the best, and min_p .7 keeps both."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().expand(1, 1, 4)
    for min_p, expected in ((0.8, {0}), (0.7, {0, 1})):
        setting = request_sampling(key=3, temperature=1.0, top_k=3, top_p=0.6, min_p=min_p)
        batch = SamplingBatch.of([setting], CPU)
        drawn = {int(draw(logits, torch.tensor([[position]]), batch)[0]) for position in range(80)}
        assert drawn == expected


def test_requests_that_ask_for_nothing_are_drawn_from_the_same_tensor() -> None:
    logits = torch.randn(2, 3, VOCAB)
    settings = [request_sampling(key=0, temperature=t, top_k=2, top_p=0.9, logprobs=1) for t in (0.0, 1.0)]
    assert transformed(logits, torch.zeros(2, 3, dtype=torch.int64), SamplingBatch.of(settings, CPU)) is logits


def counts_of(penalizer_state: Tensor | None) -> list[dict[int, int]]:
    assert penalizer_state is not None
    return [{token: int(n) for token, n in enumerate(row) if n} for row in penalizer_state.tolist()]


def test_penalizer_state_follows_its_texts_and_forgets_with_them() -> None:
    setting = request_sampling(key=0, temperature=0.0, presence_penalty=1.0, prompt_length=3)
    penalizers = PenalizerStates(3, VOCAB, CPU)
    first, second = [1, 1, 2], [4, 5, 5, 1, 1]
    scheduled = [Decode(2, 0, 0, setting, first), Decode(0, 0, 0, setting, second)]

    def found() -> tuple[list[dict[int, int]], list[dict[int, int]]]:
        penalizer_state = penalizers.state_of(scheduled)
        return counts_of(penalizer_state.counts), counts_of(penalizer_state.prompts)

    assert found() == ([{}, {1: 2}], [{1: 1, 2: 1}, {4: 1, 5: 1}])
    first.extend([3, 1, 3])
    assert found() == ([{1: 1, 3: 2}, {1: 2}], [{1: 1, 2: 1}, {4: 1, 5: 1}])
    assert found()[0] == [{1: 1, 3: 2}, {1: 2}]
    penalizers.forget(0)  # preempted, then scheduled again in the same row with the same list
    second.append(7)
    assert found() == ([{1: 1, 3: 2}, {1: 2, 7: 1}], [{1: 1, 2: 1}, {4: 1, 5: 1}])
    scheduled[0] = Decode(2, 0, 0, setting, [*first])  # another request in that row, without forget()
    assert found()[0] == [{1: 1, 3: 2}, {1: 2, 7: 1}]
    scheduled[0] = Decode(2, 0, 0, setting, [6, 6, 6, 0])
    assert found() == ([{0: 1}, {1: 2, 7: 1}], [{6: 1}, {4: 1, 5: 1}])


WORDS = st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=9).map(tuple), min_size=1, max_size=12)


@st.composite
def paths_and_words(
    choose: st.DrawFn,
) -> tuple[list[tuple[tuple[int, ...], ...]], list[list[int]], list[list[int]], int]:
    """Words over three tokens: they overlap, are suffixes of one another, and may be longer than the text."""
    bs, size = choose(st.integers(1, 3)), choose(st.integers(1, 8))
    words = [tuple(choose(WORDS)) if choose(st.booleans()) else () for _ in range(bs)]
    token = st.sampled_from([choose(st.integers(0, 2))]) | st.integers(0, 2)  # long runs of one token
    texts = [choose(st.lists(token, min_size=1, max_size=24)) for _ in range(bs)]
    links = [[-1] + [choose(st.integers(0, node - 1)) for node in range(1, size)] for _ in range(bs)]
    drafts = [[choose(token) for _ in range(1, size)] for _ in range(bs)]
    return words, texts, links, drafts


@given(paths_and_words(), st.integers(0, 2), st.sampled_from([1, 20, transforms._WORD_ROWS]))
def test_bad_words_are_forbidden_exactly_after_their_other_tokens(batch, deeper: int, at_once: int) -> None:
    """In trees, over the border between text and path, and where trees may be deeper than these are."""
    words, texts, links, drafts = batch
    bs, size = len(texts), len(links[0])
    tokens = [[text[-1], *drafted] for text, drafted in zip(texts, drafts, strict=True)]
    tree = tree_of(links, tokens, [len(text) - 1 for text in texts], size)
    steps = int(tree.depths.max()) + deeper
    settings = [request_sampling(bad_words=each) for each in words]
    scheduled = [Decode(row, 0, 0, setting, texts[row]) for row, setting in enumerate(settings)]
    penalizer_state = PenalizerStates(bs, 3, CPU, steps).state_of(scheduled)
    sampled = replace(SamplingBatch.of(settings, CPU, steps), penalizer_state=penalizer_state)
    paths = tree if size > 1 else None
    with patch.object(transforms, "_WORD_ROWS", at_once):
        found = transformed(torch.zeros(bs, size, 3), tree.positions + 1, sampled, paths)
    for request, text in enumerate(texts):
        for node in range(size):
            before = (*text, *(tokens[request][n] for n in path_to(links[request], node)[1:]))
            endings = {before[start:] for start in range(len(before))}
            forbidden = {word[-1] for word in words[request] if word[:-1] in endings}
            assert found[request, node].isneginf().nonzero().view(-1).tolist() == sorted(forbidden)


def test_beginnings_of_all_lengths_are_compared_side_by_side() -> None:
    """Words of 2 to 40 tokens that end alike: each is completed by a token of its own, if the text is long enough."""
    text = [*range(40, 0, -1)]
    words = [(*text[-length:], 50 + length) for length in (40, 1, 17, 2, 3, 5, 16, 4)]
    others = [(9, *text[-length:], 200 + length) for length in (1, 3, 4, 5, 20)]
    tokens = np.array([token for word in (*words, *others) for token in word])
    beginnings = WordBeginnings(tokens, np.array([len(word) for word in (*words, *others)]), steps=0)
    for known in (40, 39, 16, 4, 1):
        found = {row[0] for row in beginnings.after(text[-known:]).tolist()}
        assert found == {word[-1] for word in words if len(word) - 1 <= known}


class Allocations(TorchDispatchMode):
    """The number of elements of the largest tensor that an operation returned."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.largest = max([self.largest, *(x.numel() for x in (out,) if isinstance(x, Tensor))])
        return out


def test_a_long_word_costs_nothing_where_the_text_does_not_end_with_its_beginning() -> None:
    """One word of 2,000 tokens beside 200 pairs of tokens, over a tree: no tensor is larger than the logits."""
    bs, size, vocab, steps = 2, 17, 400, 4
    numbers = torch.randint(vocab, (2400,), generator=torch.Generator().manual_seed(2)).tolist()
    words = (tuple(numbers[:2000]), *zip(numbers[2000:2200], numbers[2200:], strict=True))
    settings = [request_sampling(key=row, temperature=0.0, bad_words=words) for row in range(bs)]
    texts = [[*numbers[:1990], number] for number in (1, numbers[2000])]
    links = [[-1, 0, 0, 0, 0, *range(1, 13)]] * bs
    drafts = [[text[-1], *numbers[100 : 99 + size]] for text in texts]
    tree = tree_of(links, drafts, [len(text) - 1 for text in texts], steps)
    logits, positions = torch.zeros(bs, size, vocab), tree.positions + 1
    penalizers = PenalizerStates(bs, vocab, CPU, steps)
    with Allocations() as allocations:
        sampled = SamplingBatch.of(settings, CPU, steps)
        scheduled = [Decode(row, 0, 0, setting, texts[row]) for row, setting in enumerate(settings)]
        found = transformed(logits, positions, replace(sampled, penalizer_state=penalizers.state_of(scheduled)), tree)
    assert found[1, 0, numbers[2200]] == -math.inf
    assert 0 < allocations.largest <= logits.numel()


@pytest.mark.parametrize(
    ("name", "entries", "most"),
    [
        ("allowed_token_ids", range(20_000), 40),
        ("logit_bias", ((token, 1.0) for token in range(20_000)), 40),
        ("bad_words", ((token,) for token in range(20_000)), 40),
        ("bad_words", ((token, token + 1) for token in range(20_000)), 100),
        ("stop_ids", range(20_000), 60),
    ],
)
def test_a_changed_batch_reads_no_list_again(name: str, entries: Iterable[Any], most: int) -> None:
    """Python objects for an entry take more bytes than arrays."""
    setting = request_sampling(temperature=0.0, allowed_from=3, **{name: tuple(entries)})
    expected = SamplingBatch.of([setting], CPU, 3).transforms
    tracemalloc.start()
    found = SamplingBatch.of([request_sampling(temperature=0.0), setting], CPU, 3).transforms
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < most * 20_000
    assert [type(transform) for transform in found] == [type(transform) for transform in expected]


def test_nothing_is_kept_for_requests_without_penalties() -> None:
    penalizers = PenalizerStates(3, VOCAB, CPU)
    setting = request_sampling(key=0, temperature=1.0, bad_words=((1, 2), (3,)), logit_bias=((1, 2.0),))
    penalizer_state = penalizers.state_of([Decode(0, 0, 0, setting, [5])])
    assert penalizer_state.counts is None and penalizers._counts is None
    assert penalizer_state.begun is None
    begun = penalizers.state_of([Decode(0, 0, 0, setting, [5, 1])]).begun
    assert begun is not None and begun.T.tolist() == [[0, 2, PATH_START]]


def test_a_row_in_which_nothing_is_allowed_scores_minus_infinity() -> None:
    setting = request_sampling(
        key=0, temperature=1.0, top_k=3, top_p=0.5, min_p=0.1, allowed_token_ids=(2,), bad_words=((2,),)
    )
    _, score = draw(torch.zeros(1, 1, VOCAB), torch.zeros(1, 1, dtype=torch.int64), SamplingBatch.of([setting], CPU))
    assert score.item() == -math.inf
