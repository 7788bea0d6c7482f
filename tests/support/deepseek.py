"""Tiny DeepSeek and GLM targets with an MTP layer, as published: same names, one tensor per expert, one file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from eagle_server.models.checkpoints.drafts.mtp_files import published_name
from eagle_server.models.checkpoints.save import save_checkpoint
from eagle_server.models.drafts.interface import TargetWeights
from eagle_server.models.drafts.mtp import MtpConfig, MtpHead
from eagle_server.models.targets.decoder import TargetModel
from eagle_server.models.targets.registry import read_target_config
from eagle_tools.training.generate import continue_texts
from eagle_tools.training.ttt import teach, ttt_loss

LAYERS = 2
DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 1.5,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "eos_token_id": 63,
    "dtype": "float32",
}
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
GLM: dict[str, Any] = {
    **{key: value for key, value in DEEPSEEK.items() if key not in _LATENT},
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "num_key_value_heads": 2,
    "head_dim": 24,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "use_qk_norm": True,
}


def random_pair(seed: int = 0, base: dict[str, Any] = DEEPSEEK, **settings: Any) -> tuple[TargetModel, MtpHead]:
    """A random target and a random head. The next-token entropy is one to two bits, as in `training.tiny`."""
    torch.manual_seed(seed)
    config_json = {**base, **settings}
    config = read_target_config(config_json)
    target = TargetModel(config, config.max_position)
    _randomize(target)
    nn.init.normal_(target.embed)
    nn.init.normal_(target.lm_head.weight, std=3.5 / math.sqrt(config.hidden_size))
    head = random_layers(target, config_json.get("num_nextn_predict_layers", 1))
    return target.requires_grad_(requires_grad=False).eval(), head


def random_layers(target: TargetModel, count: int = 1) -> MtpHead:
    """Random MTP layers for a target of any family."""
    config, borrowed = target.config, TargetWeights(target.embed.detach(), target.lm_head)
    head = MtpHead(MtpConfig.of(config, config.num_layers, count), config.max_position, borrowed)
    _randomize(head)
    return head


def train(target: TargetModel, head: MtpHead, steps: int = 60, passes: int = 3) -> None:
    """Train the head for a few seconds on texts of the target."""
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(target.config.vocab_size, (192, 4), generator=generator)
    texts = continue_texts(target, prompts, 40, torch.tensor([0.0, 1.0, 1.0]).repeat(64), generator)
    optimizer = torch.optim.AdamW(head.parameters(), lr=0.01)
    everything = torch.arange(target.config.vocab_size)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.01 * (1 - step / steps)
        window = texts[torch.randint(len(texts), (24,), generator=generator)]
        loss, _ = ttt_loss(head, teach(target, window, everything, head.aux_boundaries), passes)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def save(
    target: TargetModel, head: MtpHead | None, directory: Path, base: dict[str, Any] = DEEPSEEK, **settings: Any
) -> Path:
    """Save target and MTP layer in one checkpoint. Like published ones, it has copies of the embedding and the head."""
    save_checkpoint(target, directory, {**base, **settings}, torch.float32)
    if head is not None:
        prefix, file = f"model.layers.{target.config.num_layers}.", directory / "model.safetensors"
        copies = {
            f"{prefix}embed_tokens.weight": target.embed.detach().clone(),
            f"{prefix}shared_head.head.weight": target.lm_head.dense_weight().detach().clone(),
        }
        copies = {published_name(name, head.mtp): value for name, value in copies.items()}
        own = {published_name(name, head.mtp): view.detach().clone() for name, view in head.weight_views()}
        save_file({**load_file(file), **copies, **own}, file)
    return directory


def write_config(directory: Path, **settings: Any) -> None:
    """Change keys of config.json. None removes a key."""
    path = directory / "config.json"
    raw = {**json.loads(path.read_text()), **settings}
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))


def _randomize(model: nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "correction_bias" in name:
                nn.init.normal_(parameter, std=0.2)
            elif name.endswith("bias"):
                nn.init.normal_(parameter, std=0.1)
            elif parameter.dim() > 1:
                gain = 0.5 if name.endswith(("o.weight", "down.weight", "experts.down")) else 1.0
                nn.init.normal_(parameter, std=gain / math.sqrt(parameter.shape[-1]))
