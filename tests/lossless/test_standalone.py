"""A draft model changes no text, and it sees the whole text at the right positions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_server.config import Config, parse_args
from eagle_server.engine.assembly.from_config import build_engine
from eagle_server.models.checkpoints.drafts.load_draft import load_draft
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.drafts.standalone import DraftLM
from eagle_server.models.targets.decoder import TargetModel
from eagle_server.plan import CyclePlan, CycleResult
from eagle_server.worker.worker import Worker
from eagle_tools.training.tiny import tiny_pair
from tests.lossless.pairs import Pair, Pairs, standalone
from tests.lossless.scenes import REQUESTS, as_on_a_gpu
from tests.support import deepseek
from tests.support.engines import (
    FIXED_TREES,
    admit_without_reserve,
    plain,
    random_target,
    request,
    run,
    speculative,
    tokens_of,
)
from tests.support.scoring import NEAR_TIE, in_float64, slack

pytestmark = pytest.mark.deep

MACHINES: dict[str, dict[str, Any]] = {
    "cpu": {},
    "mask": {"verify_attention": "mask", "draft_attention": "mask"},
    "per_node": {"verify_attention": "cascade", "draft_attention": "per_node"},
}
GREEDY = [
    request(i, each[: 5 + 13 * i], max_tokens=20 + i, ignore_eos=True)
    for i, each in enumerate(torch.randint(1, 48, (5, 60), generator=torch.Generator().manual_seed(5)).tolist())
]


@pytest.fixture(scope="module")
def pair(pairs: Pairs) -> Pair:
    return pairs.pair_of(standalone)


@pytest.fixture
def directory(pair: Pair) -> Path:
    """target/ and smaller/."""
    return pair.directory.parent


@pytest.fixture
def target(pair: Pair) -> TargetModel:
    return pair.target


@pytest.fixture
def texts(pairs: Pairs, pair: Pair) -> dict[str, list[int]]:
    return pairs.texts(pair)


def on(machine: str) -> dict[str, Any]:
    return {} if machine == "cpu" else {**as_on_a_gpu(), **MACHINES[machine]}


def latent() -> TargetModel:
    return deepseek.random_pair()[0].requires_grad_(requires_grad=False)


@pytest.mark.parametrize(
    ("family", "machine"),
    [
        (random_target, "cpu"),
        pytest.param(random_target, "per_node", marks=pytest.mark.deep),
        (latent, "cpu"),
        pytest.param(latent, "mask", marks=pytest.mark.deep),
    ],
)
def test_a_draft_that_is_the_target_is_accepted_whole_in_every_cycle(
    family: Callable[[], TargetModel], machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This shows that the draft model sees every token at its position, after prefix hits, chunks and preemption."""
    target, steps = family(), 4
    expected = run(plain(target), GREEDY)
    exact = in_float64(target)
    assert min(slack(exact, each, expected[each.request_id].tokens) for each in GREEDY) > NEAR_TIE
    missing: list[int] = []  # tokens per cycle and request
    cycle = Worker.run

    def recorded(self: Worker, plan: CyclePlan, *args: Any) -> CycleResult:
        result = cycle(self, plan, *args)
        missing.extend(
            min(steps + 1, decode.tokens_left) - len(each.tokens)
            for each, decode in zip(result.decodes, plan.decodes, strict=True)
            if plan.warm_up is None
        )
        return result

    monkeypatch.setattr(Worker, "run", recorded)
    roomy = speculative(target, DraftLM(target), steps, 1, chunked_prefill_size=16, **on(machine))
    for again in (False, True):
        outcome = run(roomy, GREEDY[:2], joining={3: GREEDY[2:4], 6: GREEDY[4:]})
        assert tokens_of(outcome) == tokens_of(expected)
        assert (sum(finished.cached_tokens for finished in outcome.values()) > 0) == again
    small = speculative(target, DraftLM(target), steps, 1, max_total_tokens=120, **on(machine))
    admit_without_reserve(small.scheduler)
    assert tokens_of(run(small, GREEDY)) == tokens_of(expected)
    assert small.stats().preemptions > 0
    assert len(missing) > 50
    assert set(missing) == {0}


@pytest.mark.parametrize("algorithm", ["STANDALONE", "STANDALONE+NGRAM"])
def test_a_draft_model_is_served_by_its_options(directory: Path, texts: dict[str, list[int]], algorithm: str) -> None:
    threads = torch.get_num_threads()
    engine = build_engine(options(directory, "--speculative-algorithm", algorithm), progress=False)
    torch.set_num_threads(threads)
    resolved = engine.ready().resolved["speculative"]
    assert (resolved["algorithm"], resolved["num_steps"], resolved["eagle_topk"]) == (algorithm, 3, 1)
    assert tokens_of(run(engine, REQUESTS)) == texts
    assert 0 < engine.stats().accepted_tokens < engine.stats().drafted_tokens


def options(directory: Path, *more: str, draft: str = "smaller") -> Config:
    paths = ["--model-path", str(directory / "target"), "--speculative-draft-model-path", str(directory / draft)]
    return parse_args([*paths, "--max-total-tokens", "2048", *FIXED_TREES, *more], {})


def test_a_model_without_its_algorithm_is_recognized(directory: Path) -> None:
    with pytest.raises(ValueError, match="holds a language model, .* add --speculative-algorithm STANDALONE"):
        build_engine(options(directory), progress=False)


def test_a_head_is_no_model(directory: Path) -> None:
    with pytest.raises(ValueError, match="STANDALONE was asked for, but the files hold an EAGLE head"):
        build_engine(options(directory, "--speculative-algorithm", "STANDALONE", draft="eagle"), progress=False)


def test_another_vocabulary_is_refused(directory: Path, target: TargetModel, tmp_path: Path) -> None:
    files = tiny_pair(tmp_path, kind="eagle", steps=0, vocab=60).target
    with pytest.raises(ValueError, match="vocab_size 60, but the target's is 64"):
        load_draft(files, target, Loading(context=256, progress=False), algorithm="STANDALONE")
    shutil.copytree(directory / "smaller", tmp_path / "renamed")
    tokenizer = tmp_path / "renamed" / "tokenizer.json"
    values = json.loads(tokenizer.read_text())
    values["model"]["vocab"] |= {"a": 1, "b": 0}
    tokenizer.write_text(json.dumps(values))
    with pytest.raises(ValueError, match="another vocabulary than .*: token 'a' is 1 there and 0 in the target's"):
        load_draft(
            tmp_path / "renamed",
            target,
            Loading(context=256, progress=False),
            algorithm="STANDALONE",
            target_path=directory / "target",
        )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--model-path", "x/y"], "needs --model-path and, for the smaller model that drafts"),
        (
            ["--model-path", "x/y", "--speculative-draft-model-path", "x/z", "--speculative-token-tree", "[(0,)]"],
            "no effect",
        ),
        (
            [
                "--model-path",
                "x/y",
                "--speculative-draft-model-path",
                "x/z",
                "--speculative-draft-config-override",
                "{}",
            ],
            "no effect",
        ),
    ],
)
def test_options_that_contradict_it_are_refused(
    given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--speculative-algorithm", "STANDALONE", *given], {})
    assert message in capsys.readouterr().err
