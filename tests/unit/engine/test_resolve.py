"""From options and models to an EngineConfig, for the demo with each of its drafters."""

from __future__ import annotations

import math

import pytest

from eagle_server.algorithms import ALGORITHMS
from eagle_server.config import parse_args
from eagle_server.engine.assembly import devices
from eagle_server.engine.assembly.drafters import lookahead_slots
from eagle_server.engine.assembly.from_config import load_models
from eagle_server.engine.assembly.pools import state_bytes
from eagle_server.engine.assembly.resolve import lookahead_bound, resolve, server_info
from eagle_server.speculation.tree_config import TreeConfig
from tests.support.hybrids import hybrid_target

CASES = {
    "NONE": (["--speculative-algorithm", "NONE"], TreeConfig()),
    "auto": ([], TreeConfig(5, 4, 8)),
    "given": (["--speculative-num-steps", "3", "--topk", "6"], TreeConfig(3, 6, 19)),
    "static": (["--speculative-token-tree", "[(0,), (0, 0), (2,)]"], TreeConfig(2, 3, 4, ((0,), (0, 0), (2,)))),
    "chain": (
        ["--speculative-num-steps", "3", "--topk", "1", "--speculative-num-draft-tokens", "8"],
        TreeConfig(3, 1, 4),
    ),
    "NGRAM": (["--speculative-algorithm", "NGRAM"], TreeConfig(8, 0, 16, ngram_steps=8)),
    "EAGLE3+NGRAM": (
        ["--speculative-algorithm", "EAGLE3+NGRAM"],
        TreeConfig(5, 4, 8, ngram_steps=8),
    ),
    "DFLASH": (["--speculative-algorithm", "DFLASH", "--speculative-num-steps", "6"], TreeConfig(6, 4, 25)),
    "DFLASH+NGRAM": (["--speculative-algorithm", "DFLASH+NGRAM"], TreeConfig(5, 4, 8, ngram_steps=8)),
    "MEDUSA": (
        ["--speculative-algorithm", "MEDUSA", "--medusa-choices", "[(1,), (1, 3)]"],
        TreeConfig(2, 4, 3, ((1,), (1, 3))),
    ),
    "MEDUSA+NGRAM": (
        [
            *("--speculative-algorithm", "MEDUSA+NGRAM", "--speculative-num-draft-tokens", "90"),
            *("--medusa-choices", "[(0,)]"),
        ],
        TreeConfig(1, 1, 90, ((0,),), ngram_steps=8),
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
    slots = lookahead_slots(None if models.draft is None else ALGORITHMS[models.draft.algorithm], tree)
    assert lookahead_bound(config, models.target.config) >= slots, "the models' RoPE tables are too short"
    assert resolved.max_total_tokens % 4 == 0 and resolved.max_total_tokens <= 48 * (512 + slots)
    shown = server_info(config, resolved, models.target)["speculative"]
    if case != "NONE":
        assert (shown["num_steps"], shown["eagle_topk"], shown["num_draft_tokens"], shown["ngram_depth"]) == (
            *(tree.model_steps, tree.topk, tree.nodes, tree.ngram_steps),
        )
        assert shown["has_rows"] == (case == "DFLASH"), "n-grams come from no row"
    assert shown["algorithm"] == case if case in ("NONE", "NGRAM", "MEDUSA", "DFLASH") or "+" in case else "EAGLE3"


def test_checkpoints_of_states_share_the_memory_with_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    target, size = hybrid_target(), 3 * 4 * (4 * 8 * 8 + 3 * 64)
    flags = ["--speculative-algorithm", "NONE", "--context-length", "64", "--page-size", "4"]
    resolved = resolve(parse_args([*flags, "--chunked-prefill-size", "6"], environ={}), target, None)
    kv = 2 * 2 * 16 * 4  # bytes per token
    assert resolved.checkpoint_interval == 32, "a state takes as much memory as 22 tokens; chunks of 6, blocks of 16"
    assert resolved.checkpoint_interval * kv >= size
    assert resolved.checkpoints == 2 * math.ceil(resolved.max_total_tokens / 32)
    shown = server_info(parse_args(flags, environ={}), resolved, target)["cache"]
    assert (shown["state_checkpoints"], shown["state_checkpoint_interval"]) == (resolved.checkpoints, 32)
    monkeypatch.setattr(devices, "usable_memory", lambda: 2**21)
    tight = resolve(parse_args([*flags, "--max-running-requests", "40"], environ={}), target, None)
    taken = tight.max_total_tokens * kv + tight.checkpoints * size + state_bytes(target.config, 40, 1)
    room = int(2**21 * devices.CPU_MEMORY_FOR_KV)
    assert room - 3 * size < taken <= room
    without = resolve(parse_args([*flags, "--disable-radix-cache"], environ={}), target, None)
    assert (without.checkpoints, without.disable_radix_cache) == (0, True)
    events = ["--kv-events-config", '{"publisher": "zmq", "enable_kv_cache_events": true}']
    assert resolve(parse_args([*flags, *events], environ={}), target, None).checkpoints > 0
