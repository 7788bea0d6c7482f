"""The whole embedding and lm_head of a target that is split over ranks, for a draft that shares them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from eagle_server.models.checkpoints.load_target import EMBED, LM_HEAD, created_as
from eagle_server.models.checkpoints.quantized import with_dequantized
from eagle_server.models.checkpoints.weights import open_weights, read_as
from eagle_server.models.config import ModelConfig
from eagle_server.models.config_json import read_config
from eagle_server.models.layers import Linear, pack_linears
from eagle_server.ops.linear.quantize import Quantization


@dataclass(frozen=True)
class WholeVocabulary:
    """A target as drafts see it, read from its files. Each weight is read when it is first used."""

    config: ModelConfig
    directory: Path
    device: torch.device
    quantization: Quantization | None

    @cached_property
    def embed(self) -> Tensor:
        """The embedding's weight [V, H]."""
        return self._read(EMBED)

    @cached_property
    def lm_head(self) -> Linear:
        """As the target packs it."""
        config = self.config
        with created_as(config.dtype, "meta"):
            head = Linear(config.hidden_size, [("lm_head", config.vocab_size)])
        weight = self.embed if config.tie_word_embeddings else self._read(LM_HEAD)
        head.weight = torch.nn.Parameter(weight, requires_grad=False)
        pack_linears(head, self.quantization)
        return head

    def _read(self, name: str) -> Tensor:
        stored = with_dequantized(
            open_weights(self.directory), read_config(self.directory), str(self.directory / "config.json")
        )
        weight = read_as(stored[name], (self.config.vocab_size, self.config.hidden_size), floating=True)
        return weight.to(self.device, self.config.dtype)
