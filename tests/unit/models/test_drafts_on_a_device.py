"""Drafts of every format are loaded on the device of their target. A stand-in for a GPU refuses tensors of the host.

A factory call without a device follows the loader's default device, and files are read on the host: the sum of both
raises there as on a GPU, and no test without the stand-in sees it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle_server.algorithms import ALGORITHMS
from eagle_server.models.checkpoints.drafts.load_draft import load_draft
from eagle_server.models.checkpoints.gguf.directory import directory_of
from eagle_server.models.checkpoints.load_target import load_target
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.checkpoints.save import save_checkpoint
from eagle_server.models.targets.decoder import TargetModel
from eagle_tools.training.tiny import tiny_pair
from tests.parity.checkpoints import CASES, write
from tests.parity.gguf_checkpoints import opened, own_cache
from tests.parity.test_mtp_parity import mtp_of, save_beside
from tests.parity.test_quantized_checkpoints import FORMATS as QUANTIZED
from tests.parity.test_quantized_checkpoints import as_awq, as_fp8_by_rows, compressed
from tests.support import deepseek, mimo_v2, step3p5
from tests.support.blocks import block_tensors, confidence_tensors, edge_tensors, write_block
from tests.support.gguf_heads import write_head
from tests.support.second_device import SecondDevice, elsewhere
from tests.unit.models import draft_checkpoints as dc
from tests.unit.models import test_block, test_peagle, test_redrafter
from tests.unit.models.test_draft_formats import EAGLE3, VARIANTS, as_speculators, tensors_of
from tests.unit.models.test_gemma4_assistant import write_assistant
from tests.unit.models.test_medusa import TARGET_CONFIG, medusa_tensors
from tests.unit.models.test_modelopt_heads import MODELOPT, exported

__all__ = ["own_cache"]
CONTEXT = 64


@dataclass(frozen=True)
class Files:
    """A target, or its directory, and what `load_draft` is called with."""

    target: TargetModel | Path
    draft: Path
    options: dict[str, Any] = field(default_factory=dict)


Maker = Callable[[Path], Files]


def demo(directory: Path) -> Files:
    """The demo's pair, not trained."""
    pair = tiny_pair(directory, steps=0)
    return Files(pair.target, pair.draft)


def head(config: dict[str, Any], tensors: Callable[[], dc.Tensors], **options: Any) -> Maker:
    """A head for the random target of `draft_checkpoints`."""
    return lambda directory: Files(dc.target(), dc.write(directory, tensors(), config), options)


def with_copies(directory: Path) -> Files:
    """Embedding and lm_head are compared with the target's."""
    target = dc.target()
    copies = {"embed_tokens.weight": target.embed.detach().half(), "lm_head.weight": target.lm_head.weight.detach()}
    return Files(target, dc.write(directory, dc.eagle_tensors(bias=True) | copies, dc.CONFIG))


def fr_spec(ids: object, directory: Path) -> Files:
    torch.save(ids, directory / "freq.pt")
    draft = dc.write(directory / "draft", dc.eagle_tensors(bias=True), dc.CONFIG)
    return Files(dc.target(), draft, {"token_map": directory / "freq.pt"})


def medusa_2(directory: Path) -> Files:
    save_checkpoint(dc.target(), directory, {**TARGET_CONFIG, "medusa_num_heads": 3}, torch.float32)
    file = directory / "model.safetensors"
    save_file({**load_file(file), **medusa_tensors(prefix="medusa_head.")}, file)
    return own_files(directory)


def own_files(directory: Path, **options: Any) -> Files:
    """The target's own files hold the draft."""
    return Files(directory, directory, {"target_path": directory, **options})


def mtp(base: dict[str, Any], directory: Path, **settings: Any) -> Files:
    return own_files(deepseek.save(*deepseek.random_pair(base=base, **settings), directory, base, **settings))


def fp8_mtp(directory: Path) -> Files:
    """As DeepSeek publishes it: the MTP layer is quantized like the target."""
    mtp(deepseek.DEEPSEEK, directory)
    return own_files(quantized(directory, compressed(8, "float", "channel"), as_fp8_by_rows))


def mtp_with_map(directory: Path) -> Files:
    files = mtp(deepseek.DEEPSEEK, directory)
    torch.save(torch.tensor([7, 3, 40, 11]), directory / "freq.tokens")
    return own_files(directory, **files.options, token_map=directory / "freq.tokens")


def transformers_mtp(case: str, names: str, directory: Path) -> Files:
    save_beside(mtp_of(write(CASES[case], directory)), directory, names)
    return own_files(directory)


def published_mtp(writer: Callable[[Path], object], directory: Path) -> Files:
    writer(directory)
    return own_files(directory)


def block(form: test_block.Format, directory: Path, *, mask: bool = False) -> Files:
    target = test_block.target()
    tensors = block_tensors(target, 2, biases=form.biases)
    form.edit(tensors)
    write_block(directory, tensors, form.config(target))
    if mask:
        torch.save({"embedding": torch.randn(32), "mask_token_id": 5}, directory / "mask_embedding.pt")
    return Files(target, directory)


def edges(kind: str, confidence: int) -> test_block.Format:
    def edit(tensors: dc.Tensors) -> None:
        test_block._reduced(tensors)
        tensors |= edge_tensors(kind, 32, test_block.V, 24) | confidence_tensors(confidence)

    return test_block.Format(test_block.zlab({"sample_from_anchor": True}, **test_block.BLOCK), edit=edit)


def peagle(form: test_peagle.Format, directory: Path) -> Files:
    tensors = test_peagle.peagle_tensors()
    form.edit(tensors)
    return Files(test_peagle.target(), dc.write(directory, tensors, form.config))


def assistant(case: str, centroids: int, directory: Path) -> Files:
    write(CASES[case], directory / "target")
    write_assistant(directory / "draft", shared=case == "gemma4", centroids=centroids)
    return Files(directory / "target", directory / "draft")


def standalone(directory: Path) -> Files:
    save_checkpoint(dc.target(), directory, TARGET_CONFIG, torch.float32)
    return Files(directory, directory, {"algorithm": "STANDALONE"})


def quantized(directory: Path, config: dict[str, Any], store: Callable[..., Any]) -> Path:
    """The checkpoint with its projections quantized."""
    file, tensors = directory / "model.safetensors", dc.Tensors()
    for name, tensor in load_file(file).items():
        is_linear = name.endswith("_proj.weight") and "eh_proj" not in name
        tensors |= store(name.removesuffix(".weight"), tensor)[0] if is_linear else {name: tensor}
    save_file(tensors, file)
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**raw, "quantization_config": config}))
    return directory


def quantized_head(config: dict[str, Any], store: Callable[..., Any], directory: Path) -> Files:
    files = demo(directory)
    return Files(files.target, quantized(files.draft, config, store))


def gguf_head(kind: str, directory: Path) -> Files:
    files = demo(directory)
    file = write_head(files.draft, directory / "head.gguf", kind)
    return Files(files.target, directory_of(file, tokenizer=False, alone=True))


def gguf_mtp(directory: Path) -> Files:
    files = transformers_mtp("qwen3.5", "qwen", directory / "source")
    return own_files(opened(files.draft, "Q8_0", kinds={"conv1d": "F32"}))


AWQ: tuple[dict[str, Any], Any] = ({"quant_method": "awq", "bits": 4, "group_size": 32}, as_awq)
MAKERS: dict[str, dict[str, Maker]] = {  # by algorithm
    "EAGLE": {
        "usual": head(dc.CONFIG, partial(dc.eagle_tensors, bias=True)),
        "copies of the target's": with_copies,
        "FR-Spec, a list": partial(fr_spec, [7, 3, 40, 11]),
        "FR-Spec, a tensor": partial(fr_spec, torch.tensor([7, 3, 40, 11])),
    },
    "EAGLE3": {
        "the demo's": demo,
        **{name: head({**EAGLE3, **each.config}, partial(tensors_of, each)) for name, each in VARIANTS.items()},
        **{
            f"speculators, {name}": head(as_speculators(each), partial(tensors_of, each))
            for name, each in VARIANTS.items()
        },
        "ModelOpt": head(MODELOPT, lambda: exported(dc.eagle3_tensors(), "midlayer.")),
        **{name: partial(quantized_head, *form[:2]) for name, form in QUANTIZED.items()},
        "AWQ": partial(quantized_head, *AWQ),
        **{f"GGUF, {kind}": partial(gguf_head, kind) for kind in ("BF16", "Q4_0", "Q8_0")},
    },
    "PEAGLE": {name: partial(peagle, form) for name, form in test_peagle.FORMATS.items()},
    "MEDUSA": {
        "Medusa 1": head({}, medusa_tensors),
        "two blocks, the target's lm_head": head({}, partial(medusa_tensors, 3, 2, shared=True)),
        "Medusa 2": medusa_2,
    },
    "REDRAFTER": {
        name: head({"model_type": test_redrafter.CONFIG["model_type"]}, partial(test_redrafter.tensors, **variant))
        for name, variant in test_redrafter.VARIANTS.items()
    },
    "NEXTN": {
        "DeepSeek": partial(mtp, deepseek.DEEPSEEK),
        "DeepSeek in FP8": fp8_mtp,
        "a token map": mtp_with_map,
        "GLM, three layers": partial(mtp, deepseek.GLM, num_nextn_predict_layers=3),
        "Qwen3.5": partial(transformers_mtp, "qwen3.5", "qwen"),
        "Qwen3.5, GGUF": gguf_mtp,
        "MiMo": partial(transformers_mtp, "mimo", "mimo"),
        "MiMo-V2, padded values": partial(published_mtp, mimo_v2.write_with_mtp),
        "Step": partial(published_mtp, step3p5.write_with_mtp),
    },
    "DFLASH": {
        **{name: partial(block, form) for name, form in test_block.FORMATS.items()},
        "a mask embedding": partial(block, test_block.FORMATS["z-lab"], mask=True),
        "vanilla edges, confidence": partial(block, edges("vanilla", 32)),
        "gated edges, confidence": partial(block, edges("gated", 32 + 6)),
    },
    "FROZEN_KV_MTP": {
        "usual": partial(assistant, "gemma4", 0),
        "centroids": partial(assistant, "gemma4", 131),
    },
    "STANDALONE": {"usual": standalone},
}


@pytest.mark.parametrize(("algorithm", "name"), [(row, name) for row in ALGORITHMS for name in MAKERS[row]])
@pytest.mark.usefixtures("own_cache")
def test_a_draft_is_on_the_device_of_its_target(algorithm: str, name: str, tmp_path: Path) -> None:
    files = MAKERS[algorithm][name](tmp_path)
    on_host = copy.deepcopy(files.target)
    with SecondDevice() as gpu:
        if isinstance(on_host, TargetModel):
            target: Any = on_host.to(gpu.device)
        else:
            target = load_target(on_host, Loading(progress=False), dtype="float32", device=gpu.device)
        draft = load_draft(files.draft, target, Loading(context=CONTEXT, lookahead=8, progress=False), **files.options)
        assert draft.algorithm == algorithm
        assert elsewhere((target, draft), gpu) == []
