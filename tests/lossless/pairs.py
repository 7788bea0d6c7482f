"""Tiny targets and drafts in the published formats. Each pair is trained in seconds, at its first use."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from eagle_server.models.checkpoints.drafts.draft_format import DraftFiles
from eagle_server.models.checkpoints.drafts.gemma4_assistant_files import assistant_config
from eagle_server.models.checkpoints.drafts.load_draft import load_draft
from eagle_server.models.checkpoints.load_target import load_target
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.checkpoints.save import save_checkpoint
from eagle_server.models.drafts.gemma4_assistant import Gemma4Assistant
from eagle_server.models.drafts.interface import TargetWeights
from eagle_server.models.drafts.peagle import PEagleHead
from eagle_server.models.targets.decoder import TargetModel
from eagle_server.models.targets.registry import read_target_config
from eagle_tools.training.recipes import Kind
from eagle_tools.training.tiny import tiny_medusa, tiny_pair
from tests.lossless.scenes import REQUESTS
from tests.support import deepseek
from tests.support.blocks import (
    BlockSpec,
    block_tensors,
    confidence_tensors,
    convolution_tensors,
    edge_tensors,
    qwen3,
    trained_block,
    write_block,
)
from tests.support.engines import CONTEXT, MARGIN, plain, random_config, random_target, randomized, run, tokens_of
from tests.support.peagle import trained_peagle
from tests.support.redrafter import trained_redrafter
from tests.support.scoring import NEAR_TIE, in_float64, slack

GEMMA4: dict[str, Any] = {
    **{"architectures": ["Gemma4ForCausalLM"], "layers": 5, "num_kv_shared_layers": 2, "sliding_window": 12},
    **{"layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 2, "full_attention"]},
    **{"head_dim": 8, "global_head_dim": 24, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
    **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64, "use_double_wide_mlp": True},
    **{"tie_word_embeddings": False, "final_logit_softcapping": 4.0},
}
ASSISTANT: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "use_double_wide_mlp": False},
    **{"tie_word_embeddings": True},
    **{"layer_types": ["sliding_attention", "full_attention"], "hidden_size_per_layer_input": 0},
}


@dataclass(frozen=True)
class Pair:
    """A target, a draft trained for it (`head` None: no draft), and the files of both."""

    kind: str
    directory: Path
    draft: Path | None
    target: TargetModel
    head: Any


Maker = Callable[[Path], Pair]


def alone(directory: Path) -> Pair:
    """No draft."""
    return _loaded("NONE", tiny_pair(directory, kind="eagle", steps=0).target, None)


def eagle(directory: Path) -> Pair:
    return _tiny("EAGLE", "eagle", directory)


def eagle3(directory: Path) -> Pair:
    return _tiny("EAGLE3", "eagle3", directory)


def eagle3_moe(directory: Path) -> Pair:
    """A Qwen3-MoE target."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    }
    files = tiny_pair(directory, kind="eagle3", steps=40, target_config=config)
    return _loaded("EAGLE3", files.target, files.draft)


def medusa(directory: Path) -> Pair:
    files, heads = tiny_pair(directory, kind="eagle", steps=0), directory / "heads"
    tiny_medusa(load_target(files.target, Loading(progress=False, pack=False), dtype="float32"), heads)
    return _loaded("MEDUSA", files.target, heads)


def redrafter(directory: Path) -> Pair:
    files, draft = tiny_pair(directory, kind="eagle", steps=0), directory / "redrafter"
    new = trained_redrafter(load_target(files.target, Loading(progress=False, pack=False), dtype="float32"))
    save_checkpoint(new.head, draft, new.config_json, torch.float32)
    return _loaded("REDRAFTER", files.target, draft)


def nextn(directory: Path) -> Pair:
    """A DeepSeek target. Its MTP layer is the draft."""
    target, head = deepseek.random_pair()
    deepseek.train(target, head)
    saved = deepseek.save(target, head, directory / "target")
    return _loaded("NEXTN", saved, saved)


def nextn_glm(directory: Path) -> Pair:
    """A GLM-4 MoE target. Its MTP layer is the draft."""
    target, head = deepseek.random_pair(base=deepseek.GLM)
    deepseek.train(target, head, steps=30)
    saved = deepseek.save(target, head, directory / "target", deepseek.GLM)
    return _loaded("NEXTN", saved, saved)


def nextn_layers(directory: Path) -> Pair:
    """A GLM-4 MoE target with three MTP layers. Those after the first are like it, but not the same."""
    target, trained = deepseek.random_pair(base=deepseek.GLM)
    deepseek.train(target, trained, steps=30)
    _, head = deepseek.random_pair(base=deepseek.GLM, num_nextn_predict_layers=3)
    with torch.no_grad():
        for number, layer in enumerate(head.layers):
            for mine, theirs in zip(layer.parameters(), trained.layers[0].parameters(), strict=True):
                mine.copy_(theirs + 0.05 * number * mine)
    saved = deepseek.save(target, head, directory / "target", deepseek.GLM, num_nextn_predict_layers=3)
    return _loaded("NEXTN", saved, saved)


def standalone(directory: Path) -> Pair:
    """A target, and in smaller/ a draft model with its first two layers, which often predicts the same token."""
    files, smaller = tiny_pair(directory, kind="eagle", steps=1), directory / "smaller"
    whole = load_target(files.target, Loading(progress=False, pack=False), dtype="float32")
    raw = json.loads((files.target / "config.json").read_text()) | {"num_hidden_layers": 2}
    part, theirs = TargetModel(read_target_config(raw), 8), dict(whole.weight_views())
    with torch.no_grad():
        for name, mine in part.weight_views():
            mine.copy_(theirs[name])
    save_checkpoint(part, smaller, raw, torch.float32)
    shutil.copy(files.target / "tokenizer.json", smaller)
    return _loaded("STANDALONE", files.target, smaller)


def frozen_kv(directory: Path) -> Pair:
    """A Gemma 4 target of layers of two shapes, the last of which write no KV, and an assistant that reads it."""
    target, draft = directory / "target", directory / "assistant"
    shape = {**GEMMA4, "max_position_embeddings": CONTEXT + MARGIN}
    raw = random_config(64, 64, **shape)
    save_checkpoint(random_target(64, 64, seed=5, **shape), target, raw, torch.float32)
    settings = {"model_type": "gemma4_assistant", "backbone_hidden_size": 64, "text_config": {**raw, **ASSISTANT}}
    config = assistant_config(DraftFiles(draft, settings, {}), read_target_config(raw))
    loaded = load_target(target, Loading(progress=False, pack=False), dtype="float32")
    head = Gemma4Assistant(config, CONTEXT, TargetWeights(loaded.embed, loaded.lm_head))
    save_checkpoint(randomized(head, seed=6, std=0.25), draft, settings, torch.float32)
    return _loaded("FROZEN_KV_MTP", target, draft)


def dflash(directory: Path) -> Pair:
    """A block drafter in z-lab's format."""
    return _block(directory, {"dflash_config": {"mask_token_id": 63, "target_layer_ids": [0, 1]}}, next_token=False)


def dflash_sliding(directory: Path) -> Pair:
    """A block drafter with a causal layer with a window, and a bidirectional layer without."""
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12}
    config = {"dflash_config": {"mask_token_id": 63, "target_layer_ids": [0, 1]}, "use_sliding_window": True, **kinds}
    return _block(directory, config, next_token=False, windows=(12, 0))


def dflash2(directory: Path) -> Pair:
    """A block drafter with a selector and convolutions."""
    more = edge_tensors("selector", 64, 64, 64, std=0.2) | convolution_tensors(64, 2, std=0.02)
    flags = {"mask_token_id": 63, "target_layer_ids": [0, 1], "is_causal": False}
    return _block(directory, {"dflash_config": flags}, next_token=False, more=more)


def dspark(directory: Path) -> Pair:
    """A block drafter with a Markov head that keeps a state, and a confidence head."""
    config = {"mask_token_id": 63, "target_layer_ids": [0, 1], "markov_rank": 6, "markov_head_type": "rnn"}
    more = edge_tensors("rnn", 64, 64, 64, std=0.2) | confidence_tensors(64 + 6, std=0.1)
    return _block(directory, config, next_token=True, more=more)


def domino(directory: Path) -> Pair:
    """A block drafter whose GRU reads the path."""
    flags = {"mask_token_id": 63, "target_layer_ids": [0, 1], "projector_type": "domino", "shift_label": True}
    more = edge_tensors("gru", 64, 64, 64, std=0.2)
    return _block(directory, {"dflash_config": {**flags, "pure_draft_prefix_len": 1}}, next_token=True, more=more)


def peagle(directory: Path) -> Pair:
    """A trained EAGLE-3 head with mask slots, trained on."""
    files, draft = tiny_pair(directory, kind="eagle3", steps=16), directory / "peagle"
    shutil.copytree(files.draft, draft)
    config = json.loads((draft / "config.json").read_text()) | {"ptd_token_id": 63}
    tensors = load_file(draft / "model.safetensors") | {"mask_hidden": torch.zeros(1, 1, 3 * 64)}
    write_block(draft, tensors, config)
    whole = load_target(files.target, Loading(progress=False, pack=False), dtype="float32")
    head = load_draft(draft, whole, Loading(context=CONTEXT, progress=False, pack=False))
    assert isinstance(head, PEagleHead)
    trained_peagle(head, whole, levels=4)
    save_checkpoint(head, draft, config, torch.float32)
    return _loaded("PEAGLE", files.target, draft)


def _block(
    directory: Path,
    config: dict[str, Any],
    *,
    next_token: bool,
    windows: tuple[int, ...] = (0, 0),
    more: dict[str, torch.Tensor] | None = None,
) -> Pair:
    files, draft = tiny_pair(directory, kind="eagle", steps=0), directory / "block"
    whole = load_target(files.target, Loading(progress=False, pack=False), dtype="float32")
    tensors = block_tensors(whole, 2)
    spec = BlockSpec(tensors, (1, 2), next_token, windows, [window > 0 for window in windows], 63)
    trained_block(spec, whole, block_size=5)
    return _loaded(
        "DFLASH", files.target, write_block(draft, tensors | (more or {}), qwen3(whole, block_size=5, **config))
    )


class Pairs:
    """Makes each pair once, in a folder of `directory`. The processes of `pytest -n` share the directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._pairs: dict[Maker, Pair] = {}
        self._texts: dict[str, dict[str, list[int]]] = {}

    def pair_of(self, maker: Maker) -> Pair:
        if maker not in self._pairs:
            self._pairs[maker] = self._made_once(maker)
        return self._pairs[maker]

    def _made_once(self, maker: Maker) -> Pair:
        directory = self.directory / maker.__name__
        directory.mkdir(parents=True, exist_ok=True)
        made = directory / "pair.json"
        with (directory / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
            if made.exists():
                kind, target, draft = json.loads(made.read_text())
                return _loaded(kind, Path(target), None if draft is None else Path(draft))
            pair = maker(directory)
            made.write_text(
                json.dumps([pair.kind, str(pair.directory), None if pair.draft is None else str(pair.draft)])
            )
            return pair

    def texts(self, pair: Pair) -> dict[str, list[int]]:
        """Outputs of plain decoding for the scenes' requests, once per target. None of the draws is a near-tie."""
        key = weights_of(pair)
        if key not in self._texts:
            texts, exact = tokens_of(run(plain(pair.target), REQUESTS)), in_float64(pair.target)
            assert min(slack(exact, each, texts[each.request_id]) for each in REQUESTS) > NEAR_TIE
            self._texts[key] = texts
        return self._texts[key]


def weights_of(pair: Pair) -> str:
    """The same for pairs with the same target."""
    return sha256((pair.directory / "model.safetensors").read_bytes()).hexdigest()


def _tiny(kind: str, name: Kind, directory: Path) -> Pair:
    files = tiny_pair(directory, kind=name)
    return _loaded(kind, files.target, files.draft)


def _loaded(kind: str, directory: Path, draft: Path | None) -> Pair:
    target = load_target(directory, Loading(progress=False), dtype="float32")
    if draft is None:
        return Pair(kind, directory, None, target, None)
    return Pair(kind, directory, draft, target, loaded_head(kind, directory, draft, target))


def loaded_head(kind: str, directory: Path, draft: Path, target: TargetModel, token_map: Path | None = None) -> Any:
    """The draft of a pair, for the target in `directory` or a rank's share of it."""
    context = target.rope.cos.shape[0]
    algorithm = "STANDALONE" if kind == "STANDALONE" else None
    loaded = load_draft(
        draft,
        target,
        Loading(context=context, lookahead=MARGIN, progress=False),
        algorithm=algorithm,
        token_map=token_map,
        target_path=directory,
    )
    assert loaded.algorithm == kind
    return loaded
