"""Block drafters in each published layout against the forward by hand, through an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from eagle_server.engine.engine import Engine
from eagle_server.models.checkpoints.drafts.load_draft import load_draft
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.drafts.block import BlockHead
from eagle_server.models.layers import Linear
from eagle_server.models.targets.decoder import TargetModel
from eagle_server.ops.linear.packed import why_not_computed
from eagle_server.plan import TreeShape
from tests.support.blocks import (
    BlockSpec,
    block_logits,
    block_rows,
    block_tensors,
    confidence_tensors,
    convolution_tensors,
    edge_tensors,
    planted,
    qwen3,
    write_block,
)
from tests.support.dense import features_of
from tests.support.engines import CONTEXT, MARGIN, admit_without_reserve, random_target, request, run, speculative

V, MASK = 48, 47
BLOCK = {"block_size": 4}
ZLAB = {"target_layer_ids": [0, 3], "mask_token_id": MASK}
_SPECULATORS = {"aux_hidden_state_layer_ids": [1, 4], "mask_token_id": MASK, "sample_from_anchor": False}


@cache
def target() -> TargetModel:
    return random_target(V, 32, 6)


@dataclass(frozen=True)
class Format:
    """A checkpoint's config.json, and what it means."""

    config: Callable[[TargetModel], dict[str, Any]]
    next_token: bool = False
    windows: tuple[int, ...] = (0, 0)
    causal: tuple[bool, ...] = (False, False)
    biases: bool = False
    edit: Callable[[dict[str, Tensor]], object] = lambda _: None
    extra: Mapping[str, Any] = field(default_factory=dict)  # see `BlockSpec`


def zlab(dflash: Mapping[str, Any], **more: Any) -> Callable[[TargetModel], dict[str, Any]]:
    return lambda t: qwen3(t, architectures=["DFlashDraftModel"], dflash_config={**ZLAB, **dflash}, **more)


def speculators(layers: Mapping[str, Any], **more: Any) -> Callable[[TargetModel], dict[str, Any]]:
    return lambda t: {
        "speculators_model_type": "dflash",
        "transformer_layer_config": qwen3(t, **layers),
        **_SPECULATORS,
        **BLOCK,
        **more,
    }


def _reduced(tensors: dict[str, Tensor]) -> None:
    """Every second token of the target, with an lm_head of its own."""
    draw, ids = torch.Generator().manual_seed(5), torch.arange(1, V, 2)
    tensors["lm_head.weight"] = torch.randn(len(ids), 32, generator=draw) * 0.25
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill(0, ids, value=True)


def _dflash2(tensors: dict[str, Tensor]) -> None:
    tensors |= edge_tensors("selector", 32, V, V) | convolution_tensors(32, 2)


def _own_embedding(tensors: dict[str, Tensor]) -> None:
    tensors["embed_tokens.weight"] = torch.randn(V, 32, generator=torch.Generator().manual_seed(6))


def domino(tensors: dict[str, Tensor]) -> None:
    tensors |= edge_tensors("gru", 32, V, V)


def _dspark(tensors: dict[str, Tensor], kind: str = "rnn") -> None:
    tensors |= edge_tensors(kind, 32, V, V)


_SELECTOR = {"selector_rank": 6, "selector_top_k": 16, "conv_kernel_size": 2, "conv_group_size": 16}
DOMINO = {"projector_type": "domino", "pure_draft_prefix_len": 1, "emb_dim": 6, "gru_hidden_dim": 7}
SLIDING = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 8,
    "use_sliding_window": True,
}
FORMATS = {
    "z-lab": Format(zlab({}, **BLOCK)),
    "z-lab, block size inside": Format(zlab(BLOCK), biases=True),
    "z-lab, a causal layer with a window": Format(zlab({}, **BLOCK, **SLIDING), windows=(8, 0), causal=(True, False)),
    "z-lab, windows that see later rows": Format(
        zlab({"use_swa": True, "swa_window_size": 8, "is_causal": False}, **BLOCK), windows=(8, 8)
    ),
    "DFlash 2": Format(zlab({"is_causal": False, "selector_rank": 6}, **BLOCK), edit=_dflash2),
    "DSpark": Format(
        lambda t: qwen3(t, **ZLAB, **BLOCK, markov_rank=6, markov_head_type="rnn"), next_token=True, edit=_dspark
    ),
    "Domino, next token": Format(zlab({**DOMINO, "shift_label": True}, **BLOCK), next_token=True, edit=domino),
    "Domino, fill-in": Format(zlab({**DOMINO, "shift_label": False}, **BLOCK), edit=domino),
    "JetSpec": Format(zlab({"causal_head": True}, **BLOCK), causal=(True, True)),
    "DeepSpec": Format(lambda t: qwen3(t, **ZLAB, **BLOCK, markov_rank=0), next_token=True),
    "speculators": Format(speculators({}, draft_vocab_size=24), edit=_reduced),
    "speculators, next token, windows": Format(
        speculators(SLIDING, sample_from_anchor=True, sliding_window_non_causal=False, draft_vocab_size=None),
        next_token=True,
        windows=(8, 0),
        causal=(True, False),
    ),
    "speculators, windows that see later rows": Format(
        speculators(SLIDING, sliding_window_non_causal=True, draft_vocab_size=None), windows=(8, 0)
    ),
    "speculators' DFlash 2": Format(
        speculators({}, speculators_model_type="dflash2", draft_vocab_size=V, **_SELECTOR), edit=_dflash2
    ),
    "speculators' DSpark": Format(
        speculators({}, speculators_model_type="dspark", sample_from_anchor=True, draft_vocab_size=V, markov_rank=6),
        next_token=True,
        edit=_dspark,
    ),
    "scales, a softcap and its own embedding": Format(
        zlab({"input_embedding_scale": 3.0, "output_multiplier": 0.4, "final_logit_softcapping": 2.0}, **BLOCK),
        edit=_own_embedding,
        extra={"embed_scale": 3.0, "multiplier": 0.4, "softcap": 2.0},
    ),
}


def loaded(directory: Path, form: Format) -> tuple[BlockHead, BlockSpec]:
    tensors = block_tensors(target(), 2, biases=form.biases)
    form.edit(tensors)
    write_block(directory, tensors, form.config(target()))
    head = load_draft(directory, target(), Loading(context=CONTEXT, lookahead=MARGIN, progress=False))
    assert isinstance(head, BlockHead)
    return head, BlockSpec(tensors, (1, 4), form.next_token, form.windows, form.causal, MASK, form.extra)


@pytest.mark.parametrize(
    "kind, confidence",
    [
        *(("selector", 0), ("selector of 3", 0), ("vanilla", 0), ("gated", 32), ("rnn", 0), ("rnn", 32 + 6)),
        *(("gru", 0), ("gru after the root", 0)),
    ],
)
@pytest.mark.parametrize("reduced", [False, True])
def test_chains_take_the_best_token_given_its_parent(
    tmp_path: Path, kind: str, confidence: int, *, reduced: bool
) -> None:
    """confidence: the numbers that its head reads; 0: there is none."""
    prefix, candidates = 0 if kind == "gru after the root" else 1, 3 if kind == "selector of 3" else 16
    more = {"pure_draft_prefix_len": prefix} if kind.startswith("gru") else {}
    if kind == "selector of 3":
        more = {"selector_top_k": candidates}

    def edit(tensors: dict[str, Tensor]) -> None:
        if reduced:
            _reduced(tensors)
        tensors |= edge_tensors(kind.partition(" ")[0], 32, V, 24 if reduced else V)
        if confidence:
            tensors |= confidence_tensors(confidence)

    config = zlab({"sample_from_anchor": True, **more}, **BLOCK)
    head, spec = loaded(tmp_path, Format(config, next_token=True, edit=edit))
    spec = replace(spec, extra={"embed": target().embed, "prefix": prefix})
    engine = speculative(target(), head, 4, 1)
    proposer = cast(Any, engine.worker.drafter).proposer
    proposer.native_edges = (
        None  # a selector's trees grow in one native call, which test_row_trees.py compares with this
    )
    grow, seen = proposer._grow, list[bool]()

    def compared(roots: Tensor, y: Tensor, scores: Tensor, ranking: Any) -> Any:
        levels, expanded = grow(roots, y, scores, ranking)
        for number, root in enumerate(roots.tolist()):
            path = [root]
            for row, level in enumerate(levels):
                base = scores[number, row].float()
                kept = base.topk(candidates if kind.startswith("selector") else len(base)).indices
                conditioned = base.index_add(0, kept, spec.edges(y[number], path)[kept])
                best = int(kept[conditioned[kept].argmax()])
                path.append(int(head.target_ids(torch.tensor(best))))
                assert level.tokens[number].flatten().tolist() == path[-1:]
                expected = conditioned.log_softmax(0)[best]
                torch.testing.assert_close(level.guesses[number].flatten()[0], expected, rtol=0, atol=1e-4)
                seen.append(best != int(base.argmax()))
        return levels, expanded

    proposer._grow = compared
    run(engine, [request(0, [3, 4], max_tokens=12), request(1, [5, 9, 2], max_tokens=12)])
    assert any(seen)
    assert not all(seen)


@pytest.mark.parametrize("kind", ["gated", "rnn", "gru"])
def test_trees_score_a_child_given_its_whole_path(tmp_path: Path, kind: str) -> None:
    more = {"pure_draft_prefix_len": 1} if kind == "gru" else {}
    config = zlab({"sample_from_anchor": True, **more}, **BLOCK)
    edges = edge_tensors(kind, 32, V, V)
    head, spec = loaded(tmp_path, Format(config, next_token=True, edit=lambda tensors: tensors.update(edges)))
    spec = replace(spec, extra={"embed": target().embed, "prefix": 1})
    engine = speculative(target(), head, 4, 3)
    proposer = cast(Any, engine.worker.drafter).proposer
    grow, seen = proposer._grow, set[bool]()

    def compared(roots: Tensor, y: Tensor, scores: Tensor, ranking: Any) -> Any:
        levels, expanded = grow(roots, y, scores, ranking)
        paths = [[int(roots[0])]]
        for row, level in enumerate(levels):
            tokens, guesses = (part[0].view(len(paths), 3) for part in (level.tokens, level.guesses))
            for path, children, found in zip(paths, tokens, guesses, strict=True):
                best = (scores[0, row].float() + spec.edges(y[0], path)).log_softmax(0).topk(3)
                assert children.tolist() == best.indices.tolist()
                torch.testing.assert_close(found, best.values, rtol=0, atol=1e-4)
            places = range(3) if row == 0 else expanded[row - 1][0].tolist() if row < len(levels) - 1 else ()
            seen.update(row > 0 and place // 3 > 0 for place in places)
            paths = [[*paths[place // 3], int(tokens.flatten()[place])] for place in places]
        return levels, expanded

    proposer._grow = compared
    run(engine, [request(0, [3, 4], max_tokens=12)])
    assert seen == {False, True}


def test_rows_after_a_preemption_equal_the_forward_by_hand(tmp_path: Path) -> None:
    head, spec = loaded(tmp_path, FORMATS["z-lab, a causal layer with a window"])
    engine = speculative(target(), head, 2, 2, max_total_tokens=72, page_size=2, disable_radix_cache=True)
    admit_without_reserve(engine.scheduler)
    seen = check_rows(engine, head, spec)
    run(engine, [request(i, range(1 + i, 18), max_tokens=16, ignore_eos=True) for i in range(4)])
    assert engine.stats().preemptions > 0
    assert seen


def check_rows(engine: Engine, head: BlockHead, spec: BlockSpec) -> list[int]:
    """Compare every block that the engine computes from now on with the forward by hand. Returns their contexts."""
    drafter, rows, seen = engine.worker.drafter, head.rows, list[int]()
    texts, shapes = list[tuple[int, list[int]]](), list[TreeShape]()
    propose = drafter.propose

    def watched(draft: Any, batch: Any) -> Any:
        texts[:] = [(decode.seq_len, list(decode.all_tokens)) for decode in batch.decodes]
        shapes.append(TreeShape(batch.steps, batch.nodes))
        return propose(draft, batch)

    def compared(roots: Tensor, positions: Tensor, attention: Any) -> Tensor:
        y = rows(roots, positions, attention)
        assert y.shape[1] == drafter.forwards(shapes[-1])[1]
        for (length, text), root, mine in zip(texts, roots.tolist(), y, strict=True):
            assert text[length] == root
            features = features_of(target(), text[:length], tuple(spec.boundaries))
            by_hand = block_rows(spec, target(), features, *torch.tensor([[root], [length]]), len(mine))[0]
            torch.testing.assert_close(mine, by_hand, rtol=0, atol=1e-4)
            torch.testing.assert_close(head.logits(mine), block_logits(spec, target(), by_hand), rtol=0, atol=1e-4)
            seen.append(length)
        return y

    drafter.propose, head.rows = watched, compared  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("steps", [2, None])
def test_every_layout_equals_the_forward_by_hand(tmp_path: Path, name: str, steps: int | None) -> None:
    """steps: None: as many as the block has drafts."""
    head, spec = loaded(tmp_path, FORMATS[name])
    assert head.max_steps == (4 if spec.next_token else 3)
    engine = speculative(target(), head, steps or head.max_steps, 2, chunked_prefill_size=7, page_size=2)
    seen = check_rows(engine, head, spec)
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, V - 1, (n,), generator=draw).tolist() for n in (3, 33, 12)]
    requests = [request(i, prompt, max_tokens=9, temperature=0.5 * i) for i, prompt in enumerate(prompts)]
    run(engine, requests)
    outcome = run(engine, [request("again", prompts[1] + [5, 6], max_tokens=6)])
    assert outcome["again"].cached_tokens > 0
    assert len(set(seen)) > 10


@pytest.mark.parametrize("next_token", [False, True])
def test_a_drafter_that_is_always_right_gives_all_its_rows_and_the_bonus(tmp_path: Path, *, next_token: bool) -> None:
    assert per_forward(tmp_path, next_token=next_token) == (4 if next_token else 3) + 1


def test_the_other_layout_accepts_nothing_of_it(tmp_path: Path) -> None:
    flipped = {"dflash_config": {"sample_from_anchor": False}}
    assert per_forward(tmp_path, next_token=True, overrides=flipped) == 1


@pytest.mark.parametrize("next_token", [False, True])
def test_a_draft_that_is_read_wrongly_is_warned_of_with_the_usual_causes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, next_token: bool
) -> None:
    model, files = planted(tmp_path, next_token=True)
    read = {"dflash_config": {"sample_from_anchor": next_token}}
    head: Any = load_draft(files, model, Loading(context=CONTEXT, lookahead=MARGIN, progress=False), overrides=read)
    run(speculative(model, head, 3, 1), [request(i, [i], max_tokens=220) for i in range(1, 6)])
    warned = "only 0 % of the first drafts were accepted in 2" in caplog.text
    assert warned != next_token
    causes = ("sample_from_anchor", "target_layer_ids", "sliding_window", "mask_token_id", "another target")
    assert next_token or all(cause in caplog.text for cause in causes)


def per_forward(directory: Path, *, next_token: bool, **options: Any) -> float:
    """Tokens per target forward of a planted pair, in chains of all rows."""
    model, files = planted(directory, next_token=next_token)
    head: Any = load_draft(files, model, Loading(context=CONTEXT, lookahead=MARGIN, progress=False), **options)
    engine = speculative(model, head, head.max_steps, 1)
    outcome = run(engine, [request(0, [3, 4], max_tokens=41), request(1, [5], max_tokens=41, temperature=0.1)])
    assert outcome["0"].tokens == [(5 + i) % 11 for i in range(41)]
    histogram = outcome["0"].spec.histogram  # type: ignore[union-attr]
    return sum(n * (accepted + 1) for accepted, n in enumerate(histogram)) / sum(histogram)


@pytest.mark.parametrize("width", [32, 32 + 6])
def test_confidence_reads_the_row_and_its_parents_code(tmp_path: Path, width: int) -> None:
    tensors = edge_tensors("vanilla", 32, V, V) | confidence_tensors(width)
    head, _ = loaded(tmp_path, Format(zlab({}, **BLOCK), edit=lambda t: t.update(tensors)))
    y, parents = torch.randn(3, 32), torch.tensor([[1, 2], [MASK, 0], [7, 7]])
    weight, bias = (tensors[f"confidence_head.proj.{name}"] for name in ("weight", "bias"))
    for row, below in enumerate(parents.tolist()):
        for column, parent in enumerate(below):
            read = torch.cat([y[row], tensors["markov_head.markov_w1.weight"][parent]])[:width]
            found = head.confidence_logits(y, parents)[row, column]
            torch.testing.assert_close(found, weight[0] @ read + bias[0])


def test_an_lm_head_of_its_own_wins_over_the_targets(tmp_path: Path) -> None:
    tensors = block_tensors(target(), 2) | {"lm_head.weight": torch.randn(V, 32)}
    write_block(tmp_path, tensors, zlab({}, **BLOCK)(target()))
    head: Any = load_draft(tmp_path, target(), Loading(context=CONTEXT, progress=False))
    y = torch.randn(3, 32)
    torch.testing.assert_close(head.logits(y)[:, :MASK], (y @ tensors["lm_head.weight"].t())[:, :MASK])


def test_the_mask_token_is_never_drafted(tmp_path: Path) -> None:
    head, _ = loaded(tmp_path / "all", FORMATS["z-lab"])
    assert head.logits(torch.randn(3, 32))[:, MASK].isneginf().all()
    head, _ = loaded(tmp_path / "some", FORMATS["speculators"])  # odd tokens, so the mask's draft id is 23
    assert head.target_ids(torch.tensor(23)) == MASK
    assert head.logits(torch.randn(3, 32)).isneginf().nonzero().tolist() == [[row, 23] for row in range(3)]
    head, _ = loaded(tmp_path / "none", Format(speculators({}, draft_vocab_size=24, mask_token_id=2), edit=_reduced))
    assert head.logits(torch.randn(3, 32)).isfinite().all()


def test_drafts_follow_the_parameters_of_the_request(tmp_path: Path) -> None:
    head, _ = loaded(tmp_path, FORMATS["z-lab"])
    engine = speculative(target(), head, 3, 2)
    drafted = list[Tensor]()
    engine.worker.observers.append(lambda cycle: drafted.append(cycle.tree.tokens[:, 1:]))
    allowed = [3, 8, 11, 20]
    run(engine, [request(0, [3, 4], max_tokens=12, allowed_token_ids=allowed, temperature=1.0)])
    assert set(torch.cat([each.flatten() for each in drafted]).tolist()) <= {-1, *allowed}
    assert len(drafted) > 2


def test_mask_embedding_beside_the_config_replaces_the_tokens(tmp_path: Path) -> None:
    embedding = torch.randn(32)
    torch.save({"embedding": embedding, "mask_token_id": 5, "per_position": False}, tmp_path / "mask_embedding.pt")
    head, spec = loaded(tmp_path, FORMATS["z-lab"])
    assert head.block.mask_token_id == 5
    spec = BlockSpec(spec.tensors, (1, 4), False, (0, 0), (False, False), 5, {"mask_embedding": embedding})
    engine = speculative(target(), head, 3, 1)
    seen = check_rows(engine, head, spec)
    run(engine, [request(0, [3, 4], max_tokens=4)])
    assert seen


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", [48, 40])  # packed outputs are in groups of 16
def test_some_outputs_of_a_packed_layer_are_those_of_all(quantization: Any, dtype: torch.dtype, first: int) -> None:
    if quantization is not None and (reason := why_not_computed(quantization, torch.device("cpu"), dtype)):
        pytest.skip(reason)
    torch.manual_seed(0)
    linear = Linear(96, [("q_proj", first), ("kv", 40)], bias=True).to(dtype).requires_grad_(requires_grad=False)
    linear.weight.normal_()
    linear.bias.normal_()  # type: ignore[union-attr]
    x = torch.randn(5, 96, dtype=dtype)
    torch.testing.assert_close(linear.outputs_from(x, first), linear(x)[:, first:], rtol=0, atol=1e-2)
    linear.pack(quantization)
    assert torch.equal(linear.outputs_from(x, first), linear(x)[:, first:])
