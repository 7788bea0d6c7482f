"""Training of the demo target: a deep, thin Llama on the standard library's source."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle_server.attention.dense import DenseCausal
from eagle_server.models.targets.decoder import TargetModel
from eagle_server.models.targets.registry import read_target_config
from eagle_tools.training.corpus import Corpus
from eagle_tools.training.loop import Job, Schedule, train

TOKENS_PER_STEP = 6144
LENGTHS = (256, 256, 256, 1024)  # one step in four has the whole served context

VOCAB_SIZE = 4096
DEMO_TARGET: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 320,
    "num_hidden_layers": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": None,
    "eos_token_id": 0,
    "dtype": "float32",
}


def build_target() -> TargetModel:
    """The demo target's architecture with fresh weights."""
    config = read_target_config(DEMO_TARGET)
    model = TargetModel(config, config.max_position)
    initialize(model, config.num_layers)
    return model


def initialize(model: nn.Module, depth: int) -> None:
    """Normal(0, 0.02) weights, output projections smaller by sqrt(2 * depth), zero biases, unit norms."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
            continue
        residual = "o.weight" in name or "down.weight" in name
        nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * depth) if residual else 0.02)


def windows(stream: np.ndarray, step: int, lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    """The windows [batch, length + 1] of one step, at random places in the stream that depend on `step` alone."""
    length = lengths[step % len(lengths)]
    count = max(1, TOKENS_PER_STEP // length)
    starts = np.random.default_rng((0, step)).integers(0, len(stream) - length - 1, count)
    return torch.from_numpy(np.stack([stream[s : s + length + 1] for s in starts]).astype(np.int64))


def evenly_spaced(stream: np.ndarray, length: int, count: int) -> list[Tensor]:
    """`count` windows [1, length + 1] spread over a stream."""
    starts = np.linspace(0, len(stream) - length - 2, count).astype(int)
    return [torch.from_numpy(stream[s : s + length + 1].astype(np.int64))[None] for s in starts]


def target_loss(model: TargetModel, window: Tensor, positions: Tensor) -> Tensor:
    """Mean next-token cross-entropy over windows [batch, length + 1]."""
    inputs, labels = window[:, :-1].reshape(-1), window[:, 1:].reshape(-1)
    output = model(inputs, positions, DenseCausal(window.shape[0]))
    return F.cross_entropy(model.logits(output.hidden).float(), labels)


def positions_of(window: Tensor) -> Tensor:
    """RoPE positions [batch * length] of windows [batch, length + 1]."""
    return torch.arange(window.shape[1] - 1).repeat(window.shape[0])


def train_target(corpus: Corpus, work: Path, steps: int, *, compiled: bool = False) -> TargetModel:
    """Train the demo target in `work`, or finish its training."""
    torch.manual_seed(0)
    model = build_target()
    loss_function = torch.compile(target_loss) if compiled else target_loss

    def loss(step: int) -> tuple[Tensor, dict[str, float]]:
        window = windows(corpus.train, step)
        with torch.autocast("cpu", torch.bfloat16):
            return loss_function(model, window, positions_of(window)), {}

    @torch.no_grad()
    def evaluate() -> dict[str, float]:
        held_out = evenly_spaced(corpus.held_out, 512, 24)
        return {"held-out loss": float(np.mean([float(target_loss(model, w, positions_of(w))) for w in held_out]))}

    inputs = {"corpus": corpus.key, "config": DEMO_TARGET}
    train(Job("target", model, work, Schedule(steps, peak=4e-3), loss, evaluate, inputs))
    return model
