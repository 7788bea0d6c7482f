"""P-EAGLE heads in each published layout against the forward by hand, through an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle_server.engine.engine import Engine
from eagle_server.models.checkpoints.drafts.load_draft import load_draft
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.config import CheckpointError
from eagle_server.models.drafts.peagle import PEagleHead
from eagle_server.models.targets.decoder import TargetModel
from eagle_server.worker.budget.budget import FixedBudget
from tests.support.blocks import planted_peagle
from tests.support.dense import features_of
from tests.support.engines import CONTEXT, MARGIN, admit_without_reserve, random_target, request, run, speculative
from tests.unit.models import draft_checkpoints as dc
from tests.unit.models.draft_checkpoints import CONFIG, VD, H, Semantics, Tensors, V

MASK = 47
_SPECULATORS = {"speculators_model_type": "peagle", "draft_vocab_size": VD, "mask_token_id": MASK}
_AWS = {"draft_vocab_size": VD, "ptd_token_id": MASK}


@cache
def target() -> TargetModel:
    return random_target(V, H, 8)


def speculators(**more: Any) -> dict[str, Any]:
    return {"transformer_layer_config": CONFIG | {"model_type": "qwen3"}, **_SPECULATORS, **more}


def nothing(_: Tensors) -> None:
    """Leaves the tensors as they are."""


def _two_layers(tensors: Tensors) -> None:
    tensors |= dc.layer_tensors("layers.1.", norms=("input_layernorm",))


def _own_embedding(tensors: Tensors) -> None:
    tensors["embed_tokens.weight"] = torch.randn(V, H)


def _normed(tensors: Tensors) -> None:
    tensors |= {f"fc_norm.{i}.weight": dc.norm_weight(H) for i in range(3)}
    tensors["mask_hidden"] = tensors["mask_hidden"].view(-1)


def _normed_before_fc(tensors: Tensors) -> None:
    _two_layers(tensors)
    tensors["input_norm.weight"] = dc.norm_weight(3 * H)
    tensors["mask_hidden"] = tensors["mask_hidden"].view(1, -1)


def _whole_vocabulary(tensors: Tensors) -> None:
    del tensors["d2t"], tensors["t2d"], tensors["lm_head.weight"]


@dataclass(frozen=True)
class Format:
    """A checkpoint's config.json and tensors, and what they mean."""

    config: dict[str, Any]
    edit: Callable[[Tensors], None] = nothing
    how: Semantics = field(default_factory=Semantics)


FORMATS = {
    "speculators": Format(speculators(), _two_layers),
    "speculators, own embedding": Format(speculators(embed_requires_grad=True), _own_embedding),
    "AWS, norm before residual": Format(
        CONFIG | _AWS | {"norm_before_residual": True}, _two_layers, Semantics(norm_before_residual=True)
    ),
    "vLLM's marker, each stream normed": Format(CONFIG | {"draft_vocab_size": VD, "pard_token": MASK}, _normed),
    "AutoModel, streams normed together": Format(
        CONFIG | {"draft_vocab_size": VD, "mask_token_id": MASK, "parallel_drafting": True}, _normed_before_fc
    ),
    "the target's vocabulary and head": Format(CONFIG | {"ptd_token_id": MASK}, _whole_vocabulary),
    "window": Format(
        speculators(transformer_layer_config=CONFIG | {"layer_types": ["sliding_attention"], "sliding_window": 8}),
        how=Semantics(window=8),
    ),
}


def peagle_tensors() -> Tensors:
    tensors = dc.eagle3_tensors()
    return tensors | {"mask_hidden": torch.randn(1, 1, 3 * H)}


def loaded(directory: Path, form: Format, **options: Any) -> tuple[PEagleHead, Tensors]:
    tensors = peagle_tensors()
    form.edit(tensors)
    dc.write(directory, tensors, form.config)
    head = load_draft(directory, target(), Loading(context=CONTEXT, lookahead=MARGIN, progress=False), **options)
    assert isinstance(head, PEagleHead)
    assert (head.algorithm, head.mask_token_id) == ("PEAGLE", MASK)
    return head, tensors


def rows_by_hand(tensors: Tensors, features: Tensor, text: list[int], rows: int, how: Semantics) -> Tensor:
    """Logits [rows, draft vocabulary] of the levels under text[-1], by one causal pass without caches."""
    masks = tensors["mask_hidden"].view(1, -1).expand(rows - 1, -1)
    hidden = dc.reference_combine(tensors, torch.cat([features, masks]))
    tokens = torch.tensor([*text[1:], *[MASK] * (rows - 1)])
    embed = tensors.get("embed_tokens.weight", target().embed)
    _, normed = dc.reference_eagle3(tensors, embed, tokens, hidden, how)
    return normed[-rows:] @ tensors.get("lm_head.weight", target().lm_head.dense_weight()).T


def check_rows(engine: Engine, head: PEagleHead, tensors: Tensors, how: Semantics) -> list[int]:
    """Compare the rows of every tree from now on with the forward by hand. Returns their contexts."""
    drafter, seen = engine.worker.drafter, list[int]()
    propose = drafter.propose

    def compared(draft: Any, batch: Any) -> Any:
        for decode, y in zip(batch.decodes, draft.y, strict=True):
            text = list(decode.all_tokens)
            assert len(text) == decode.seq_len + 1
            features = features_of(target(), text[:-1], head.aux_boundaries)
            by_hand = rows_by_hand(tensors, features, text, len(y), how)
            torch.testing.assert_close(head.logits(y), by_hand, rtol=0, atol=1e-4)
            seen.append(decode.seq_len)
        return propose(draft, batch)

    drafter.propose = compared  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("steps", "topk"), [(4, 1), (2, 2)])
def test_every_layout_equals_the_forward_by_hand(tmp_path: Path, name: str, steps: int, topk: int) -> None:
    form = FORMATS[name]
    head, tensors = loaded(tmp_path, form)
    engine = speculative(target(), head, steps, topk, chunked_prefill_size=7, page_size=2)
    seen = check_rows(engine, head, tensors, form.how)
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, V - 1, (n,), generator=draw).tolist() for n in (3, 17, 12)]
    run(engine, [request(i, prompt, max_tokens=12, temperature=0.5 * i) for i, prompt in enumerate(prompts)])
    outcome = run(engine, [request("again", prompts[1] + [5, 6], max_tokens=6)])
    assert outcome["again"].cached_tokens > 0
    assert len(set(seen)) > 10


def test_rows_after_a_preemption_equal_the_forward_by_hand(tmp_path: Path) -> None:
    form = FORMATS["speculators"]
    head, tensors = loaded(tmp_path, form)
    engine = speculative(target(), head, 3, 2, max_total_tokens=80, page_size=2, disable_radix_cache=True)
    admit_without_reserve(engine.scheduler)
    seen = check_rows(engine, head, tensors, form.how)
    run(engine, [request(i, range(1 + i, 18), max_tokens=16, ignore_eos=True) for i in range(4)])
    assert engine.stats().preemptions > 0
    assert seen


@pytest.mark.parametrize("levels", [2, 4])
def test_chains_take_the_best_token_of_each_row(tmp_path: Path, levels: int) -> None:
    head, _ = loaded(tmp_path, FORMATS["speculators"])
    engine = speculative(target(), head, 4, 1)
    engine.worker.drafting.budget = FixedBudget(levels, levels + 1)
    drafter: Any = engine.worker.drafter
    propose, seen = drafter.propose, list[int]()

    def compared(draft: Any, batch: Any) -> Any:
        tree = propose(draft, batch)
        for y, root, tokens in zip(draft.y, batch.verified_id.tolist(), tree.tokens.tolist(), strict=True):
            best = head.target_ids(head.logits(y).argmax(-1)).tolist()
            assert tokens == [root, *best[: len(tokens) - 1]]
            seen.append(len(tokens))
        return tree

    drafter.propose = compared
    run(engine, [request(0, [3, 4], max_tokens=12), request(1, [5, 9, 2], max_tokens=12)])
    assert max(seen) == levels + 1


@pytest.mark.parametrize(
    ("more", "drafts"),
    [
        ({}, None),
        ({"num_depths": 6}, 6),
        ({"speculators_config": {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 8}]}}, 8),
    ],
)
def test_the_levels_of_the_training_are_the_most_that_it_drafts(
    tmp_path: Path, more: dict[str, Any], drafts: int | None
) -> None:
    assert loaded(tmp_path, Format(speculators(**more)))[0].max_steps == drafts


def test_a_missing_norm_before_residual_is_false(tmp_path: Path) -> None:
    assert not loaded(tmp_path, FORMATS["speculators"])[0].eagle.norm_before_residual


def test_the_start_up_line_says_how_the_files_are_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    loaded(tmp_path, FORMATS["window"])
    line = "a P-EAGLE head: next-token layout, any number of drafts, 1 causal layers, window [8], mask token 47"
    assert f"{line}, streams after layers (2, 4, 5)" in caplog.text


def test_a_drafter_that_is_always_right_gives_all_its_levels_and_the_bonus(tmp_path: Path) -> None:
    model, files = planted_peagle(tmp_path)
    head: Any = load_draft(files, model, Loading(context=CONTEXT, lookahead=MARGIN, progress=False))
    outcome = run(
        speculative(model, head, 4, 1),
        [request(0, [3, 4], max_tokens=41), request(1, [5], max_tokens=41, temperature=0.1)],
    )
    for name, first in (("0", 5), ("1", 6)):
        assert outcome[name].tokens == [(first + i) % 11 for i in range(41)]
        histogram = outcome[name].spec.histogram  # type: ignore[union-attr]
        assert sum(n * (accepted + 1) for accepted, n in enumerate(histogram)) == 5 * sum(histogram)


Edit = Callable[[Tensors, dict[str, Any]], object]
REFUSED: dict[str, tuple[Edit, str]] = {
    "no mask token": (lambda t, c: c.pop("ptd_token_id"), "mask_token_id: a token id in 0..47.*found None"),
    "mask token outside": (lambda t, c: c.update(ptd_token_id=V), "in 0..47.*found 48"),
    "mask token of another type": (lambda t, c: c.update(ptd_token_id="47"), "found '47'"),
    "no mask_hidden": (lambda t, c: t.pop("mask_hidden"), "missing tensors: mask_hidden"),
    "mask_hidden of another width": (lambda t, c: t.update(mask_hidden=torch.ones(1, 1, H)), "mask_hidden: expected"),
    "several mask_hidden": (lambda t, c: t.update(mask_hidden=torch.ones(2, 1, 3 * H)), "mask_hidden: expected"),
    "unknown key": (lambda t, c: c.update(eagle_config={"magic": 1}), "eagle_config: magic: not supported"),
    "foreign flag": (lambda t, c: c.update(eagle_config={"use_mtp_layernorm": True}), "use_mtp_layernorm"),
    "no streams": (lambda t, c: c.update(use_aux_hidden_state=False), "use_aux_hidden_state: false"),
    "number of levels": (lambda t, c: c.update(num_depths=0), "num_depths must be a positive integer"),
    "tensor": (lambda t, c: t.update(extra=torch.ones(1)), "unexpected tensors: extra"),
    "PARD": (lambda t, c: (t.pop("fc.weight"), c.update(pard_token=5)), "recognized as PARD"),
    "UNO": (lambda t, c: t.update({"layers.0.self_attn.q_proj.lora_A.weight": torch.ones(1)}), "recognized as UNO"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unknown_variants_are_refused_by_name(tmp_path: Path, name: str) -> None:
    edit, message = REFUSED[name]
    tensors, config = peagle_tensors(), CONFIG | _AWS
    edit(tensors, config)
    dc.write(tmp_path, tensors, config)
    with pytest.raises(CheckpointError, match=message):
        load_draft(tmp_path, target(), Loading(context=CONTEXT, progress=False))
