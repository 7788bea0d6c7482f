"""Recipes: the shape of a head and the length of its training. Without torch, as the command line imports them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["eagle3", "eagle", "mtp"]
LossName = Literal["kl", "tv", "kl+tv", "coupled", "dspark"]  # see `losses`
LOSS_NAMES: tuple[LossName, ...] = get_args(LossName)
EdgeName = Literal["none", "selector", "markov"]
Weighting = Literal["decay", "dpace"]
WEIGHTINGS: tuple[Weighting, ...] = get_args(Weighting)
Dialect = Literal["sglang", "speculators"]  # see `dialects`
DIALECTS: tuple[Dialect, ...] = get_args(Dialect)
ROW_LENGTH = 1023  # tokens of a window of token rows, less one


@dataclass(frozen=True)
class Recipe:
    """The shape of a head and the length of its training.

    boundaries: the residual streams that an EAGLE-3 head reads, b for the stream after b layers; None: the defaults.
    draft_vocab, intermediate_size: None takes the target's.
    passes: draft steps that are trained; serving may use more, with lower acceptance.
    sampled_texts: number of texts that the target writes, used in every second step; 0 trains on the corpus alone.
    texts: maximum texts of `length` per step; fewer if the texts are longer.
    loss, temperatures: what is minimized; the steps take the temperatures of p and q in turn.
    accumulate: how many times such texts are taken per step; their gradients are averaged.
    """

    kind: Kind = "eagle3"
    steps: int = 1200
    passes: int = 4
    peak: float = 4e-3
    loss: LossName = "kl"
    temperatures: tuple[float, ...] = (1.0,)
    boundaries: tuple[int, ...] | None = None
    draft_vocab: int | None = None
    intermediate_size: int | None = None
    length: int = 256
    texts: int = 24
    sampled_texts: int = 4096
    compiled: bool = False
    accumulate: int = 1


@dataclass(frozen=True)
class MedusaRecipe:
    """The shape of the heads and the length of their training. For `length` and `sampled_texts` see `Recipe`.

    shared_lm_head: the heads use the target's lm_head; a head is then only its residual blocks.
    texts: maximum texts of `length` per step; fewer if the texts are longer.
    """

    heads: int = 4
    layers: int = 1
    shared_lm_head: bool = False
    steps: int = 1200
    peak: float = 3e-3
    texts: int = 24
    length: int = 256
    sampled_texts: int = 4096
    loss: LossName = "kl"
    compiled: bool = False
    accumulate: int = 1
    kind: str = "medusa"


@dataclass(frozen=True)
class RedrafterRecipe:
    """The shape of a ReDrafter head and the length of its training.

    exit_dim: None takes twice the target's width, which needs no input projection.
    rollout: draft steps that are trained; serving may use more, with lower acceptance.
    sampled_texts: number of texts that the target writes, used in every second step; 0 trains on the corpus alone.
    texts: maximum texts of `length` per step; fewer if the texts are longer.
    """

    kind: str = "redrafter"
    steps: int = 1200
    rollout: int = 5
    peak: float = 4e-3
    exit_dim: int | None = None
    draft_layers: int = 2
    rnn: bool = True
    texts: int = 24
    length: int = 256
    sampled_texts: int = 4096
    loss: LossName = "kl"
    compiled: bool = False
    accumulate: int = 1


@dataclass(frozen=True)
class BlockRecipe:
    """The shape of a block drafter and the length of its training. For the other fields see `Recipe`.

    layers: of the trunk. intermediate_size: None takes the target's.
    next_token: row j drafts the token after its own; else the token at its place, and the root's row drafts nothing.
    causal: whether a row sees only the rows before it. Such rows do not depend on how many are computed.
    edges, rank: what the token before adds to the scores, see `block_edges`. With a selector come DFlash 2's
        convolutions.
    mask_token_id: of the rows behind the root; None: the rarest token of the corpus.
    anchors: blocks per `length` tokens of a text.
    weighting, gamma: of the drafts of a block in the loss, see `packed_blocks.row_weights`.
    """

    kind: str = "block"
    layers: int = 2
    block_size: int = 8
    next_token: bool = True
    causal: bool = True
    edges: EdgeName = "markov"
    rank: int = 64
    confidence: bool = True
    boundaries: tuple[int, ...] | None = None
    intermediate_size: int | None = None
    mask_token_id: int | None = None
    steps: int = 1200
    peak: float = 8e-3
    loss: LossName = "dspark"
    weighting: Weighting = "decay"
    gamma: float = 4.0
    anchors: int = 32
    texts: int = 24
    length: int = 256
    sampled_texts: int = 4096
    compiled: bool = False
    accumulate: int = 1


MTP = Recipe(kind="mtp", passes=3, peak=5e-4)  # defaults for the target's own MTP layers, which are trained on

AnyRecipe = Recipe | MedusaRecipe | RedrafterRecipe | BlockRecipe

DEMO_HEAD = Recipe(draft_vocab=2048, intermediate_size=512, steps=900, sampled_texts=2048)
DEMO_TUNINGS = (  # further trainings of that head; the demo's is the mean of all three
    Recipe(loss="tv", steps=500, peak=1e-3, texts=8, sampled_texts=2048),
    Recipe(loss="coupled", steps=400, peak=1e-3, texts=8, sampled_texts=2048),
)
DEMO_PARTS = tuple(f"eagle3-{recipe.loss}" for recipe in (DEMO_HEAD, *DEMO_TUNINGS))
DEMO_MEDUSA = MedusaRecipe(layers=2, shared_lm_head=True, steps=600, texts=8, sampled_texts=512)
DEMO_REDRAFTER = RedrafterRecipe(exit_dim=256, steps=600, texts=8, sampled_texts=512)
DEMO_BLOCK = BlockRecipe(intermediate_size=512, loss="kl+tv", peak=1e-2, steps=1400, texts=8, sampled_texts=3072)
