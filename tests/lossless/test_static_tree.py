"""EAGLE heads over static trees change no text."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eagle_server.config import parse_args
from eagle_server.engine.build import build_engine
from eagle_server.engine.engine import Engine
from eagle_server.speculation.medusa_choices import depth_of, parse_choices, ranks_of
from tests.lossless.conftest import Pair
from tests.lossless.test_equality import REQUESTS, SCENES
from tests.lossless.test_flashinfer import as_on_a_gpu
from tests.support.engines import plain, run, speculative, tokens_of

TREES = {
    "one level": "[(0,), (1,), (3,)]",
    "chain": "[(0,), (0, 0), (0, 0, 0)]",
    "unequal": "[(0,), (1,), (2,), (0, 0), (0, 1), (0, 2), (2, 1), (0, 0, 0), (0, 0, 1), (2, 1, 0), (0, 0, 0, 0)]",
}


@pytest.fixture(scope="module")
def texts(pair: Pair) -> dict[str, list[int]]:
    return tokens_of(run(plain(pair.target), REQUESTS))


def test_a_tree_is_served_by_its_option(pair: Pair, texts: dict[str, list[int]]) -> None:
    draft = pair.directory.parent / {"EAGLE": "eagle", "EAGLE3": "eagle3"}[pair.kind]
    paths = ["--model-path", str(pair.directory), "--speculative-draft-model-path", str(draft)]
    override = ["--speculative-draft-config-override", '{"aux_boundaries": [1, 2, 3]}'] if pair.kind == "EAGLE3" else []
    tree = ["--speculative-token-tree", TREES["unequal"], "--max-total-tokens", "2048"]
    threads = torch.get_num_threads()
    engine = build_engine(parse_args([*paths, *override, *tree], {}), progress=False)
    torch.set_num_threads(threads)
    resolved = engine.ready().resolved["speculative"]
    assert (resolved["num_steps"], resolved["num_draft_tokens"], len(resolved["token_tree"])) == (4, 12, 11)
    assert tokens_of(run(engine, REQUESTS)) == texts
    assert 0 < engine.stats().accepted_tokens < engine.stats().drafted_tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--speculative-num-steps", "2", "--topk", "2"], "--speculative-num-steps: the tree is that of"),
        (["--speculative-algorithm", "REDRAFTER"], "no effect with --speculative-algorithm REDRAFTER"),
        (["--speculative-algorithm", "NONE"], "no effect with --speculative-algorithm NONE"),
    ],
)
def test_options_that_contradict_a_tree_are_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--speculative-token-tree", "[(0,)]", *options], {})
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("tree", ["[(1, 0)]", "mars", "[]"])
def test_what_is_no_tree_is_refused(tree: str) -> None:
    with pytest.raises(ValueError, match="--speculative-token-tree: "):
        build_engine(parse_args(["--speculative-token-tree", tree], {}), progress=False)


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("machine", ["cpu", "mask", "cascade"])
@pytest.mark.parametrize("name", TREES)
def test_output_with_a_static_tree_equals_plain_output(
    pair: Pair, texts: dict[str, list[int]], name: str, machine: str, scene: str
) -> None:
    engines: list[Engine] = []
    choices = parse_choices(TREES[name])
    modes = {} if machine == "cpu" else {"verify_attention": machine, "draft_attention": machine}

    def build(**settings: Any) -> Engine:
        gpu = as_on_a_gpu() if modes else {}
        numbers = {"draft_token_num": len(choices) + 1, "choices": choices, **gpu, **modes, **settings}
        engines.append(speculative(pair.target, pair.head, depth_of(choices), ranks_of(choices), **numbers))
        return engines[-1]

    for each, finished in SCENES[scene](build).items():
        assert finished.tokens == texts[each], f"request {each}"
    totals = [engine.stats() for engine in engines]
    assert 0 < sum(t.accepted_tokens for t in totals) < sum(t.drafted_tokens for t in totals)
