"""The engine's distribution of the first three tokens equals the model's, computed in float64.

Every request has its own seed, so the texts are independent. The cells of the chi-squared test are the joint outcomes
of three tokens under top-k 4: 64 cells, merged where fewer than five texts are expected. The test rejects a correct
distribution with probability 1e-6. The seeds are fixed, so the result does not vary between runs.

One untrained drafter draws 20,000 texts. They miss a wrong distribution at a total variation of .05 with probability
below 1e-6, and one at .04 with probability below 1e-2. Every drafter of CASES draws 1,000 texts. They miss a wrong
distribution at .2 with probability below 1e-3; `test_every_drafter` also compares their texts. A planted bias has 2,000
texts, whose p-value is below 1e-20 for each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import scipy
import torch
from torch import Tensor

from eagle_server.engine.engine import Engine
from eagle_server.models.targets.decoder import TargetModel
from eagle_server.request import Request
from eagle_server.speculation.accept import Accepted, Lossless, padded_logits
from eagle_server.speculation.sampling import SamplingBatch, draw
from eagle_server.speculation.tree import Tree
from eagle_server.speculation.typical import Typical
from tests.lossless.conftest import Drafting
from tests.lossless.drafters import CASES
from tests.support.engines import Finished, plain, random_head, random_target, request, run, speculative, tokens_of
from tests.support.scoring import in_float64, logits_of, token_probs

ALPHA, TEXTS, LENGTH, VOCAB = 1e-6, 20_000, 3, 16
SEED = 3  # of the text that is used as a prompt
PROMPT = [3, 7, 1]
Text = tuple[int, ...]
Distribution = dict[Text, float]
SAMPLING: dict[str, Any] = {"temperature": 1.0, "top_k": 4}
accept = Lossless().accept  # the right rule, whatever the engine has


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return random_target(VOCAB, hidden=16, layers=3, seed=4, std=0.3)


@pytest.fixture(scope="module")
def exact_probs(target: TargetModel) -> Distribution:
    return text_probs(target, PROMPT, SAMPLING)


def text_probs(target: TargetModel, prompt: Sequence[int], sampling: Mapping[str, Any]) -> Distribution:
    """The probability of every text of LENGTH tokens, by enumeration in float64."""
    model, texts = in_float64(target), {(): 1.0}
    for _ in range(LENGTH):
        longer = {}
        for text, mass in texts.items():
            probs = token_probs(logits_of(model, [*prompt, *text])[-1], **sampling)
            longer |= {(*text, token): mass * p for token, p in enumerate(probs) if p}
        texts = longer
    return texts


def requests(count: int, prompt: Sequence[int] = PROMPT, sampling: Mapping[str, Any] = SAMPLING) -> list[Request]:
    """Two tokens more than are looked at, so that whole trees may be drafted after the first one."""
    return [request(i, prompt, seed=i, max_tokens=LENGTH + 2, ignore_eos=True, **sampling) for i in range(count)]


def texts_of(outcome: Mapping[str, Finished]) -> list[Text]:
    return [tuple(finished.tokens[:LENGTH]) for finished in outcome.values()]


def p_value(texts: Sequence[Text], expected: Distribution) -> float:
    """The p-value of the chi-squared statistic. The rarest cells are merged until every cell expects five texts."""
    counts = Counter(texts)
    assert counts.keys() <= expected.keys(), "a token outside the top four"
    cells = sorted(((mass * len(texts), counts[text]) for text, mass in expected.items()), reverse=True)
    while len(cells) > 1 and cells[-1][0] < 5:
        (mass, seen), (more, others) = cells.pop(), cells.pop()
        cells.append((mass + more, seen + others))
        cells.sort(reverse=True)
    assert len(cells) > 30
    statistic = sum((seen - mass) ** 2 / mass for mass, seen in cells)
    return float(scipy.stats.chi2.sf(statistic, len(cells) - 1))


def untrained(target: TargetModel, **settings: Any) -> Engine:
    """An engine with an untrained head and a wide tree. About half of its cycles accept drafts."""
    head, shape = random_head(target, "EAGLE3", seed=2), {"steps": 2, "topk": 6, "nodes": 25}
    return speculative(target, head, **shape, max_running_requests=128, disable_radix_cache=True, **settings)


@pytest.mark.deep
def test_speculative_decoding_has_the_models_distribution(target: TargetModel, exact_probs: Distribution) -> None:
    outcome = run(untrained(target), requests(TEXTS))
    assert p_value(texts_of(outcome), exact_probs) > ALPHA
    assert min(accepted(outcome)) > TEXTS / 50  # none, a part and all of a path were accepted often


# The gate has one drafter: all of them use the same acceptance rule.
QUICK = {"EAGLE3"}
CASES_BY_TIME = [pytest.param(name, marks=() if name in QUICK else (pytest.mark.deep,)) for name in CASES]


@pytest.mark.parametrize("drafting", CASES_BY_TIME, indirect=True)
def test_every_drafter_has_the_models_distribution(drafting: Drafting) -> None:
    """The prompt is a text of the target, so that n-grams repeat in it. A high temperature gives wide distributions."""
    target, sampling = drafting.pair.target, {"temperature": 1.6, "top_k": 4}
    written = run(plain(target), [request(0, PROMPT, max_tokens=60, temperature=1.0, ignore_eos=True, seed=SEED)])
    prompt = [*PROMPT, *written["0"].tokens]
    outcome = run(drafting.engine(max_running_requests=64), requests(TEXTS // 20, prompt, sampling))
    assert p_value(texts_of(outcome), text_probs(target, prompt, sampling)) > ALPHA
    lengths = accepted(outcome)
    assert min(lengths[:LENGTH]) > TEXTS / 2000 if drafting.drafts else not lengths  # at every depth of the tree


def accepted(outcome: Mapping[str, Finished]) -> list[int]:
    """How many cycles accepted 0, 1, 2, ... drafted tokens."""
    histograms = [each.spec.histogram for each in outcome.values() if each.spec is not None]
    return [sum(counts) for counts in zip(*histograms, strict=True)]


def fresh_bonus_after_a_miss(tree: Tree, logits: Tensor, sampling: SamplingBatch) -> Accepted:
    """A wrong rule: it draws the bonus again, with other noise."""
    accepted = accept(tree, logits, sampling)
    bs, size = tree.parents.shape
    elsewhere = tree.positions.view(bs, size) + 1_000_000
    again, _ = draw(padded_logits(tree, logits), elsewhere, sampling, tree.steps + 1)
    place = accepted.accept_length[:, None]
    bonus = again.gather(1, accepted.path.gather(1, place))
    return replace(accepted, tokens=accepted.tokens.scatter(1, place, bonus))


def root_and_first_level_share_their_noise(tree: Tree, logits: Tensor, sampling: SamplingBatch) -> Accepted:
    return accept(replace(tree, positions=tree.positions - (tree.depths > 0).long()), logits, sampling)


def noise_of_the_position_before(tree: Tree, logits: Tensor, sampling: SamplingBatch) -> Accepted:
    return accept(replace(tree, positions=tree.positions - 1), logits, sampling)


def drafts_raise_the_logits_of_their_tokens(tree: Tree, logits: Tensor, sampling: SamplingBatch) -> Accepted:
    """The draw depends on the draft: a child's score, shifted to 0 or more, is added to its token's logit."""
    if tree.scores is None:  # nobody drafts
        return accept(tree, logits, sampling)
    bs, size = tree.parents.shape
    given, tokens = padded_logits(tree, logits), tree.tokens[:, 1:]
    requests, nodes = torch.where(tokens >= 0)  # without padding
    raised, places = given.clone(), (requests, tree.parents[:, 1:][requests, nodes], tokens[requests, nodes])
    scores = tree.scores[requests, nodes]
    raised.index_put_(places, scores - scores.amin(), accumulate=True)
    allowed = given >= given.topk(SAMPLING["top_k"]).values[..., -1:]
    return accept(replace(tree, counts=None), torch.where(allowed, raised, given).flatten(0, 1), sampling)


MUTANTS = (
    fresh_bonus_after_a_miss,
    root_and_first_level_share_their_noise,
    noise_of_the_position_before,
    drafts_raise_the_logits_of_their_tokens,
)


@pytest.mark.deep
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_planted_bias_is_caught(
    target: TargetModel, exact_probs: Distribution, mutant: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lossless, "accept", lambda _, *given: mutant(*given))
    assert p_value(texts_of(run(untrained(target), requests(TEXTS // 10))), exact_probs) < ALPHA


@pytest.mark.deep
def test_typical_acceptance_changes_the_distribution_and_is_reported_as_lossy(
    target: TargetModel, exact_probs: Distribution
) -> None:
    outcome = run(untrained(target, acceptance=Typical(0.09, 0.3)), requests(TEXTS // 10))
    assert p_value(texts_of(outcome), exact_probs) < ALPHA
    assert {each.spec.lossy for each in outcome.values() if each.spec is not None} == {"typical"}


def test_typical_acceptance_does_not_change_greedy_requests(target: TargetModel) -> None:
    greedy = [request(i, [*PROMPT, i], ignore_eos=True) for i in range(8)]
    outcome = run(untrained(target, acceptance=Typical(0.09, 0.3)), greedy)
    assert tokens_of(outcome) == tokens_of(run(plain(target), greedy))
    assert {each.spec.lossy for each in outcome.values() if each.spec is not None} == {None}
