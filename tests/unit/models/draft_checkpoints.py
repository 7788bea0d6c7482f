"""Tiny draft checkpoints in every supported format, and reference forwards in plain arithmetic.

`reference_eagle` and `reference_eagle3` are written from the formulas, in float32, and share no code with the package.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle_server.models.targets.decoder import TargetModel
from eagle_server.models.targets.registry import read_target_config

V, VD, H, HEADS, KV, D, FFN, LAYERS = 48, 20, 32, 4, 2, 8, 40, 8
CONTEXT = 64
Tensors = dict[str, Tensor]

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": FFN,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": D,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 16,  # below CONTEXT: the training length is not a limit
}


def target(seed: int = 0, **config: Any) -> TargetModel:
    """A random target of 8 layers. Drafts share its embedding and lm_head."""
    torch.manual_seed(seed)
    raw = {**CONFIG, "num_hidden_layers": LAYERS, **config}
    model = TargetModel(read_target_config(raw), CONTEXT)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    return model.requires_grad_(False)


def write(directory: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], file: str | None = None) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if file is None:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    else:
        torch.save(dict(tensors), directory / file)
    return directory


def layer_tensors(prefix: str, *, width: int = H, hidden: int = H, norms: tuple[str, ...] = ()) -> Tensors:
    """A Llama layer with an attention input of `width`, a post norm and the named other norms."""
    shapes = {
        "self_attn.q_proj.weight": (HEADS * D, width),
        "self_attn.k_proj.weight": (KV * D, width),
        "self_attn.v_proj.weight": (KV * D, width),
        "self_attn.o_proj.weight": (hidden, HEADS * D),
        "mlp.gate_proj.weight": (FFN, hidden),
        "mlp.up_proj.weight": (FFN, hidden),
        "mlp.down_proj.weight": (hidden, FFN),
    }
    tensors = {prefix + name: torch.randn(shape) * 0.2 for name, shape in shapes.items()}
    for name in ("post_attention_layernorm", *norms):
        tensors[f"{prefix}{name}.weight"] = norm_weight(hidden)
    return tensors


def norm_weight(size: int) -> Tensor:
    return 1 + 0.3 * torch.randn(size)


def eagle_tensors(*, bias: bool) -> Tensors:
    torch.manual_seed(1)
    tensors = {"fc.weight": torch.randn(H, 2 * H) * 0.2, **layer_tensors("layers.0.")}
    return tensors | ({"fc.bias": torch.randn(H)} if bias else {})


def eagle3_tensors(*, streams: int = 3, hidden: int = H, prefix: str = "midlayer.") -> Tensors:
    """fc, one layer, norm, lm_head, and a map of VD ids that is neither the identity nor a prefix."""
    torch.manual_seed(2)
    ids = torch.randperm(V)[:VD].sort().values
    return {
        "fc.weight": torch.randn(hidden, streams * H) * 0.2,
        **layer_tensors(prefix, width=2 * hidden, hidden=hidden, norms=("input_layernorm", "hidden_norm")),
        "norm.weight": norm_weight(hidden),
        "lm_head.weight": torch.randn(VD, hidden) * 0.3,
        "d2t": ids - torch.arange(VD),
        "t2d": torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True),
    }


@dataclass(frozen=True)
class Semantics:
    """The flags that a reference forward needs besides the tensors."""

    norm_before_residual: bool = False
    norm_output: bool = False
    window: int = 0
    theta: float = 10000.0
    deep_norm: str = "input_layernorm"


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight


def attention(x: Tensor, w: Tensors, prefix: str, how: Semantics) -> Tensor:
    """Causal grouped-query attention, one head at a time. The rows are at positions 0, 1, ..."""
    rows = len(x)

    def project(name: str, heads: int) -> Tensor:
        y = x @ w[f"{prefix}{name}_proj.weight"].T + w.get(f"{prefix}{name}_proj.bias", torch.tensor(0.0))
        return y.view(rows, heads, D)

    q, k, v = project("q", HEADS), project("k", KV), project("v", KV)
    if f"{prefix}q_norm.weight" in w:
        q, k = rms(q, w[f"{prefix}q_norm.weight"]), rms(k, w[f"{prefix}k_norm.weight"])
    q, k = turned(q, how.theta), turned(k, how.theta)
    distance = torch.arange(rows)[:, None] - torch.arange(rows)
    hidden = (distance < 0) | (distance >= (how.window or rows))
    heads = []
    for head in range(HEADS):
        group = head // (HEADS // KV)
        scores = (q[:, head] @ k[:, group].T / math.sqrt(D)).masked_fill(hidden, -math.inf)
        heads.append(scores.softmax(-1) @ v[:, group])
    return torch.cat(heads, -1) @ w[f"{prefix}o_proj.weight"].T + w.get(f"{prefix}o_proj.bias", torch.tensor(0.0))


def turned(x: Tensor, theta: float) -> Tensor:
    """RoPE: rotates the pair (i, i + D/2) by the angle position * theta^(-2i/D)."""
    out = x.clone()
    for i in range(D // 2):
        angle = torch.arange(len(x))[:, None] * theta ** (-2 * i / D)
        a, b = x[..., i], x[..., i + D // 2]
        out[..., i], out[..., i + D // 2] = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
    return out


def mlp(x: Tensor, w: Tensors, prefix: str) -> Tensor:
    gate, up = x @ w[f"{prefix}gate_proj.weight"].T, x @ w[f"{prefix}up_proj.weight"].T
    return (gate * gate.sigmoid() * up) @ w[f"{prefix}down_proj.weight"].T


def plain_layer(x: Tensor, w: Tensors, prefix: str, how: Semantics) -> Tensor:
    x = x + attention(rms(x, w[f"{prefix}{how.deep_norm}.weight"]), w, f"{prefix}self_attn.", how)
    return x + mlp(rms(x, w[f"{prefix}post_attention_layernorm.weight"]), w, f"{prefix}mlp.")


def reference_eagle(
    w: Tensors, embed: Tensor, tokens: Tensor, hidden: Tensor, how: Semantics = Semantics()
) -> tuple[Tensor, Tensor]:
    """(feedback, normed). Both are the layer's output y."""
    h = torch.cat([embed[tokens], hidden], -1) @ w["fc.weight"].T + w.get("fc.bias", torch.tensor(0.0))
    u = h + attention(h, w, "layers.0.self_attn.", how)
    y = u + mlp(rms(u, w["layers.0.post_attention_layernorm.weight"]), w, "layers.0.mlp.")
    return y, y


def reference_combine(w: Tensors, features: Tensor) -> Tensor:
    """First pass: N, then fc."""
    if "fc.weight" not in w:
        return features
    if "input_norm.weight" in w:
        features = rms(features, w["input_norm.weight"])
    parts = [
        rms(part, w[f"fc_norm.{i}.weight"]) if f"fc_norm.{i}.weight" in w else part
        for i, part in enumerate(features.split(H, -1))
    ]
    return torch.cat(parts, -1) @ w["fc.weight"].T


def reference_eagle3(
    w: Tensors, embed: Tensor, tokens: Tensor, g: Tensor, how: Semantics = Semantics()
) -> tuple[Tensor, Tensor]:
    """(feedback, normed) of one pass. The tensors of layer 0 have the prefix `midlayer.`."""
    normed = rms(g, w["midlayer.hidden_norm.weight"])
    pair = torch.cat([rms(embed[tokens], w["midlayer.input_layernorm.weight"]), normed], -1)
    u = (normed if how.norm_before_residual else g) + attention(pair, w, "midlayer.self_attn.", how)
    y = u + mlp(rms(u, w["midlayer.post_attention_layernorm.weight"]), w, "midlayer.mlp.")
    if "layers.1.post_attention_layernorm.weight" in w:
        y = plain_layer(y, w, "layers.1.", how)
    out = rms(y, w["norm.weight"])
    return (out if how.norm_output else y), out
