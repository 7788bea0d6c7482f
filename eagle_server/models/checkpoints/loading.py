"""How a model is loaded, target or draft."""

from __future__ import annotations

from dataclasses import dataclass

from eagle_server.ops.linear.quantize import Quantization


@dataclass(frozen=True)
class Loading:
    """The texts that a model is loaded for, and the form of its weights.

    context: the served context length; 0: the target's own. A dynamic RoPE base depends on it.
    lookahead: the number of positions after `context` that drafting may write.
    progress: show a bar.
    pack: packs the linear layers. False keeps the plain weights, for training.
    quantization: rounds them, too.
    """

    context: int = 0
    lookahead: int = 0
    progress: bool = True
    pack: bool = True
    quantization: Quantization | None = None

    @property
    def positions(self) -> int:
        """Rows of the RoPE table, for any max_position_embeddings."""
        assert self.context, "it is resolved before a model is made"
        return self.context + self.lookahead


DEFAULT_LOADING = Loading()
