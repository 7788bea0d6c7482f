"""Pairs of a target and a draft head on a device, and engines that run them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import eagle_server
from eagle_server.engine.assembly.assemble import Surroundings, assemble
from eagle_server.engine.engine import Engine
from eagle_server.models.checkpoints.drafts.load_draft import load_draft
from eagle_server.models.checkpoints.load_target import load_target
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.drafts.interface import DraftHead
from eagle_server.models.targets.decoder import TargetModel
from eagle_server.request import Request
from tests.support.engines import engine_config, random_head, random_target, request

DEMO = Path(eagle_server.__file__).parent / "assets" / "demo"
CONTEXT = 256


@dataclass(frozen=True)
class Pair:
    """A target and its head."""

    target: TargetModel
    head: DraftHead

    @property
    def dtype(self) -> torch.dtype:
        return self.target.config.dtype

    def engine(
        self, *, steps: int = 0, topk: int = 1, nodes: int = 1, stand_ins: Any = None, **settings: Any
    ) -> Engine:
        """An engine for plain decoding, or for trees of `steps`. `stand_ins` may replace FlashInfer and CUDA graphs."""
        numbers: dict[str, Any] = {
            "context_length": CONTEXT,
            "max_total_tokens": 8 * CONTEXT,
            "max_running_requests": 6,
            "poison": False,
            **settings,
        }
        config = engine_config(model_steps=steps, topk=topk, nodes=nodes, **numbers)
        return assemble(self.target, self.head if steps else None, config, Surroundings(**(stand_ins or {})))


def random_pair(device: torch.device) -> Pair:
    """An untrained pair. On a GPU: bfloat16 and a head size of FlashInfer's prebuilt modules. On the CPU: float32."""
    gpu = device.type == "cuda"
    name = "bfloat16" if gpu else "float32"
    target = random_target(64, 64, 3, head_dim=128 if gpu else 16, dtype=name, std=0.12)
    head = random_head(target, "EAGLE3", draft_vocab=40, std=0.12)
    for model in (target, head):
        cast(model, device, getattr(torch, name))
    return Pair(target, head)


def cast(model: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Cast parameters to `dtype`, in place, because heads share the target's. Buffers (RoPE angles) keep their
    dtype."""
    module: nn.Module = model
    for parameter in module.parameters():
        parameter.data = parameter.data.to(device, dtype)
    for child in module.modules():
        for name, buffer in child.named_buffers(recurse=False):
            setattr(child, name, buffer.to(device))


def demo_pair(device: torch.device) -> Pair:
    """The demo's target and head in float32."""
    target = load_target(DEMO / "target", Loading(lookahead=64, progress=False), dtype="float32", device=device)
    draft = load_draft(
        DEMO / "eagle3", target, Loading(context=target.config.max_position, lookahead=64, progress=False)
    )
    return Pair(target, draft)


def demo_requests(count: int, max_tokens: int, **sampling: Any) -> list[Request]:
    """Requests from the demo's held-out prompts."""
    tokenizers = pytest.importorskip("tokenizers", reason="the demo's tokenizer needs tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))
    prompts = json.loads((DEMO / "prompts.json").read_text())[:count]
    options = {"max_tokens": max_tokens, "ignore_eos": True, **sampling}
    return [request(i, tokenizer.encode(text).ids, seed=i, **options) for i, text in enumerate(prompts)]
