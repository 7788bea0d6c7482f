"""A mixture of experts by the native kernels: the router, and only the weights of the experts that it chose.

The reference is `models.moe`.
"""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from eagle_server.ops.native.library import empty, floats, functions, pointer, session
from eagle_server.ops.native.linear import Biased
from eagle_server.ops.native.structs import ExpertsStruct, PackedStruct

SOFTMAX, SIGMOID = range(2)  # RouterScores in experts.h
ACTIVATIONS = ("silu", "gelu_tanh", "relu2")  # as in kernels/cpu/vector.h


@dataclass(frozen=True)
class NativeExperts:
    """The weights of all experts, one below the other, and how rows choose among them.

    router: [experts, hidden], and what is added to its logits; None: rows' experts are given. gate_up: [experts * 2 *
    inner, hidden]. down: [experts * hidden, inner]. correction: float32 [experts], added to scores where experts are
    chosen. factors: float32 [experts], on the weights. identities: the last of the router's choices, which give back
    their input; `adds_identities`: whether they count here. chosen: experts of a row. group_best: how many of its best
    scores make the score of a group. limit, alpha: of gpt-oss's gate, see `models.moe.gated`; alpha 0: the gate is
    `activation`, with the limit of `models.config.SwiGLULimits` if it is not 0. With relu2 there is no gate, and
    gate_up is [experts * inner, hidden].
    """

    router: Biased | None
    gate_up: Biased
    down: Biased
    correction: Tensor | None = None
    chosen: int = 0
    groups: int = 1
    chosen_groups: int = 1
    group_best: int = 1
    scores: int = SOFTMAX
    normalize: bool = False
    scale: float = 1.0
    activation: str = "silu"
    limit: float = 0.0
    alpha: float = 0.0
    factors: Tensor | None = None
    identities: int = 0
    adds_identities: bool = True

    def __call__(self, x: Tensor, routed: Tensor | None = None) -> Tensor:
        """x [rows, hidden] -> weighted sums of the experts' outputs [rows, hidden], in the dtype of x.

        routed: what the router reads, [rows, its inputs]; None: x.
        """
        full, out = floats(x), empty(*x.shape)
        read = full if routed is None else floats(routed)
        places = (pointer(full), pointer(read), len(full), pointer(out))
        functions().eagle_experts(session(), byref(self.struct), *places)
        return out.to(x.dtype)

    def compute_given(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The same for given experts, int64 [rows, k], and weights [rows, k].

        Raises:
            IndexError: an expert does not exist.
        """
        full, out, ids, factors = floats(x), empty(*x.shape), chosen.long().contiguous(), floats(weights)
        places = (pointer(full), len(full), ids.shape[1], pointer(ids), pointer(factors), pointer(out))
        if functions().eagle_given_experts(session(), byref(self.struct), *places):
            raise IndexError("an expert that does not exist")
        return out.to(x.dtype)

    @cached_property
    def struct(self) -> ExpertsStruct:
        """This object must outlive it."""
        weights = [weight.struct(bias) for (weight, _), bias in zip(self._weights, self._biases, strict=True)]
        if self.router is None:  # its sizes alone
            hidden = self.gate_up[0].inputs
            weights.insert(0, PackedStruct(inputs=hidden, outputs=self.down[0].outputs // hidden))
        return ExpertsStruct(
            *weights,
            *(None if each is None else pointer(each) for each in self._scores),
            *(self.identities, int(self.adds_identities)),
            *(self.chosen, self.groups, self.chosen_groups, self.group_best),
            *(self.scores, int(self.normalize), ACTIVATIONS.index(self.activation)),
            *(self.scale, self.limit, self.alpha),
        )

    @property
    def _weights(self) -> tuple[Biased, ...]:
        return tuple(each for each in (self.router, self.gate_up, self.down) if each is not None)

    @cached_property
    def _biases(self) -> list[Tensor | None]:
        return [None if bias is None else floats(bias.detach()) for _, bias in self._weights]

    @cached_property
    def _scores(self) -> list[Tensor | None]:
        return [None if each is None else floats(each.detach()) for each in (self.correction, self.factors)]
