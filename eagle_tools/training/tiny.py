"""For tests: a tiny random target, and a head trained on it in seconds. Drafts are partly accepted, partly refused."""

from __future__ import annotations

import json
import math
import string
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from torch import nn

from eagle_server.models.checkpoints.save import save_checkpoint
from eagle_server.models.targets.decoder import TargetModel
from eagle_server.models.targets.registry import read_target_config
from eagle_tools.training.generate import continue_texts
from eagle_tools.training.heads import NewHead, new_eagle, new_eagle3
from eagle_tools.training.loop import Optimizers
from eagle_tools.training.medusa import export_medusa, medusa_loss, new_heads
from eagle_tools.training.recipes import Kind
from eagle_tools.training.ttt import teach, ttt_loss

BOUNDARIES = (1, 2, 3)  # of three layers: too few for EAGLE-3's defaults
_TEXTS, _LENGTH, _BATCH, _PASSES = 384, 50, 24, 4
_BRANCH_GAIN = 0.5  # of attention and MLP outputs: the influence of the context beyond the last token
_SHARPNESS = 3.5  # standard deviation of the target's logits: a next-token distribution of one to two bits


@dataclass(frozen=True)
class TinyPair:
    """Checkpoint directories in the published formats, float32."""

    target: Path
    draft: Path


def tiny_pair(
    directory: Path,
    *,
    vocab: int = 64,
    seed: int = 0,
    kind: Kind = "eagle3",
    steps: int = 64,
    context: int = 512,
    target_config: Mapping[str, Any] | None = None,
) -> TinyPair:
    """Make a random target with a character tokenizer, train a head on texts sampled from it, and save both.

    `target_config`: keys of the target's config.json, which choose its family.
    `steps` sets how good the head is. An EAGLE-3 head gets a draft vocabulary of seven eighths of the target's.
    """
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    config = {**_target_json(vocab, context), **(target_config or {})}
    target = _random_target(config)
    new = _trained_head(target, kind, steps, seed)
    torch.set_rng_state(state)
    pair = TinyPair(directory / "target", directory / kind)
    save_checkpoint(target, pair.target, config, torch.float32)
    save_checkpoint(new.head, pair.draft, new.config_json, torch.float32)
    character_tokenizer(vocab).save(str(pair.target / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context}
    (pair.target / "tokenizer_config.json").write_text(json.dumps(names, indent=2) + "\n")
    return pair


def tiny_medusa(target: TargetModel, directory: Path, *, heads: int = 4, steps: int = 96, seed: int = 0) -> None:
    """Train Medusa heads for a tiny target on texts sampled from it, and write them as Medusa-1, float32."""
    texts, generator = _sampled_texts(target, seed)
    model = new_heads(target, heads, layers=1)
    optimizers = Optimizers.of(model)
    for step in range(steps):
        window = texts[torch.randint(_TEXTS, (_BATCH,), generator=generator)]
        loss, _ = medusa_loss(model, teach(target, window, torch.arange(target.config.vocab_size)))
        loss.backward()
        optimizers.step(0.01 * (1 - step / steps))
    export_medusa(model, directory, torch.float32)


def character_tokenizer(vocab: int) -> Tokenizer:
    """One character per token: letters, digits, space and newline, then letters from U+0100 on."""
    characters = [*string.ascii_letters, *string.digits, " ", "\n", *(chr(0x100 + i) for i in range(vocab))]
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(characters[:vocab])}, []))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def _target_json(vocab: int, context: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": vocab - 1,
    }


def _random_target(config_json: dict[str, object]) -> TargetModel:
    config = read_target_config(config_json)
    target = TargetModel(config, config.max_position)
    for name, parameter in target.named_parameters():
        if parameter.dim() == 1:  # norms stay ones
            continue
        branch_end = name.endswith(("o.weight", "down.weight"))
        nn.init.normal_(parameter, std=(_BRANCH_GAIN if branch_end else 1.0) / math.sqrt(parameter.shape[1]))
    nn.init.normal_(target.embed)
    nn.init.normal_(target.lm_head.weight, std=_SHARPNESS / math.sqrt(config.hidden_size))
    return target.requires_grad_(requires_grad=False).eval()


def _trained_head(target: TargetModel, kind: Kind, steps: int, seed: int) -> NewHead:
    vocab, (texts, generator) = target.config.vocab_size, _sampled_texts(target, seed)
    if kind == "eagle3":
        common = texts.flatten().bincount(minlength=vocab).argsort(descending=True, stable=True)[: vocab * 7 // 8]
        new = new_eagle3(target, BOUNDARIES, common.sort().values, intermediate_size=128)
    else:
        new = new_eagle(target, intermediate_size=128)
    optimizers, draft_ids = Optimizers.of(new.head), new.draft_ids()
    for step in range(steps):
        window = texts[torch.randint(_TEXTS, (_BATCH,), generator=generator)]
        loss, _ = ttt_loss(new.head, teach(target, window, draft_ids, new.head.aux_boundaries), _PASSES)
        loss.backward()
        optimizers.step(0.01 * (1 - step / steps))
    return new


def _sampled_texts(target: TargetModel, seed: int) -> tuple[torch.Tensor, torch.Generator]:
    """Texts [texts, length] of the target, greedy and sampled, and the generator to continue with."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(target.config.vocab_size, (_TEXTS, 4), generator=generator)
    temperatures = torch.tensor([0.0, 1.0, 1.0]).repeat(_TEXTS // 3)
    return continue_texts(target, prompts, _LENGTH - prompts.shape[1], temperatures, generator), generator
