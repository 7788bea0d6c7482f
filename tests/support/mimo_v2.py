"""A tiny MiMo-V2-Flash of transformers, and its MTP layers by hand, which transformers does not compute."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.mimo_v2_flash.modeling_mimo_v2_flash import MiMoV2FlashDecoderLayer, MiMoV2FlashRMSNorm

from tests.parity.checkpoints import CASES, write

LAYERS = 3


class HandWritten(nn.Module):
    """x = eh_proj(cat(enorm(e), hnorm(s))), then a windowed layer with an MLP; final_layernorm is for the logits."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model, config = model, copy.deepcopy(model.config)
        config.layer_types, config.mlp_layer_types = ["sliding_attention"] * LAYERS, ["dense"] * LAYERS
        hidden, eps, self.window = config.hidden_size, config.rms_norm_eps, config.sliding_window
        self.blocks = nn.ModuleList(MiMoV2FlashDecoderLayer(config, number) for number in range(LAYERS))
        self.enorm, self.hnorm, self.final_layernorm = (
            nn.ModuleList(MiMoV2FlashRMSNorm(hidden, eps) for _ in range(LAYERS)) for _ in range(3)
        )
        self.eh_proj = nn.ModuleList(nn.Linear(2 * hidden, hidden, bias=False) for _ in range(LAYERS))

    def logits(self, number: int, tokens: Tensor, streams: Tensor) -> Tensor:
        """Layer `number` over rows of (token, the target's residual stream) [rows, H] -> [rows, vocabulary]."""
        embedded, positions = self.model.get_input_embeddings()(tokens), torch.arange(len(tokens))
        x = self.eh_proj[number](torch.cat([self.enorm[number](embedded), self.hnorm[number](streams)], dim=-1))[None]
        distance = positions[:, None] - positions
        mask = torch.zeros(len(tokens), len(tokens)).masked_fill((distance < 0) | (distance >= self.window), -torch.inf)
        angles = self.model.model.rotary_emb(x, positions[None], "sliding_attention")
        out = self.blocks[number](x, attention_mask=mask[None, None], position_embeddings=angles)
        return self.model.lm_head(self.final_layernorm[number](out[0]))  # type: ignore[no-any-return]

    def tensors(self) -> dict[str, Tensor]:
        """Under Xiaomi's names."""
        found: dict[str, Tensor] = {}
        for number in range(LAYERS):
            prefix = f"model.mtp.layers.{number}."
            for name, tensor in self.blocks[number].state_dict().items():
                own = name.replace("self_attn.sinks", "self_attn.attention_sink_bias")
                found[prefix + own.replace("post_attention_layernorm", "pre_mlp_layernorm")] = tensor
            for part in ("enorm", "hnorm", "eh_proj", "final_layernorm"):
                found[f"{prefix}{part}.weight"] = getattr(self, part)[number].weight
        return {name: tensor.detach().clone() for name, tensor in found.items()}


def write_with_mtp(directory: Path, **settings: Any) -> tuple[PreTrainedModel, HandWritten]:
    """Save a random target with random MTP layers, config.json with Xiaomi's keys."""
    theirs = write(CASES["mimo-v2"], directory, **settings)
    torch.manual_seed(4)
    mtp = HandWritten(theirs).eval()
    with torch.no_grad():
        for name, parameter in mtp.named_parameters():
            if not name.startswith("model."):
                is_norm, is_sink = "norm" in name, name.endswith("sinks")
                parameter.normal_(1.0 if is_norm else 0.0, 0.3 if is_norm else 2.0 if is_sink else 0.15)
    path = directory / "model.safetensors"
    save_file({**load_file(path), **mtp.tensors()}, path, metadata={"format": "pt"})
    write_xiaomis_config(directory)
    return theirs, mtp


def write_xiaomis_config(directory: Path) -> None:
    """config.json by the keys of the published one, where transformers has others."""
    file = directory / "config.json"
    raw = json.loads(file.read_text())
    ropes, kinds = raw.pop("rope_parameters"), raw.pop("layer_types")
    raw["rope_theta"], raw["swa_rope_theta"] = (ropes[kind]["rope_theta"] for kind in ("full_attention", kinds[1]))
    raw["partial_rotary_factor"] = ropes["full_attention"]["partial_rotary_factor"]
    raw["hybrid_layer_pattern"] = [int(kind == "sliding_attention") for kind in kinds]
    raw["moe_layer_freq"] = [int(kind == "sparse") for kind in raw.pop("mlp_layer_types")]
    raw["sliding_window_size"] = raw["sliding_window"] = raw["sliding_window"] - 1
    raw["layernorm_epsilon"] = raw.pop("rms_norm_eps")
    raw |= {"swa_num_key_value_heads": 2 * raw["num_key_value_heads"], "swa_head_dim": raw["head_dim"]}
    raw |= {"add_full_attention_sink_bias": False, "add_swa_attention_sink_bias": True, "n_shared_experts": None}
    file.write_text(json.dumps(raw))
