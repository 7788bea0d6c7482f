"""Block drafters with random weights in their published formats, and their forward by hand: float32, without caches."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from eagle_server.models.targets.decoder import TargetModel
from eagle_tools.training.generate import continue_texts
from tests.support.dense import features_of
from tests.support.engines import random_target

HEADS, KV_HEADS, DIM, THETA, EPS = 4, 2, 8, 10000.0, 1e-6


@dataclass(frozen=True)
class BlockSpec:
    """What a block drafter is made of. `tensors` by their names in files; `windows` and `causal` of each layer."""

    tensors: Mapping[str, Tensor]
    boundaries: Sequence[int]
    next_token: bool
    windows: Sequence[int]
    causal: Sequence[bool]
    mask: int
    extra: Mapping[str, Any] = field(default_factory=dict)  # of the variant

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def convolved(self, name: str, x: Tensor, rows: int) -> Convolved:
        """x before and after a sublayer's convolutions, if it has some."""
        base = self.tensors.get(f"{name}.base_kernel")
        if base is None:
            return Convolved(x, lambda z: z)
        _, taps, hidden = base.shape
        dynamic = self.linear(f"{name}.kernel_projection", x).view(len(x), 2, taps, -1)

        def side(which: int, z: Tensor) -> Tensor:
            out = torch.zeros_like(z)
            for i in range(len(z)):
                for t in range(min(taps, i % rows + 1)):
                    for ch in range(hidden):
                        group = ch * dynamic.shape[3] // hidden
                        out[i, ch] += (base[which, t, ch] + dynamic[i, which, t, group]) * z[i - t, ch]
            return out

        return Convolved(side(0, x), lambda z: side(1, z))

    def edges(self, y: Tensor, path: Sequence[int]) -> Tensor:
        """What the last token of a path adds to the scores of all draft ids, [Vd].

        Row j of y [rows, H] scores the token after path[j].
        """
        named = {name.partition(".")[2].removesuffix(".weight"): tensor for name, tensor in self.tensors.items()}
        if "predecessor_codebook" in named:
            a, g = named["predecessor_codebook"][path[-1]], named["hidden_projection"] @ y[len(path) - 1]
            return named["successor_codebook"] @ (a * g)
        if "weight_hh_l0" in named:
            return self._gru_edges(named, y, path)
        e, w2 = named["markov_w1"][path[-1]], named["markov_w2"]
        both = torch.cat([y[len(path) - 1], e])
        if "gate_proj" in named:
            return w2 @ (torch.sigmoid(named["gate_proj"] @ both + named["gate_proj.bias"]) * e)
        if "joint_proj" not in named:
            return w2 @ e
        state = out = torch.zeros_like(e)
        for token, row in zip(path, y, strict=False):
            joint = named["joint_proj"] @ torch.cat([state, named["markov_w1"][token], row])
            g, c, out = (joint + named["joint_proj.bias"]).chunk(3)
            state = torch.sigmoid(g) * state + (1 - torch.sigmoid(g)) * torch.tanh(c)
        return w2 @ torch.tanh(out)

    def _gru_edges(self, named: Mapping[str, Tensor], y: Tensor, path: Sequence[int]) -> Tensor:
        gru = torch.nn.GRU(named["weight_ih_l0"].shape[1], named["weight_hh_l0"].shape[1], bias=False)
        gru.load_state_dict({name: named[name] for name in ("weight_ih_l0", "weight_hh_l0")})
        state = gru(self.extra["embed"][list(path)])[0][-1]
        edges = named["2"] @ F.silu(named["0"] @ torch.cat([y[len(path) - 1], state]))
        return edges if len(path) > self.extra["prefix"] else torch.zeros_like(edges)


@dataclass(frozen=True)
class Convolved:
    """The input of a sublayer, and what becomes of its output."""

    before: Tensor
    after: Callable[[Tensor], Tensor]


def block_tensors(
    target: TargetModel, streams: int, *, depth: int = 2, biases: bool = False, seed: int = 3
) -> dict[str, Tensor]:
    """The tensors of the trunk, random."""
    hidden, draw = target.config.hidden_size, torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, streams * hidden)}
    for i in range(depth):
        at = f"layers.{i}."
        shapes |= {
            f"{at}self_attn.q_proj.weight": (HEADS * DIM, hidden),
            f"{at}self_attn.k_proj.weight": (KV_HEADS * DIM, hidden),
            f"{at}self_attn.v_proj.weight": (KV_HEADS * DIM, hidden),
            f"{at}self_attn.o_proj.weight": (hidden, HEADS * DIM),
            f"{at}mlp.gate_proj.weight": (48, hidden),
            f"{at}mlp.up_proj.weight": (48, hidden),
            f"{at}mlp.down_proj.weight": (hidden, 48),
        }
        if biases:
            rows = {"q": HEADS * DIM, "k": KV_HEADS * DIM, "v": KV_HEADS * DIM, "o": hidden}
            shapes |= {f"{at}self_attn.{name}_proj.bias": (size,) for name, size in rows.items()}
    tensors = {name: torch.randn(shape, generator=draw) * 0.25 for name, shape in shapes.items()}
    norms = {"hidden_norm.weight": hidden, "norm.weight": hidden}
    for i in range(depth):
        at = f"layers.{i}."
        norms |= {f"{at}input_layernorm.weight": hidden, f"{at}post_attention_layernorm.weight": hidden}
        norms |= {f"{at}self_attn.q_norm.weight": DIM, f"{at}self_attn.k_norm.weight": DIM}
    return tensors | {name: 1 + torch.randn(size, generator=draw) * 0.2 for name, size in norms.items()}


def edge_tensors(
    kind: str, hidden: int, vocab: int, drafts: int, *, rank: int = 6, std: float = 0.5
) -> dict[str, Tensor]:
    """Random edges: a selector (its codebooks under one of their two names), a Markov head or Domino's."""
    shapes = {
        "selector": {
            "candidate_selector.predecessor_codebook.weight": (vocab, rank),
            "candidate_selector.successor_codebook": (drafts, rank),
            "candidate_selector.hidden_projection.weight": (rank, hidden),
        },
        "gated": {"markov_head.gate_proj.weight": (rank, hidden + rank), "markov_head.gate_proj.bias": (rank,)},
        "rnn": {
            "markov_head.joint_proj.weight": (3 * rank, 2 * rank + hidden),
            "markov_head.joint_proj.bias": (3 * rank,),
        },
        "vanilla": {},
        "gru": {
            "prefix_gru.weight_ih_l0": (3 * (rank + 1), hidden),
            "prefix_gru.weight_hh_l0": (3 * (rank + 1), rank + 1),
            "embed_proj.0.weight": (rank, hidden + rank + 1),
            "embed_proj.2.weight": (drafts, rank),
        },
    }[kind]
    if kind not in ("selector", "gru"):
        shapes |= {"markov_head.markov_w1.weight": (vocab, rank), "markov_head.markov_w2.weight": (drafts, rank)}
    draw = torch.Generator().manual_seed(9)
    return {name: torch.randn(shape, generator=draw) * std for name, shape in shapes.items()}


def confidence_tensors(width: int, *, std: float = 0.5) -> dict[str, Tensor]:
    """A random confidence head that reads so many numbers."""
    draw = torch.Generator().manual_seed(12)
    return {
        "confidence_head.proj.weight": torch.randn(1, width, generator=draw) * std,
        "confidence_head.proj.bias": torch.randn(1, generator=draw) * std,
    }


def convolution_tensors(
    hidden: int, depth: int, *, taps: int = 2, group: int = 16, std: float = 0.3
) -> dict[str, Tensor]:
    """Random convolutions around the identity."""
    draw, tensors = torch.Generator().manual_seed(10), dict[str, Tensor]()
    for name in (f"layers.{i}.{part}_conv." for i in range(depth) for part in ("attention", "mlp")):
        base = torch.randn(2, taps, hidden, generator=draw) * std
        base[:, 0] += 1
        projection = torch.randn(2 * taps * (hidden // group), hidden, generator=draw) * std / hidden**0.5
        tensors |= {f"{name}base_kernel": base, f"{name}kernel_projection.weight": projection}
    return tensors


def qwen3(target: TargetModel, depth: int = 2, **more: Any) -> dict[str, Any]:
    """The decoder's part of config.json."""
    return {
        "model_type": "qwen3",
        "vocab_size": target.config.vocab_size,
        "hidden_size": target.config.hidden_size,
        "intermediate_size": 48,
        "num_hidden_layers": depth,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "max_position_embeddings": 4096,
        **more,
    }


def write_block(directory: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def block_rows(
    spec: BlockSpec, target: TargetModel, features: Tensor, roots: Tensor, starts: Tensor, rows: int
) -> Tensor:
    """y [blocks, rows, H], by the formulas of `models.drafts.block`, with autograd.

    A block stands at `starts` with its root, and sees features [L, n * Ht] of the positions before.
    """
    length, tensors, blocks = len(features), spec.tensors, len(roots)
    context = _norm(spec.linear("fc", features), tensors["hidden_norm.weight"])
    table = tensors.get("embed_tokens.weight", target.embed)
    masks = spec.extra.get("mask_embedding", table[spec.mask]).expand(blocks, rows - 1, -1)
    x = torch.cat([table[roots][:, None], masks], dim=1).flatten(0, 1) * spec.extra.get("embed_scale", 1.0)
    own = (starts[:, None] + torch.arange(rows)).flatten()
    block_of = torch.arange(blocks).repeat_interleave(rows)
    where = torch.cat([torch.arange(length), own])  # of each column
    before = torch.arange(length) < starts[block_of][:, None]
    for i in range(len(spec.windows)):
        at, attention = f"layers.{i}.", f"layers.{i}.self_attn."
        h = spec.convolved(f"{at}attention_conv", _norm(x, tensors[f"{at}input_layernorm.weight"]), rows)
        q = _heads(spec.linear(f"{attention}q_proj", h.before), tensors[f"{attention}q_norm.weight"])
        both = torch.cat([context, h.before])
        k = _heads(spec.linear(f"{attention}k_proj", both), tensors[f"{attention}k_norm.weight"])
        v = spec.linear(f"{attention}v_proj", both).unflatten(1, (-1, DIM)).transpose(0, 1)
        q, k = _rotated(q, own), _rotated(k, where)
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, dim=0) for each in (k, v))
        sees = torch.cat([before, block_of[None] == block_of[:, None]], dim=1)
        if spec.causal[i]:
            sees = sees & (where <= own[:, None])
        if spec.windows[i]:
            sees = sees & (where > own[:, None] - spec.windows[i])
        scores = (q @ k.transpose(1, 2) * DIM**-0.5).masked_fill(~sees, float("-inf"))
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        x = x + h.after(spec.linear(f"{attention}o_proj", mixed))
        h = spec.convolved(f"{at}mlp_conv", _norm(x, tensors[f"{at}post_attention_layernorm.weight"]), rows)
        gate, up = spec.linear(f"{at}mlp.gate_proj", h.before), spec.linear(f"{at}mlp.up_proj", h.before)
        x = x + h.after(spec.linear(f"{at}mlp.down_proj", F.silu(gate) * up))
    return _norm(x, tensors["norm.weight"]).unflatten(0, (blocks, rows))


def block_logits(spec: BlockSpec, target: TargetModel, y: Tensor) -> Tensor:
    """The scores of the draft vocabulary, without edges."""
    lm_head = spec.tensors.get("lm_head.weight", target.lm_head.dense_weight())
    logits, cap = F.linear(y, lm_head) * spec.extra.get("multiplier", 1.0), spec.extra.get("softcap")
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    ids = torch.arange(len(lm_head)) + spec.tensors.get("d2t", torch.zeros(len(lm_head), dtype=torch.int64))
    return logits.masked_fill(ids == spec.mask, float("-inf"))


def trained_block(spec: BlockSpec, target: TargetModel, *, block_size: int, steps: int = 120, seed: int = 0) -> None:
    """Train the tensors of `spec` in place for seconds, on texts of a tiny target at temperatures 0 and 1."""
    state, generator = torch.get_rng_state(), torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    prompts = torch.randint(target.config.vocab_size, (96, 4), generator=generator)
    texts = continue_texts(target, prompts, 40, torch.tensor([0.0, 1.0]).repeat(48), generator)
    learned = [tensor.requires_grad_() for tensor in spec.tensors.values() if tensor.is_floating_point()]
    optimizer = torch.optim.Adam(learned, lr=0.01)
    first = 0 if spec.next_token else 1
    starts = torch.arange(1, texts.shape[1] - block_size)
    answers = starts[:, None] + torch.arange(1, block_size + 1 - first)
    for step in range(steps):
        text = texts[step % len(texts)]
        with torch.no_grad():
            features = features_of(target, text.tolist(), tuple(spec.boundaries))
        y = block_rows(spec, target, features, text[starts], starts, block_size)[:, first:]
        logits = F.linear(y, target.lm_head.dense_weight())
        loss = F.cross_entropy(logits.flatten(0, 1), text[answers].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = 0.01 * (1 - step / steps)
        optimizer.step()
    for tensor in learned:
        tensor.requires_grad_(requires_grad=False)
    torch.set_rng_state(state)


PLANTED, TOKENS = 64, 12  # hidden size and vocabulary of `planted_target`
_LEVELS, _MASK, _PEAK = 4, 11, 200.0


def planted_target() -> TargetModel:
    """A target that says x + 1 (mod 11) after x.

    The embedding of x is one-hot codes of x, x + 1, x + 2 and x + 3, then a constant. The mask token has no codes.
    """
    target = random_target(TOKENS, PLANTED, 2, eos_token_id=None)
    for name, weight in target.named_parameters():
        if name.endswith(("o.weight", "down.weight")):
            weight.zero_()
    target.embed.zero_()
    target.embed[:, _LEVELS * TOKENS :] = 1.0
    target.lm_head.weight.zero_()
    for token in range(TOKENS - 1):
        for ahead in range(_LEVELS):
            target.embed[token, ahead * TOKENS + (token + ahead) % (TOKENS - 1)] = 1.0
        target.lm_head.weight[(token + 1) % (TOKENS - 1), token] = 10.0
    return target


def planted(directory: Path, *, next_token: bool = False) -> tuple[TargetModel, Path]:
    """`planted_target` and the files of a block drafter that is always right for 4 rows."""
    target, distances, hidden = planted_target(), range(1, _LEVELS), PLANTED
    tensors = {"fc.weight": torch.zeros(hidden, hidden), "hidden_norm.weight": torch.ones(hidden)}
    tensors |= _planted_layer(hidden, distances, shift=0 if next_token else 1, strengths=[10.0] * len(distances))
    heads = {"num_attention_heads": len(distances), "num_key_value_heads": len(distances)}
    config = qwen3(target, 1, head_dim=TOKENS, block_size=_LEVELS, **heads)
    config["dflash_config"] = {"mask_token_id": _MASK, "target_layer_ids": [0], "sample_from_anchor": next_token}
    return target, write_block(directory, tensors, config)


def planted_peagle(directory: Path) -> tuple[TargetModel, Path]:
    """`planted_target` and the files of a P-EAGLE head that is always right for 4 levels.

    A slot may see wrong codes at larger distances, so heads that look less far back are stronger.
    """
    target, distances, hidden = planted_target(), range(_LEVELS), PLANTED
    tensors = {"fc.weight": torch.zeros(hidden, hidden), "mask_hidden": torch.zeros(1, 1, hidden)}
    tensors |= {"layers.0.hidden_norm.weight": torch.ones(hidden)}
    tensors |= _planted_layer(2 * hidden, distances, shift=0, strengths=[4.0**-distance for distance in distances])
    config = qwen3(target, 1, head_dim=TOKENS, num_attention_heads=_LEVELS, num_key_value_heads=_LEVELS)
    config |= {"ptd_token_id": _MASK, "eagle_aux_hidden_state_layer_ids": [1]}
    return target, write_block(directory, tensors, config)


def _planted_layer(
    inputs: int, distances: Sequence[int], *, shift: int, strengths: Sequence[float]
) -> dict[str, Tensor]:
    """A layer and the last norm. Each head looks back by its distance (RoPE turns its scores so), and copies a code to
    the place where lm_head reads x. Attention has `inputs` inputs, the embedding first."""
    hidden, size, half = PLANTED, TOKENS, TOKENS // 2
    at, width = "layers.0.", len(distances) * size
    tensors = dict[str, Tensor]()
    for name in ("norm", f"{at}input_layernorm", f"{at}post_attention_layernorm"):
        tensors[f"{name}.weight"] = torch.ones(hidden)
    for name in ("gate", "up"):
        tensors[f"{at}mlp.{name}_proj.weight"] = torch.zeros(48, hidden)
    tensors[f"{at}mlp.down_proj.weight"] = torch.zeros(hidden, 48)
    q, k, v, o = (torch.zeros(width, size) for size in (inputs, inputs, inputs, hidden))
    speed = THETA ** (-torch.arange(0, size, 2).float() / size)
    for head, (distance, strength) in enumerate(zip(distances, strengths, strict=True)):
        rows_of, ahead = slice(head * size, (head + 1) * size), distance - shift
        # Two pairs that turn peak at the distance, and one that hardly turns puts all else below 0.
        turned, key = torch.zeros(2, half), torch.zeros(2, half)
        turned[0, :2], turned[1, :2] = torch.cos(speed[:2] * distance), -torch.sin(speed[:2] * distance)
        turned[0, -1], key[0, [0, 1, -1]] = -1.76, 1.0
        q[rows_of, hidden - 1], k[rows_of, hidden - 1] = turned.flatten(), key.flatten()
        v[rows_of, ahead * size : (ahead + 1) * size] = torch.eye(size)
        o[rows_of, :size] = strength * torch.eye(size)
    named = {"q": q, "k": k, "v": v, "o": o.t()}
    tensors |= {f"{at}self_attn.{name}_proj.weight": weight for name, weight in named.items()}
    tensors[f"{at}self_attn.q_norm.weight"] = torch.full((size,), _PEAK)
    tensors[f"{at}self_attn.k_norm.weight"] = torch.ones(size)
    return tensors


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def _heads(x: Tensor, weight: Tensor) -> Tensor:
    """[rows, heads * DIM] -> [heads, rows, DIM], normed."""
    return _norm(x.unflatten(1, (-1, DIM)), weight).transpose(0, 1)


def _rotated(x: Tensor, positions: Tensor) -> Tensor:
    angles = torch.outer(positions.float(), THETA ** (-torch.arange(0, DIM, 2).float() / DIM))
    cos, sin = angles.cos(), angles.sin()
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
