"""A tiny Step 3.5 Flash of transformers, which has it inside of Step 3.7 alone, and its MTP layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_layers import MtpModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7PreTrainedModel, Step3p7TextModel

LAYERS = 3  # MTP layers
SETTINGS: dict[str, Any] = {
    **{"num_hidden_layers": 4, "head_dim": 16, "sliding_window": 7, "pad_token_id": 1},
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    **{"num_sliding_attention_heads": 6, "n_routed_experts": 8, "num_experts_per_tok": 3},
    **{"moe_intermediate_size": 24, "share_expert_dim": 48, "moe_router_scaling_factor": 3.0},
    **{"swiglu_limits": [0.0, None, 0.3, 0.2], "swiglu_limits_shared": [0.4, 0.0, 0.0, 0.3]},  # most gates are limited
    **{"rope_theta": [5000.0, 100.0, 100.0, 5000.0], "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5]},
}
_PUBLISHED = {
    ".mlp.gate.weight": ".moe.gate.weight",
    ".mlp.gate.e_score_correction_bias": ".moe.router_bias",
    ".mlp.experts.down_proj": ".moe.down_proj.weight",
    ".mlp.shared_experts.": ".share_expert.",
}


class Step3p5ForCausalLM(Step3p7PreTrainedModel, GenerationMixin):
    """The decoder inside of `Step3p7ForConditionalGeneration`, saved under the names of published files."""

    config_class = config = Step3p7TextConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: Step3p7TextConfig) -> None:
        super().__init__(config)
        self.model = Step3p7TextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor, **keywords: Any) -> CausalLMOutputWithPast:
        hidden = self.model(input_ids, **keywords).last_hidden_state
        return CausalLMOutputWithPast(logits=self.lm_head(hidden))

    def save_pretrained(self, directory: Path, **keywords: Any) -> None:  # type: ignore[override]
        super().save_pretrained(directory, **keywords)
        path = Path(directory) / "model.safetensors"
        save_file(published(load_file(path)), path, metadata={"format": "pt"})


def published(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Under StepFun's names, gates and ups of experts apart."""
    found: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        name = key
        for ours, theirs in _PUBLISHED.items():
            name = name.replace(ours, theirs)
        if name.endswith(".mlp.experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
                found[name.replace(".mlp.experts.gate_up_proj", f".moe.{part}_proj.weight")] = half
        else:
            found[name] = tensor
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def write_with_mtp(directory: Path, **settings: Any) -> tuple[PreTrainedModel, MtpModel]:
    """Save a random target with random MTP layers, config.json with StepFun's keys."""
    from tests.parity.checkpoints import CASES, write  # which names this model

    theirs = write(CASES["step3p5"], directory, **settings)
    config = theirs.config
    config.num_nextn_predict_layers, config.mtp_layer_types = LAYERS, ["sliding_attention"] * LAYERS
    config.mtp_mlp_layer_types = ["dense"] * LAYERS
    own = {"num_attention_heads": config.num_sliding_attention_heads}
    config.mtp_per_layer_config = dict.fromkeys(range(LAYERS), own)
    limits, config.swiglu_limits_shared = config.swiglu_limits_shared, None  # transformers takes those of layers 0 to 2
    torch.manual_seed(4)
    mtp = MtpModel(theirs, LAYERS).eval()
    config.swiglu_limits_shared = limits
    with torch.no_grad():
        for name, parameter in mtp.layers.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3 if "norm" in name else 0.15)
    tensors: dict[str, Tensor] = {}
    for number, layer in enumerate(mtp.layers):
        prefix = f"model.layers.{config.num_hidden_layers + number}."
        for name, tensor in layer.state_dict().items():
            own = name.removeprefix("mtp_block.").replace("post_norm.", "transformer.shared_head.norm.")
            tensors[prefix + own] = tensor.detach().clone()
        tensors[f"{prefix}transformer.shared_head.output.weight"] = theirs.lm_head.weight.detach().clone()
    path = directory / "model.safetensors"
    save_file({**load_file(path), **tensors}, path, metadata={"format": "pt"})
    write_stepfuns_config(directory)
    return theirs, mtp


def write_stepfuns_config(directory: Path) -> None:
    """config.json by the keys of the published one, with lists that go on for the MTP layers."""
    file = directory / "config.json"
    raw = json.loads(file.read_text())
    ropes, kinds = raw.pop("rope_parameters"), raw["layer_types"] + ["sliding_attention"] * LAYERS
    raw["rope_theta"] = [ropes[kind]["rope_theta"] for kind in kinds]
    raw["partial_rotary_factors"] = [ropes[kind]["partial_rotary_factor"] for kind in kinds]
    raw["layer_types"], raw["yarn_only_types"] = kinds, ["full_attention"]
    mlps = raw.pop("mlp_layer_types")
    raw["moe_layers_enum"] = ",".join(str(layer) for layer, kind in enumerate(mlps) if kind == "sparse")
    for key in ("swiglu_limits", "swiglu_limits_shared"):
        raw[key] = [limit or 0.0 for limit in raw[key]] + [0.0] * LAYERS
    for ours, theirs in (
        ("num_key_value_heads", "num_attention_groups"),
        ("n_routed_experts", "moe_num_experts"),
        ("num_experts_per_tok", "moe_top_k"),
    ):
        raw[theirs] = raw.pop(ours)
    raw["attention_other_setting"] = {
        **{"attention_type": "sliding_attention", "num_attention_heads": raw.pop("num_sliding_attention_heads")},
        **{"num_attention_groups": raw["num_attention_groups"], "head_dim": raw["head_dim"]},
    }
    for key in ("per_layer_config", "query_pre_attn_scalar"):
        del raw[key]
    raw |= {"num_nextn_predict_layers": LAYERS, "use_head_wise_attn_gate": True, "moe_router_activation": "sigmoid"}
    raw |= {"use_moe_router_bias": True, "norm_expert_weight": True, "zero_centered": True, "att_impl_type": "GQA"}
    file.write_text(json.dumps(raw))
