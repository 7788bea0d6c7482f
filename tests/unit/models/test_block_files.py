"""Files of block drafters that are refused by name, and defaults on which libraries disagree."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle_server.models.checkpoints.drafts.aux_layers import block_boundaries
from eagle_server.models.checkpoints.drafts.load_draft import load_draft
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.config import CheckpointError
from tests.support.blocks import (
    block_tensors,
    confidence_tensors,
    convolution_tensors,
    edge_tensors,
    qwen3,
    write_block,
)
from tests.support.engines import CONTEXT
from tests.unit.models.test_block import (
    BLOCK,
    DOMINO,
    SLIDING,
    ZLAB,
    Format,
    V,
    domino,
    loaded,
    speculators,
    target,
    zlab,
)

Edit = Callable[[dict[str, Tensor], dict[str, Any]], object]
REFUSED: dict[str, tuple[Edit, str]] = {
    "key": (lambda t, c: c["dflash_config"].update(logit_magic=2), "dflash_config: logit_magic: not supported"),
    "sinks": (lambda t, c: c["dflash_config"].update(attention_sink_bias=True), "attention_sink_bias: True"),
    "projector": (lambda t, c: c["dflash_config"].update(projector_type="mamba"), "projector_type: 'mamba'"),
    "tensor": (lambda t, c: t.update({"layers.0.gate.weight": torch.ones(1)}), "unexpected tensors: layers.0.gate"),
    "streams": (lambda t, c: c["dflash_config"].update(target_layer_ids=[0]), "fc.weight: expected .*boundaries .1."),
    "last layer": (lambda t, c: c["dflash_config"].update(target_layer_ids=[0, 5]), "after the final norm"),
    "no mask": (lambda t, c: c["dflash_config"].pop("mask_token_id"), "mask_token_id: a token id"),
    "mask outside": (lambda t, c: c["dflash_config"].update(mask_token_id=V), "in 0..47.*found 48"),
    "no block size": (lambda t, c: c.pop("block_size"), "block_size must be a positive integer"),
    "root alone": (lambda t, c: c.update(block_size=1), "drafts nothing"),
    "window without size": (lambda t, c: c.update(layer_types=["sliding_attention"] * 2), "there is no sliding_window"),
    "narrow window": (
        lambda t, c: c["dflash_config"].update(use_swa=True, swa_window_size=3, is_causal=False),
        "need a window of at least block_size 4",
    ),
    "adapter": (lambda t, c: c["dflash_config"].update(target_hidden_size=64), "targets of width 64, found 32"),
    "XPress": (lambda t, c: t.update({"xpress_head.w1.weight": torch.ones(1)}), "recognized as XPress"),
    "LiLiCorr": (lambda t, c: t.update({"lilicorr.in.weight": torch.ones(1)}), "recognized as LiLiCorr"),
    "Domino without tensors": (
        lambda t, c: c["dflash_config"].update(projector_type="domino"),
        "embed_proj.2.weight and",
    ),
    "Domino's prefix": (lambda t, c: domino(t), "pure_draft_prefix_len: 0 or 1 is expected, found None"),
    "a longer prefix": (
        lambda t, c: (domino(t), c["dflash_config"].update(DOMINO, pure_draft_prefix_len=2)),
        "pure_draft_prefix_len: 0 or 1 is expected, found 2",
    ),
    "a GRU of another size": (
        lambda t, c: (domino(t), c["dflash_config"].update(DOMINO, gru_hidden_dim=8)),
        "gru_hidden_dim: 8 is stated, but the tensors say 7",
    ),
    "a GRU without its projector": (
        lambda t, c: (domino(t), c["dflash_config"].update(DOMINO, projector_type="dflash")),
        "projector_type: 'dflash' is stated",
    ),
    "a GRU's bias": (
        lambda t, c: (
            domino(t),
            t.update({"prefix_gru.bias_ih_l0": torch.ones(21)}),
            c["dflash_config"].update(DOMINO),
        ),
        "unexpected tensors: prefix_gru.bias_ih_l0",
    ),
    "Domino's scores": (
        lambda t, c: (domino(t), c["dflash_config"].update(DOMINO, output_multiplier=0.5)),
        "a Domino head with .* output_multiplier",
    ),
    "Domino's embedding": (
        lambda t, c: (
            domino(t),
            t.update({"embed_tokens.weight": torch.ones(V, 32)}),
            c["dflash_config"].update(DOMINO),
        ),
        "a Domino head with an embedding of its own",
    ),
    "two layouts": (
        lambda t, c: c["dflash_config"].update(shift_label=True, sample_from_anchor=False),
        "shift_label: True, but sample_from_anchor: False",
    ),
    "a Markov head's rank alone": (
        lambda t, c: c.update(markov_rank=256),
        "markov_rank: 256 is stated, but markov_head.markov_w1.weight is missing",
    ),
    "a Markov head of another rank": (
        lambda t, c: (t.update(edge_tensors("vanilla", 32, V, V)), c.update(markov_rank=0)),
        "markov_rank: 0 is stated, but the tensors say 6",
    ),
    "a selector's rank alone": (
        lambda t, c: c["dflash_config"].update(selector_rank=256),
        "selector_rank: 256 is stated, but candidate_selector.predecessor_codebook is missing",
    ),
    "a selector of another rank": (
        lambda t, c: (t.update(edge_tensors("selector", 32, V, V)), c["dflash_config"].update(selector_rank=8)),
        "selector_rank: 8 is stated, but the tensors say 6",
    ),
    "candidates": (
        lambda t, c: (t.update(edge_tensors("selector", 32, V, V)), c["dflash_config"].update(selector_top_k=0)),
        "selector_top_k must be a positive integer",
    ),
    "a confidence head that is missing": (
        lambda t, c: c.update(enable_confidence_head=True),
        "enable_confidence_head: True is stated, but confidence_head.proj.weight is missing",
    ),
    "a confidence head that is denied": (
        lambda t, c: (t.update(confidence_tensors(32)), c.update(enable_confidence_head=False)),
        "enable_confidence_head: False is stated, but the tensors say True",
    ),
    "convolutions that are missing": (
        lambda t, c: c["dflash_config"].update(conv_kernel_size=2),
        "conv_kernel_size: 2 is stated, but layers.0.attention_conv.base_kernel is missing",
    ),
    "convolutions of another group": (
        lambda t, c: (t.update(convolution_tensors(32, 2)), c["dflash_config"].update(conv_group_size=8)),
        "conv_group_size: 8 is stated, but the tensors say 16",
    ),
    "XPress without tensors": (
        lambda t, c: c.update(xpress_rank=64, xpress_topc=512),
        "xpress_rank, xpress_topc: a variant that is not supported",
    ),
    "LiLiCorr without tensors": (lambda t, c: c.update(lilicorr_hidden_size=64), "lilicorr_hidden_size: a variant"),
    "LiLiCorr in speculators' format": (
        lambda t, c: (c.clear(), c.update(speculators({}, draft_vocab_size=None, lilicorr_enabled=True)(target()))),
        "lilicorr_enabled: a variant",
    ),
    "a scale that nobody defines": (lambda t, c: c.update(logit_scale=0.5), "logit_scale: 0.5 is not supported"),
    "interleaved RoPE": (lambda t, c: c.update(is_neox_style=False), "is_neox_style: False is not supported"),
    "RoPE of a part of a head": (lambda t, c: c["dflash_config"].update(rope_dim=4), "rope_dim: 4 is not supported"),
    "UNO": (lambda t, c: t.update({"layers.0.self_attn.q_proj.lora_A.weight": torch.ones(1)}), "recognized as UNO"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unknown_variants_are_refused_by_name(tmp_path: Path, name: str) -> None:
    edit, message = REFUSED[name]
    tensors, config = block_tensors(target(), 2), zlab({}, **BLOCK)(target())
    edit(tensors, config)
    write_block(tmp_path, tensors, config)
    with pytest.raises(CheckpointError, match=message):
        load_draft(tmp_path, target(), Loading(context=CONTEXT, progress=False))


WARNED = {
    "sliding_window_non_causal": speculators(SLIDING, draft_vocab_size=None),
    "sample_from_anchor": lambda t: qwen3(t, **ZLAB, **BLOCK),
    "rope_theta": zlab({}, **BLOCK, rope_theta=None),
    "shift_label": zlab(DOMINO, **BLOCK),
    "is_causal": zlab({"causal": True}, **BLOCK),
    "use_sliding_window: true": zlab({}, **BLOCK, **{**SLIDING, "use_sliding_window": None}),
}


@pytest.mark.parametrize("key", WARNED)
def test_a_default_on_which_libraries_disagree_is_named_with_the_flag(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, key: str
) -> None:
    loaded(tmp_path, Format(WARNED[key], edit=domino if key == "shift_label" else lambda _: None))
    assert f"{key} is not stated" in caplog.text
    assert "--speculative-draft-config-override" in caplog.text


@pytest.mark.parametrize("stated", [None, True, False])
def test_an_override_takes_the_windows_out(tmp_path: Path, caplog: pytest.LogCaptureFixture, *, stated: Any) -> None:
    config = zlab({}, **BLOCK, **{**SLIDING, "use_sliding_window": stated})(target())
    write_block(tmp_path, block_tensors(target(), 2), config)
    how = Loading(context=CONTEXT, progress=False)
    assert load_draft(tmp_path, target(), how).kv.windows == (8, 0)  # type: ignore[union-attr]
    assert ("use_sliding_window: true is not stated" in caplog.text) == (stated is not True)
    head = load_draft(tmp_path, target(), how, overrides={"use_sliding_window": False})
    assert head.kv.windows == (0, 0)  # type: ignore[union-attr]


def test_the_log_says_how_a_head_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    config = zlab({"sample_from_anchor": True}, **BLOCK, **SLIDING)(target())
    tensors = block_tensors(target(), 2) | edge_tensors("vanilla", 32, V, V) | confidence_tensors(32)
    load_draft(write_block(tmp_path, tensors, config), target(), Loading(context=CONTEXT, progress=False))
    assert (
        "a block drafter: next-token layout, 4 drafts of 4 rows, bidirectional and causal, vanilla edges, confidence "
        "(not used), window [8], mask token 47, streams after layers (1, 4)" in caplog.text
    )


def test_target_layer_ids_are_outputs_and_others_boundaries(tmp_path: Path) -> None:
    ids = [
        ({"dflash_config": {"target_layer_ids": [-1, 2]}}, (0, 3)),
        ({"target_layer_ids": [1, 3]}, (2, 4)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3], "target_layer_ids": [1, 3]}, (1, 3)),
        ({"aux_hidden_state_layer_ids": [2, 5]}, (2, 5)),
        ({"speculators_model_type": "dflash"}, (2, 4, 5)),
        ({}, (2, 6)),  # outputs 1 and 5 of 8 layers
    ]
    for config, boundaries in ids:
        assert block_boundaries(config, 2, 8, "config.json") == boundaries


def test_variants_that_are_switched_off_are_none(tmp_path: Path) -> None:
    sizes = {"markov_rank": 0, "selector_rank": 0, "conv_kernel_size": 0, "xpress_rank": 0, "xpress_topc": 512}
    flags = {"enable_confidence_head": False, "lilicorr_enabled": False, "lilicorr_hidden_size": 64}
    head, _ = loaded(tmp_path, Format(zlab({}, **BLOCK, **sizes, **flags)))
    assert head.edges is None


def test_a_markov_head_of_another_type_is_refused(tmp_path: Path) -> None:
    tensors = block_tensors(target(), 2) | edge_tensors("gated", 32, V, V)
    write_block(tmp_path, tensors, qwen3(target(), **ZLAB, **BLOCK, markov_rank=6, markov_head_type="rnn"))
    with pytest.raises(CheckpointError, match="markov_head_type: 'rnn' is stated, but the tensors say 'gated'"):
        load_draft(tmp_path, target(), Loading(context=CONTEXT, progress=False))


@pytest.mark.parametrize("width, stated", [(33, None), (32, True), (32 + 6, False)])
def test_a_confidence_head_that_reads_something_else_is_refused(
    tmp_path: Path, width: int, *, stated: bool | None
) -> None:
    tensors = block_tensors(target(), 2) | edge_tensors("vanilla", 32, V, V) | confidence_tensors(width)
    stating = {} if stated is None else {"confidence_head_with_markov": stated}
    write_block(tmp_path, tensors, qwen3(target(), **ZLAB, **BLOCK, markov_rank=6, **stating))
    with pytest.raises(CheckpointError, match=rf"confidence_head_with_markov: .* reads {width} numbers; .* \[32, 38\]"):
        load_draft(tmp_path, target(), Loading(context=CONTEXT, progress=False))
