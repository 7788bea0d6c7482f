"""A target that an engine has computed: its embedding, last norm and lm_head, and features in the place of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from eagle_server.attention.interface import BoundAttention
from eagle_server.models.checkpoints.load_target import created_as
from eagle_server.models.config import ModelConfig
from eagle_server.models.targets.decoder import TargetModel
from eagle_server.models.targets.interface import DraftedTarget, Target, TargetOutput
from eagle_tools.training.packing import Packing
from eagle_tools.training.text_attention import TextAttention

EMBED, NORM, LM_HEAD, BIAS = "embed", "norm", "lm_head", "lm_head.bias"
_TOLERANCE = 0.05  # of the logits' norm; kernels for int8 round their inputs too, which gives about 0.01


class CapturedTarget(TargetModel):
    """A target without layers, float32. `recall` gives what its engine gave; it cannot be computed.

    weights: as `weights_of` gives them. boundaries: of the captured streams.
    """

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, Tensor], boundaries: tuple[int, ...], device: str
    ) -> None:
        tied = LM_HEAD not in weights
        plain = replace(config, num_layers=0, windows=(), states=(), tie_word_embeddings=tied)
        plain = replace(plain, layer_inputs=None, local_rope=None, dtype=torch.float32)
        with created_as(torch.float32, device):
            super().__init__(plain, config.max_position)
        self.config = replace(config, dtype=torch.float32, tie_word_embeddings=tied)
        self.boundaries = boundaries
        with torch.no_grad():
            self.embed.copy_(weights[EMBED])
            if not tied:
                self.lm_head.weight.copy_(weights[LM_HEAD])
            if BIAS in weights:
                self.lm_head.bias = torch.nn.Parameter(weights[BIAS].to(device, torch.float32))
            if NORM in weights:
                self.norm.weight.copy_(weights[NORM])
        self.requires_grad_(requires_grad=False).eval()

    def forward(
        self, tokens: Tensor, positions: Tensor, attention: BoundAttention, aux_boundaries: Sequence[int] = ()
    ) -> TargetOutput:
        """
        Raises:
            ValueError: always.
        """
        raise ValueError("a captured target has no layers: it knows the rows that were captured, and no other text")

    def recall(self, features: Tensor, aux_boundaries: Sequence[int]) -> TargetOutput:
        """The output for rows with features [rows, n + 1, H].

        Raises:
            ValueError: a stream was not captured.
        """
        if missing := [each for each in aux_boundaries if each not in self.boundaries]:
            asked, found = (" ".join(map(str, each)) for each in (aux_boundaries, self.boundaries))
            raise ValueError(
                f"no features of boundary {missing[0]}, only of {found}; capture with --aux-layers {asked}"
            )
        streams, dtype = [self.boundaries.index(each) for each in aux_boundaries], self.embed.dtype
        aux = features[:, streams].flatten(1).to(dtype) if streams else None
        return TargetOutput(features[:, -1].to(dtype), aux)


def output_of(
    target: TargetModel, seen: Tensor, places: Tensor, packing: Packing | None, aux_boundaries: Sequence[int] = ()
) -> TargetOutput:
    """What the target gives for texts `seen` [batch, length] at `places`, rows [batch * length]: computed or captured.

    packing: of the texts, which may be one token longer.
    """
    if isinstance(target, CapturedTarget):
        assert packing is not None and packing.features is not None, "features were captured for rows"
        return target.recall(packing.features[:, : seen.shape[1]].flatten(0, 1), aux_boundaries)
    attention = TextAttention(len(seen), packing)
    output: TargetOutput = target(seen.reshape(-1), places.reshape(-1), attention, aux_boundaries)
    return output


def weights_of(target: Target, vocabulary: DraftedTarget) -> dict[str, Tensor]:
    """What heads need of a target, in its dtype on the CPU, without its layers.

    The lm_head is what its kernels compute with, rounded if they round. It is left out if it is the embedding.
    vocabulary: has the whole embedding and lm_head: the target itself, if it is not split over ranks.
    """
    dtype, head = target.config.dtype, vocabulary.lm_head
    found = {EMBED: vocabulary.embed, LM_HEAD: head.dense_weight()}
    if isinstance(target, TargetModel):
        found[NORM] = target.norm.weight
    if head.bias is not None:
        found[BIAS] = head.bias
    weights = {name: value.detach().to("cpu", dtype).clone().contiguous() for name, value in found.items()}
    if torch.equal(weights[EMBED], weights[LM_HEAD]):
        del weights[LM_HEAD]
    return weights


@torch.no_grad()
def check_logits(target: Target, weights: Mapping[str, Tensor], hidden: Tensor) -> None:
    """Compare the target's logits of `hidden` [rows, H] with those of a `CapturedTarget`. A `TargetModel` has the same.

    Raises:
        ValueError: they differ, as the model scales or caps its logits in a way of its own.
    """
    if isinstance(target, TargetModel):
        return
    captured = CapturedTarget(target.config, weights, (), "cpu")
    expected = target.logits(hidden).float().cpu()
    found = captured.logits(hidden.cpu().float())
    if not (found - expected).norm() <= _TOLERANCE * expected.norm():
        raise ValueError(
            f"{target.config.architecture} makes its logits with more than an lm_head, so no teacher can be made of "
            "captured features; train a head from the target itself, if its family has a class of its own here"
        )
