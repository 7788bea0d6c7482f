"""The law of the first three tokens, through the whole engine and against the model's own law in float64.

Every request has its own seed, so the texts are independent. The cells are the joint outcomes of three tokens under
top-k 4: 64 of them, merged where fewer than five are expected. A true law is refused with probability 1e-6 (the seeds
are fixed, so a pass stays one). N = 20,000 texts miss a law at a total variation of .05 with probability below 1e-6,
and one at .04 with probability below 1e-2. A drafted tree reaches over all the tokens that decoding adds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from scipy import stats
from torch import Tensor

from eagle_server.engine.engine import Engine
from eagle_server.models.target import TargetModel
from eagle_server.request import Request
from eagle_server.speculation import accept as rules
from eagle_server.speculation.accept import Accepted, accept
from eagle_server.speculation.sampling import SamplingBatch, draw
from eagle_server.speculation.tree import EagleVerifyInput
from eagle_server.speculation.typical import Typical
from tests.support.engines import Finished, plain, random_head, random_target, request, run, speculative, tokens_of
from tests.support.scoring import in_float64, law, logits_of

ALPHA, TEXTS, LENGTH, VOCAB = 1e-6, 20_000, 3, 16
PROMPT = [3, 7, 1]
Text = tuple[int, ...]
Law = dict[Text, float]
SAMPLING = {"temperature": 1.0, "top_k": 4}


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return random_target(VOCAB, hidden=16, layers=3, seed=4, std=0.3)


@pytest.fixture(scope="module")
def exact_law(target: TargetModel) -> Law:
    model, texts = in_float64(target), {(): 1.0}
    for _ in range(LENGTH):
        longer = {}
        for text, mass in texts.items():
            following = law(logits_of(model, [*PROMPT, *text])[-1], **SAMPLING)
            longer |= {(*text, token): mass * p for token, p in enumerate(following) if p}
        texts = longer
    return texts


def requests(count: int) -> list[Request]:
    return [request(i, PROMPT, seed=i, max_tokens=LENGTH, ignore_eos=True, **SAMPLING) for i in range(count)]


def texts_of(outcome: Mapping[str, Finished]) -> list[Text]:
    return [tuple(finished.tokens) for finished in outcome.values()]


def p_value(texts: Sequence[Text], expected: Law) -> float:
    """Of the chi-squared statistic; the rarest cells are merged into one until it expects five."""
    counts = Counter(texts)
    assert counts.keys() <= expected.keys(), "a token outside the top four"
    cells = sorted(((mass * len(texts), counts[text]) for text, mass in expected.items()), reverse=True)
    while len(cells) > 1 and cells[-1][0] < 5:
        (mass, seen), (more, others) = cells.pop(), cells.pop()
        cells.append((mass + more, seen + others))
        cells.sort(reverse=True)
    assert len(cells) > 30
    statistic = sum((seen - mass) ** 2 / mass for mass, seen in cells)
    return float(stats.chi2.sf(statistic, len(cells) - 1))


def drafting(target: TargetModel, kind: str, **settings: Any) -> Engine:
    """Untrained heads guess badly, so their trees are wide: about every second cycle accepts something."""
    head = random_head(target, kind, seed=2)
    return speculative(target, head, steps=2, topk=6, draft_token_num=25, max_running=64, **settings)


def test_plain_decoding_follows_the_models_law(target: TargetModel, exact_law: Law) -> None:
    assert p_value(texts_of(run(plain(target, max_running=64), requests(TEXTS))), exact_law) > ALPHA


@pytest.mark.parametrize("kind", ["EAGLE", "EAGLE3"])
def test_speculative_decoding_follows_the_models_law(target: TargetModel, exact_law: Law, kind: str) -> None:
    engine = drafting(target, kind)
    outcome = run(engine, requests(TEXTS))
    assert p_value(texts_of(outcome), exact_law) > ALPHA
    histograms = [each.spec.histogram for each in outcome.values() if each.spec is not None]
    lengths = [sum(counts) for counts in zip(*histograms, strict=True)]
    assert min(lengths) > TEXTS / 50  # refusals, part of a path, and all of one


def fresh_bonus_after_a_miss(tree: EagleVerifyInput, logits: Tensor, sampling: SamplingBatch) -> Accepted:
    """Draws the last node's token again, with noise that nothing else reads."""
    accepted = accept(tree, logits, sampling)
    bs, size = tree.parents.shape
    elsewhere = tree.positions.view(bs, size) + 1_000_000
    again, _ = draw(logits.view(bs, size, -1), elsewhere, sampling, tree.spec_steps + 1)
    place = accepted.accept_length[:, None]
    bonus = again.gather(1, accepted.path.gather(1, place))
    return replace(accepted, tokens=accepted.tokens.scatter(1, place, bonus))


def root_and_first_level_share_their_noise(tree: EagleVerifyInput, logits: Tensor, sampling: SamplingBatch) -> Accepted:
    return accept(replace(tree, positions=tree.positions - (tree.depths > 0).view(-1).long()), logits, sampling)


def noise_of_the_position_before(tree: EagleVerifyInput, logits: Tensor, sampling: SamplingBatch) -> Accepted:
    return accept(replace(tree, positions=tree.positions - 1), logits, sampling)


MUTANTS = (fresh_bonus_after_a_miss, root_and_first_level_share_their_noise, noise_of_the_position_before)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_planted_bias_is_caught(
    target: TargetModel, exact_law: Law, mutant: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "accept", mutant)
    assert p_value(texts_of(run(drafting(target, "EAGLE"), requests(TEXTS // 4))), exact_law) < ALPHA


def test_typical_acceptance_follows_another_law_and_says_so(target: TargetModel, exact_law: Law) -> None:
    outcome = run(drafting(target, "EAGLE", acceptance=Typical(0.09, 0.3)), requests(TEXTS // 4))
    assert p_value(texts_of(outcome), exact_law) < ALPHA
    assert {each.spec.lossy for each in outcome.values() if each.spec is not None} == {"typical"}


def test_typical_acceptance_leaves_greedy_requests_alone(target: TargetModel) -> None:
    greedy = [request(i, [*PROMPT, i], ignore_eos=True) for i in range(8)]
    outcome = run(drafting(target, "EAGLE", acceptance=Typical(0.09, 0.3)), greedy)
    assert tokens_of(outcome) == tokens_of(run(plain(target), greedy))
    assert {each.spec.lossy for each in outcome.values() if each.spec is not None} == {None}
