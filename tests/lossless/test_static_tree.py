"""The option for a static tree."""

from __future__ import annotations

import pytest
import torch

from eagle_server.config import parse_args
from eagle_server.engine.assembly.from_config import build_engine
from tests.lossless.conftest import eagle_is_deep
from tests.lossless.drafters import UNEQUAL
from tests.lossless.pairs import Pair
from tests.lossless.scenes import REQUESTS
from tests.support.engines import FIXED_TREES, run, tokens_of


@eagle_is_deep
def test_a_tree_is_served_by_its_option(pair: Pair, texts: dict[str, list[int]]) -> None:
    paths = ["--model-path", str(pair.directory), "--speculative-draft-model-path", str(pair.draft)]
    override = ["--speculative-draft-config-override", '{"aux_boundaries": [1, 2, 3]}'] if pair.kind == "EAGLE3" else []
    tree = ["--speculative-token-tree", UNEQUAL, "--max-total-tokens", "2048", *FIXED_TREES]
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
