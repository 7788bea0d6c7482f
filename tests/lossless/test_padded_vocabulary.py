"""A draft whose vocabulary has other rows of padding than the target's: the texts are those without drafts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle_server.models.checkpoints.drafts.load_draft import load_draft
from eagle_server.models.checkpoints.load_target import load_target
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.config import CheckpointError
from eagle_server.ops.native.library import use_native
from eagle_tools.training.tiny import BOUNDARIES, tiny_pair
from tests.support.blocks import BlockSpec, block_tensors, edge_tensors, qwen3, trained_block, write_block
from tests.support.engines import plain, request, run, speculative, tokens_of

ROWS = 64  # of the tokenizer
MORE = ROWS + 21  # no multiple of what kernels take at once
MASK = 63


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with embeddings of ROWS and of MORE rows; the others are random, as padding is."""
    root = tmp_path_factory.mktemp("models")
    narrow = tiny_pair(root, kind="eagle", steps=30, vocab=ROWS).target
    wide = root / "wide"
    shutil.copytree(narrow, wide)
    config, tensors = json.loads((wide / "config.json").read_text()), load_file(wide / "model.safetensors")
    (wide / "config.json").write_text(json.dumps({**config, "vocab_size": MORE}))
    generator = torch.Generator().manual_seed(1)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            more = torch.randn(MORE - ROWS, tensors[name].shape[1], generator=generator) * tensors[name].std()
            tensors[name] = torch.cat([tensors[name], more.to(tensors[name].dtype)])
    save_file(tensors, wide / "model.safetensors")
    shutil.copytree(narrow, root / "narrow")
    return root


REQUESTS = [
    request(i, [1 + (7 * i + j) % 60 for j in range(5 + 4 * i)], max_tokens=24, seed=i, temperature=t, ignore_eos=True)
    for i, t in enumerate((0.0, 0.0, 1.0, 0.7, 3.0))
]


def texts_without_drafts(served: Any, draft: Any) -> dict[str, list[int]]:
    """The tokens of the requests, which are the same with the draft. Some drafts are accepted, and some are not."""
    expected = tokens_of(run(plain(served), REQUESTS))
    engine = speculative(served, draft, 3, 8)
    assert tokens_of(run(engine, REQUESTS)) == expected
    stats = engine.stats()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    return expected


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize(("target", "draft"), [("wide", "narrow"), ("narrow", "wide")])
def test_texts_are_those_without_drafts(
    models: Path, target: str, draft: str, quantization: Any, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels == "torch":
        if quantization:
            pytest.skip("rounded weights are the native kernels'")
        monkeypatch.setattr("eagle_server.ops.native.library._enabled", False)
    else:
        use_native("native")
    how = Loading(context=256, lookahead=16, progress=False, quantization=quantization)
    served = load_target(models / target, how, dtype="float32")
    smaller = load_draft(models / draft, served, how, algorithm="STANDALONE", target_path=models / target)
    expected = texts_without_drafts(served, smaller)
    if target == "wide":
        assert max(max(tokens) for tokens in expected.values()) >= ROWS, "the hot request draws a row of padding"
    assert smaller.draft_vocab_size == ROWS


def test_a_row_that_the_tokenizer_needs_is_refused(models: Path, tmp_path: Path) -> None:
    for name in ("narrow", "wide"):
        shutil.copytree(models / name, tmp_path / name)
        file = tmp_path / name / "tokenizer.json"
        values = json.loads(file.read_text())
        values["model"]["vocab"]["zz"] = ROWS
        file.write_text(json.dumps(values))
    how = Loading(context=256, progress=False)
    served = load_target(tmp_path / "wide", how, dtype="float32")
    with pytest.raises(CheckpointError, match=rf"vocab_size {ROWS}, but the target's is {MORE}, and the tokenizer has"):
        load_draft(tmp_path / "narrow", served, how, algorithm="STANDALONE", target_path=tmp_path / "wide")
    with pytest.raises(CheckpointError, match="their tokenizers cannot be compared"):
        load_draft(tmp_path / "narrow", served, how, algorithm="STANDALONE")


@pytest.fixture(scope="module")
def heads(models: Path) -> Path:
    """EAGLE heads for each target: sharing its embedding, with a copy of it, with one of their own; EAGLE-3 heads."""
    pair = tiny_pair(models / "deeper", kind="eagle3", steps=30, vocab=ROWS)
    for name in ("narrow", "wide"):
        target = load_file(models / name / "model.safetensors")
        embed, rows = target["model.embed_tokens.weight"], {"narrow": ROWS, "wide": MORE}[name]
        lm_head = target.get("lm_head.weight", embed)
        changed = {"embed_tokens.weight": embed * 1.1, "lm_head.weight": lm_head * 0.9}
        copied = {"embed_tokens.weight": embed, "lm_head.weight": lm_head}
        _head(models / "eagle", models / f"eagle {name}", rows, {})
        _head(models / "eagle", models / f"eagle copied {name}", rows, copied)
        _head(models / "eagle", models / f"eagle own {name}", rows, {"embed_tokens.weight": embed * 1.1})
        marks = load_file(pair.draft / "model.safetensors")["t2d"]
        t2d = torch.cat([marks, marks.new_zeros(rows - ROWS)])
        _head(pair.draft, models / f"eagle3 map {name}", rows, {"t2d": t2d})
        _head(pair.draft, models / f"eagle3 own {name}", rows, {**changed, "d2t": None, "t2d": None})
    return models


@pytest.fixture(scope="module")
def blocks(models: Path) -> Path:
    """Block drafters for each target: with a Markov head, a selector, Domino's GRU, all of their own, and a map."""
    target = load_target(models / "narrow", Loading(progress=False, pack=False), dtype="float32")
    trunk, hidden = block_tensors(target, 2), target.config.hidden_size
    trained_block(BlockSpec(trunk, (1, 2), True, (0, 0), (False, False), MASK), target, block_size=4)
    flags = {"target_layer_ids": [0, 1], "mask_token_id": MASK, "sample_from_anchor": True, "block_size": 4}
    domino = {"projector_type": "domino", "pure_draft_prefix_len": 1, "shift_label": True}
    ids = torch.arange(1, ROWS, 2)
    for name, rows in (("narrow", ROWS), ("wide", MORE)):
        stored = load_file(models / name / "model.safetensors")
        embed = stored["model.embed_tokens.weight"]
        own = {"embed_tokens.weight": embed * 1.1, "lm_head.weight": stored.get("lm_head.weight", embed) * 0.9}
        t2d = torch.zeros(rows, dtype=torch.bool).index_fill(0, ids, value=True)
        reduced = {"lm_head.weight": own["lm_head.weight"][ids], "d2t": ids - torch.arange(len(ids)), "t2d": t2d}
        config = qwen3(target, vocab_size=rows)
        edges = {kind: edge_tensors(kind, hidden, rows, rows, std=0.2) for kind in ("vanilla", "selector", "gru")}
        named = {
            "markov": (edges["vanilla"], {**config, **flags}),
            "domino": (edges["gru"], {**config, **flags, **domino}),
            "own": (edges["vanilla"] | own, {**config, **flags}),
            "map": (edge_tensors("vanilla", hidden, rows, len(ids), std=0.2) | reduced, {**config, **flags}),
            "speculators": (
                edges["selector"],
                {
                    "speculators_model_type": "dflash2",
                    "transformer_layer_config": config,
                    "draft_vocab_size": rows,
                    **flags,
                },
            ),
        }
        for kind, (more, written) in named.items():
            write_block(models / f"block {kind} {name}", trunk | more, written)
    return models


@pytest.mark.parametrize("kind", ["markov", "speculators", "domino", "own", "map"])
@pytest.mark.parametrize(("target", "draft"), [("wide", "narrow"), ("narrow", "wide")])
def test_texts_with_block_drafters_are_those_without(blocks: Path, kind: str, target: str, draft: str) -> None:
    use_native("native")
    served = load_target(blocks / target, Loading(context=256, lookahead=16, progress=False), dtype="float32")
    how = Loading(context=256, lookahead=16, progress=False)
    head = load_draft(blocks / f"block {kind} {draft}", served, how, target_path=blocks / target)
    texts_without_drafts(served, head)
    drafted = {("own", "narrow"): ROWS, ("map", "narrow"): 32, ("map", "wide"): 32}
    assert head.draft_vocab_size == drafted.get((kind, draft), served.config.vocab_size)


def test_a_mask_token_that_the_target_lacks_is_refused(blocks: Path, tmp_path: Path) -> None:
    config = json.loads((blocks / "block markov wide" / "config.json").read_text())
    shutil.copytree(blocks / "block markov wide", tmp_path / "head")
    (tmp_path / "head" / "config.json").write_text(json.dumps({**config, "mask_token_id": ROWS + 3}))
    served = load_target(blocks / "narrow", Loading(context=256, progress=False), dtype="float32")
    with pytest.raises(CheckpointError, match=rf"mask_token_id: a token id in 0..{ROWS - 1}.* found {ROWS + 3}"):
        load_draft(tmp_path / "head", served, Loading(context=256, progress=False), target_path=blocks / "narrow")


def _head(source: Path, to: Path, rows: int, change: dict[str, torch.Tensor | None]) -> None:
    """A copy of a head, for a target with this many rows. None takes a tensor out."""
    shutil.copytree(source, to)
    tensors = {**load_file(to / "model.safetensors"), **change}
    save_file({name: value.clone() for name, value in tensors.items() if value is not None}, to / "model.safetensors")
    config = {**json.loads((to / "config.json").read_text()), "vocab_size": rows}
    if "d2t" in change:
        config["draft_vocab_size"] = rows
    (to / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("kind", ["eagle", "eagle copied", "eagle own", "eagle3 map", "eagle3 own"])
@pytest.mark.parametrize(("target", "draft"), [("wide", "narrow"), ("narrow", "wide")])
def test_texts_with_heads_are_those_without(heads: Path, kind: str, target: str, draft: str) -> None:
    use_native("native")
    how = Loading(context=256, lookahead=16, progress=False)
    served = load_target(heads / target, how, dtype="float32")
    overrides = {"aux_boundaries": BOUNDARIES} if kind.startswith("eagle3") else {}
    head = load_draft(heads / f"{kind} {draft}", served, how, overrides=overrides, target_path=heads / target)
    texts_without_drafts(served, head)
    if kind == "eagle copied":
        names = {name for name, _ in head.weight_views()}
        assert not names & {"embed_tokens.weight", "lm_head.weight"}, "copies are shared with the target"
    if (kind, draft) == ("eagle3 own", "narrow"):
        assert head.draft_vocab_size == ROWS, "what the head does not have is never drafted"


def test_a_head_without_a_row_that_the_tokenizer_needs_is_refused(heads: Path, tmp_path: Path) -> None:
    shutil.copytree(heads / "wide", tmp_path / "wide")
    file = tmp_path / "wide" / "tokenizer.json"
    values = json.loads(file.read_text())
    values["model"]["vocab"]["zz"] = ROWS
    file.write_text(json.dumps(values))
    how = Loading(context=256, progress=False)
    served = load_target(tmp_path / "wide", how, dtype="float32")
    for kind in ("eagle", "eagle own"):
        with pytest.raises(CheckpointError, match="another target"):
            load_draft(heads / f"{kind} narrow", served, how, target_path=tmp_path / "wide")
    shutil.copytree(heads / "eagle own narrow", tmp_path / "head")
    shutil.copy(heads / "narrow" / "tokenizer.json", tmp_path / "head")
    with pytest.raises(CheckpointError, match="token 'zz' is None there and 64 in the target's"):
        load_draft(tmp_path / "head", served, how, target_path=tmp_path / "wide")
