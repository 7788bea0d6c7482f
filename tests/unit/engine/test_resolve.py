"""From options and models to an EngineConfig, for the demo with each of its drafters."""

from __future__ import annotations

import pytest

from eagle_server.config import parse_args
from eagle_server.engine.build.from_config import load_models
from eagle_server.engine.build.resolve import lookahead_bound, resolve, server_info
from eagle_server.speculation.tree_config import TreeConfig

CASES = {
    "NONE": (["--speculative-algorithm", "NONE"], TreeConfig()),
    "auto": ([], TreeConfig(5, 4, 8)),
    "given": (["--speculative-num-steps", "3", "--topk", "6"], TreeConfig(3, 6, 19)),
    "static": (["--speculative-token-tree", "[(0,), (0, 0), (2,)]"], TreeConfig(2, 3, 4, ((0,), (0, 0), (2,)))),
    "chain": (
        ["--speculative-num-steps", "3", "--topk", "1", "--speculative-num-draft-tokens", "8"],
        TreeConfig(3, 1, 4),
    ),
    "NGRAM": (["--speculative-algorithm", "NGRAM"], TreeConfig(8, 0, 16, ngram_depth=8)),
    "EAGLE3+NGRAM": (
        ["--speculative-algorithm", "EAGLE3+NGRAM", "--speculative-ngram-share", "--speculative-ngram-share-tokens=99"],
        TreeConfig(5, 4, 8, ngram_depth=8, ngram_share_tokens=99),
    ),
    "MEDUSA": (
        ["--speculative-algorithm", "MEDUSA", "--medusa-choices", "[(1,), (1, 3)]"],
        TreeConfig(2, 4, 3, ((1,), (1, 3))),
    ),
    "MEDUSA+NGRAM": (
        [
            *("--speculative-algorithm", "MEDUSA+NGRAM", "--speculative-num-draft-tokens", "90"),
            *("--medusa-choices", "[(0,)]"),
        ],
        TreeConfig(1, 1, 90, ((0,),), ngram_depth=8),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_options_become_one_tree_that_the_rope_tables_and_server_info_agree_with(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    flags, tree = CASES[case]
    config = parse_args([*flags, "--context-length", "512", "--page-size", "4"], environ={})
    models = load_models(config, progress=False)
    resolved = resolve(config, models.target, models.draft)
    assert resolved.tree == tree
    adjustments = [message for message in caplog.messages if "is adjusted to" in message]
    assert len(adjustments) == (case == "chain"), "an adjustment is said once"
    assert lookahead_bound(config, models.target.config) >= tree.num_lookahead_slots, (
        "the models' RoPE tables are too short"
    )
    assert resolved.max_total_tokens % 4 == 0 and resolved.max_total_tokens <= 48 * (512 + tree.num_lookahead_slots)
    shown = server_info(config, resolved, models.target)["speculative"]
    if case != "NONE":
        assert (shown["num_steps"], shown["eagle_topk"], shown["num_draft_tokens"], shown["ngram_depth"]) == (
            *(tree.num_steps, tree.topk, tree.num_draft_tokens, tree.ngram_depth),
        )
    assert shown["algorithm"] == case if case in ("NONE", "NGRAM", "MEDUSA") or "+" in case else "EAGLE3"
