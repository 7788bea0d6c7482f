"""Draft checkpoints that must be refused, with a message that names the file and the reason."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_server.models.checkpoints.drafts.load_draft import load_draft
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.config import CheckpointError
from eagle_server.models.targets.decoder import TargetModel
from tests.unit.models import draft_checkpoints as dc
from tests.unit.models.draft_checkpoints import CONFIG, CONTEXT, VD, H, Tensors, V

EAGLE3: dict[str, Any] = {**CONFIG, "draft_vocab_size": VD}
Edit = Callable[[Tensors, dict[str, Any]], object]


@pytest.fixture(scope="module")
def target() -> TargetModel:
    torch.set_num_threads(1)
    return dc.target()


def refuse(directory: Path, target: TargetModel, message: str, **options: Any) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        load_draft(directory, target, Loading(context=CONTEXT, progress=False), **options)
    assert str(directory) in str(caught.value)


def _repeat(t: Tensors, _: dict[str, Any]) -> None:
    t["d2t"][1] = t["d2t"][0] - 1


def _shift(t: Tensors, _: dict[str, Any]) -> None:
    t["t2d"] = t["t2d"].roll(1)


def _absolute(t: Tensors, _: dict[str, Any]) -> None:
    t["d2t"] += torch.arange(VD)


EAGLE3_ERRORS: dict[str, tuple[Edit, str]] = {
    "missing tensor": (lambda t, c: t.pop("norm.weight"), "missing tensors: norm.weight"),
    "missing in layer": (lambda t, c: t.pop("midlayer.mlp.up_proj.weight"), "missing tensors: layers.0.mlp.up_proj"),
    "unexpected tensor": (lambda t, c: t.update(extra=torch.ones(1)), "unexpected tensors: extra"),
    "wrong shape": (
        lambda t, c: t.update({"norm.weight": torch.ones(5)}),
        "norm.weight: expected shape .*32.*found .*5",
    ),
    "wrong kind": (
        lambda t, c: t.update({"norm.weight": torch.ones(H).int()}),
        "expected 16- or 32-bit floating point",
    ),
    "fc of another width": (lambda t, c: t.update({"fc.weight": torch.ones(H, 80)}), r"expected \[32, n \* 32\].*80"),
    "fc of two streams": (lambda t, c: t.update({"fc.weight": torch.ones(H, 64)}), "takes 2 aux.*names 3 boundaries"),
    "aux count": (lambda t, c: c.update(num_aux_hidden_states=2), "num_aux_hidden_states 2"),
    "aux ids": (lambda t, c: c.update(eagle_aux_hidden_state_layer_ids=[2, 4]), "takes 3 aux.*names 2 boundaries"),
    "target width": (lambda t, c: c.update(target_hidden_size=64), "target_hidden_size.*width 64.*found 32"),
    "only t2d": (lambda t, c: t.pop("d2t"), "d2t: missing; t2d alone does not tell the order"),
    "no map": (lambda t, c: (t.pop("t2d"), t.pop("d2t")), "d2t: missing; a draft vocabulary of 20"),
    "no head": (lambda t, c: t.pop("lm_head.weight"), "lm_head.weight: missing"),
    "repeated ids": (_repeat, "distinct ids, found 1 repeated"),
    "absolute table": (_absolute, r"ids in 0\.\.47"),
    "unequal to t2d": (_shift, "marked in t2d, found others"),
    "rows of t2d": (lambda t, c: t.update(t2d=torch.ones(V + 1).bool()), "t2d: the target's vocabulary has 48.*49"),
    "rows of embedding": (lambda t, c: t.update({"embed_tokens.weight": torch.ones(50, H)}), "embed_tokens.*48.*50"),
    "rows of lm_head": (lambda t, c: c.update(draft_vocab_size=21), "expected shape .*21"),
    "both norms": (
        lambda t, c: t.update({"fc_norm.0.weight": torch.ones(H), "input_norm.weight": torch.ones(3 * H)}),
        "exclude each other",
    ),
    "fc_norm without tensor": (lambda t, c: c.update(fc_norm=True), "fc_norm: config.json says True, .*lacks"),
    "norm_before_fc without tensor": (lambda t, c: c.update(norm_before_fc=True), "norm_before_fc: .*lacks input_norm"),
    "tensor against flag": (
        lambda t, c: (c.update(norm_before_fc=False), t.update({"input_norm.weight": torch.ones(3 * H)})),
        "says False, but the file holds input_norm",
    ),
    "draft vocabulary of another type": (lambda t, c: c.update(draft_vocab_size="20"), "draft_vocab_size must be"),
    "some biases": (
        lambda t, c: t.update({"midlayer.self_attn.q_proj.bias": torch.ones(H)}),
        "missing tensors: layers.0.self_attn.k_proj.bias",
    ),
    "flag of another type": (lambda t, c: c.update(norm_before_residual="yes"), "true or false is expected"),
    "eagle_config of another type": (lambda t, c: c.update(eagle_config="x"), "eagle_config: an object is expected"),
    "foreign flag": (lambda t, c: c.update(eagle_config={"use_mtp_layernorm": True}), "use_mtp_layernorm"),
    "quantized": (
        lambda t, c: c.update(quantization_config={"quant_method": "hqq"}),
        "hqq is not supported; known are",
    ),
    "training checkpoint": (lambda t, c: t.update({"draft_model.fc.weight": torch.ones(1)}), "export it"),
    "two names": (lambda t, c: t.update({"layers.0.mlp.up_proj.weight": torch.ones(1)}), "two names of one tensor"),
    "rope type": (lambda t, c: c.update(rope_scaling={"type": "ntk", "factor": 2.0}), "rope type 'ntk'"),
    "window without size": (lambda t, c: c.update(layer_types=["sliding_attention"]), "no sliding_window"),
    "mla": (lambda t, c: t.update({"midlayer.self_attn.kv_a_proj_with_mqa.weight": torch.ones(1)}), "MLA"),
}


@pytest.mark.parametrize("name", EAGLE3_ERRORS)
def test_eagle3_checkpoint_is_refused(tmp_path: Path, target: TargetModel, name: str) -> None:
    edit, message = EAGLE3_ERRORS[name]
    tensors, config = dc.eagle3_tensors(), dict(EAGLE3)
    edit(tensors, config)
    refuse(dc.write(tmp_path, tensors, config), target, message)


EAGLE_ERRORS: dict[str, tuple[Edit, str]] = {
    "missing": (lambda t, c: t.pop("layers.0.mlp.down_proj.weight"), "missing tensors: layers.0.mlp.down_proj"),
    "vocabulary": (lambda t, c: c.update(vocab_size=50), "vocab_size: the target's is 48, found 50"),
    "truncated": (lambda t, c: c.update(truncated_vocab_size=20), "truncated_vocab_size 20"),
}


@pytest.mark.parametrize("name", EAGLE_ERRORS)
def test_eagle_checkpoint_is_refused(tmp_path: Path, target: TargetModel, name: str) -> None:
    edit, message = EAGLE_ERRORS[name]
    tensors, config = dc.eagle_tensors(bias=True), {**CONFIG, "bias": True}
    edit(tensors, config)
    refuse(dc.write(tmp_path, tensors, config), target, message)


def test_eagle_of_another_width_is_refused(tmp_path: Path, target: TargetModel) -> None:
    tensors = {"fc.weight": torch.ones(16, 32), **dc.layer_tensors("layers.0.", width=16, hidden=16)}
    refuse(dc.write(tmp_path, tensors, {**CONFIG, "hidden_size": 16}), target, "as wide as its target, expected 32")


def test_narrower_eagle3_without_embedding_is_refused(tmp_path: Path, target: TargetModel) -> None:
    directory = dc.write(tmp_path, dc.eagle3_tensors(hidden=16), {**EAGLE3, "hidden_size": 16})
    refuse(directory, target, "embed_tokens.weight: missing; a draft of width 16")


@pytest.mark.parametrize(
    ("tensors", "config", "algorithm", "found"),
    [(dc.eagle3_tensors(), EAGLE3, "EAGLE", "EAGLE3"), (dc.eagle_tensors(bias=False), CONFIG, "EAGLE3", "EAGLE")],
    ids=["eagle3-as-eagle", "eagle-as-eagle3"],
)
def test_algorithm_that_contradicts_the_files_is_refused(
    tmp_path: Path, target: TargetModel, tensors: Tensors, config: dict[str, Any], algorithm: str, found: str
) -> None:
    directory = dc.write(tmp_path, tensors, config)
    refuse(directory, target, f"{algorithm} was asked for, but the files hold an {found} head", algorithm=algorithm)


W = torch.ones(4, 4)
_LM = {"model.embed_tokens.weight": W, "model.norm.weight": W, "model.layers.0.input_layernorm.weight": W}
OTHER_FORMATS: dict[str, tuple[Tensors, dict[str, Any], str]] = {
    "hydra": ({"hydra_lm_head.0.weight": W}, {}, "Hydra"),
    "mtp-other": ({"mtp.other.weight": W}, {}, "MTP"),
    "mtp-speculators": ({"mtp_layers.0.input_proj.weight": W}, {}, "MTP"),
    "mlp": ({"emb.0.weight": W, "proj.0.weight": W}, {"n_predict": 3}, "MLPSpeculator"),
    "draft-lm": (_LM, CONFIG, "holds a language model, not a draft head; .* STANDALONE"),
    "speculators-xpress": ({"fc.weight": W}, {"speculators_model_type": "xpress"}, "'xpress' is not supported yet"),
    "unknown": ({"something.weight": W}, {}, "not a draft format known here; its tensors are something.weight"),
}


@pytest.mark.parametrize("name", OTHER_FORMATS)
def test_other_formats_are_named_and_refused(tmp_path: Path, target: TargetModel, name: str) -> None:
    tensors, config, message = OTHER_FORMATS[name]
    message = message if " " in message else f"recognized as {message}.*not supported yet"
    refuse(dc.write(tmp_path, {k: t.clone() for k, t in tensors.items()}, config), target, message)


def test_speculators_config_without_layers_is_refused(tmp_path: Path, target: TargetModel) -> None:
    directory = dc.write(tmp_path, dc.eagle3_tensors(), {"speculators_model_type": "eagle3"})
    refuse(directory, target, "transformer_layer_config: the draft's layer config is expected")


def test_target_as_its_own_draft_is_refused(tmp_path: Path, target: TargetModel) -> None:
    refuse(
        dc.write(tmp_path, {k: t.clone() for k, t in _LM.items()}, CONFIG),
        target,
        "this is the target itself",
        target_path=tmp_path,
    )


class _Code:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("this must not run",)


def test_pickle_with_code_is_refused(tmp_path: Path, target: TargetModel, capsys: pytest.CaptureFixture[str]) -> None:
    dc.write(tmp_path, {}, EAGLE3, "pytorch_model.bin")
    torch.save({"fc.weight": _Code()}, tmp_path / "pytorch_model.bin")
    refuse(tmp_path, target, "needs to run code")
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(_Code(), protocol=2))
    refuse(tmp_path, target, "pytorch_model.bin: ")
    assert "must not run" not in capsys.readouterr().out


@pytest.mark.parametrize("ids", [[1, 1], [-1, 3], [V], [], [1.5], {"a": 1}, torch.ones(2, 2).long(), "text"], ids=str)
def test_bad_token_map_is_refused(tmp_path: Path, target: TargetModel, ids: object) -> None:
    directory = dc.write(tmp_path / "draft", dc.eagle_tensors(bias=True), CONFIG)
    torch.save(ids, tmp_path / "freq.pt")
    with pytest.raises(CheckpointError, match=r"freq.pt"):
        load_draft(directory, target, Loading(context=CONTEXT, progress=False), token_map=tmp_path / "freq.pt")
