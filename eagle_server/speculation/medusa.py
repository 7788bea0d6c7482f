"""Medusa's static trees as tensors, and its own rules for candidates and acceptance.

The server proposes these trees and accepts by the one rule of `accept.py`, which is lossless. `evaluate_posterior` is
the rule of the Medusa paper over candidate paths; above temperature 0 it is lossy, and it is served, over trees, only
where it is asked for (`typical.py`).

Source: Medusa (arXiv 2401.10774), sections 2.1 and 2.3.
"""

from __future__ import annotations

from typing import Literal, TypedDict

import torch
from torch import Tensor

from eagle_server.speculation.medusa_choices import Choices

Rule = Literal["typical", "nucleus"]
TOPK = 10  # tokens of each head among the candidates
PAD = -1


class MedusaBuffers(TypedDict):
    """A static tree of n nodes, root included, and P paths from the root to a leaf."""

    medusa_attn_mask: Tensor  # float32 [1, 1, n, n], to be added: 0 at ancestors and self, -inf elsewhere
    tree_indices: Tensor  # int64 [n], places in [root, topk tokens of head 0, topk tokens of head 1, ...]
    medusa_position_ids: Tensor  # int64 [n], depths
    retrieve_indices: Tensor  # int64 [P, depth + 1], nodes of each path, -1: padding
    sorted_medusa_choices: list[tuple[int, ...]]  # node i + 1 is choice i


def generate_medusa_buffers(
    medusa_choices: Choices | list[tuple[int, ...]] | list[list[int]],
    topk: int = TOPK,
    device: str | torch.device = "cpu",
) -> MedusaBuffers:
    """The tensors of a tree. Nodes are sorted by depth, then by ranks; paths come in the reverse order of their leaves.

    Raises:
        ValueError: a rank of `topk` or more.
    """
    choices = sorted_choices(medusa_choices)
    if any(max(choice) >= topk for choice in choices):
        raise ValueError(f"a rank of {topk} or more: only {topk} tokens of each head are candidates")
    number = {(): 0, **{choice: i + 1 for i, choice in enumerate(choices)}}
    nodes = list(number)
    mask = torch.full((len(nodes), len(nodes)), float("-inf"))
    for node in nodes:
        mask[number[node], [number[node[:depth]] for depth in range(len(node) + 1)]] = 0.0
    inner = {node[:-1] for node in nodes if node}
    width = max(map(len, nodes)) + 1
    paths = [
        [number[leaf[:depth]] for depth in range(len(leaf) + 1)] + [PAD] * (width - len(leaf) - 1)
        for leaf in reversed(nodes)
        if leaf not in inner
    ]
    indices = [0] + [1 + (len(choice) - 1) * topk + choice[-1] for choice in choices]
    return {
        "medusa_attn_mask": mask.to(device)[None, None],
        "tree_indices": torch.tensor(indices, device=device),
        "medusa_position_ids": torch.tensor([len(node) for node in nodes], device=device),
        "retrieve_indices": torch.tensor(paths, device=device),
        "sorted_medusa_choices": choices,
    }


def sorted_choices(choices: Choices | list[tuple[int, ...]] | list[list[int]]) -> list[tuple[int, ...]]:
    """By depth, then by ranks: parents before their children."""
    return sorted((tuple(choice) for choice in choices), key=lambda choice: (len(choice), choice))


def choice_parents(choices: Choices | list[tuple[int, ...]]) -> list[int]:
    """The number of each sorted choice's parent; the root is 0, choice i of the sorted ones i + 1."""
    nodes = sorted_choices(choices)
    number = {(): 0, **{choice: i + 1 for i, choice in enumerate(nodes)}}
    return [number[choice[:-1]] for choice in nodes]


def generate_candidates(  # noqa: PLR0913
    medusa_logits: Tensor,
    logits: Tensor,
    tree_indices: Tensor,
    retrieve_indices: Tensor,
    temperature: float = 0.0,
    posterior_threshold: float = 0.3,
    posterior_alpha: float = 0.09,
    *,
    top_p: float = 0.8,
    sampling: Rule = "typical",
    fast: bool = False,
    topk: int = TOPK,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """(candidates by path [P, depth + 1], candidates by node [1, n]) of one sequence.

    The root is the best token of `logits` [1, rows, V]'s last row, or a draw from what `sampling` leaves of its
    distribution; then come the topk tokens of each head, of `medusa_logits` [heads, 1, rows, V]. Padding is -1, which
    no token is.
    """
    row = logits[0, -1:]
    if temperature == 0 or fast:
        root = row.argmax(-1)
    else:
        probs = _kept_probs(row, temperature, sampling, posterior_threshold, posterior_alpha, top_p)
        root = torch.multinomial(probs, 1, generator=generator)[:, 0]
    flat = torch.cat([root, medusa_logits[:, 0, -1].topk(topk, dim=-1).indices.view(-1)])
    by_node = flat[tree_indices]
    by_path = torch.where(retrieve_indices < 0, PAD, by_node[retrieve_indices.clamp(min=0)])
    return by_path, by_node[None]


def evaluate_posterior(  # noqa: PLR0913
    logits: Tensor,
    candidates: Tensor,
    temperature: float,
    posterior_threshold: float = 0.3,
    posterior_alpha: float = 0.09,
    *,
    top_p: float = 0.8,
    sampling: Rule = "typical",
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """(best_candidate, accept_length), int64 scalars: the path of which most is accepted, and how much of it.

    logits [P, depth + 1, V] and candidates int64 [P, depth + 1] go along the paths; accept_length does not count the
    root, and an entry of -1 is never accepted. Lossy above temperature 0.

        temperature 0   candidate == argmax of the logits before it
        typical         p(candidate) > min(posterior_threshold, posterior_alpha * exp(-entropy of p)); of several
                        longest paths the most probable one
        nucleus         candidate == a draw from p within top_p; paths with a beginning in common share its draws
    """
    drafted, before = candidates[:, 1:], logits[:, :-1]
    if temperature == 0:
        accepted, score = drafted == before.argmax(-1), None
    elif sampling == "typical":
        probability = (before / temperature).softmax(-1)
        own = probability.gather(-1, drafted.clamp(min=0)[..., None])[..., 0]
        accepted = own > typical_threshold(probability, posterior_threshold, posterior_alpha)
        score = own.log()
    else:
        probs = _kept_probs(before, temperature, sampling, posterior_threshold, posterior_alpha, top_p)
        accepted, score = drafted == _shared_draws(probs, candidates[:, :-1], generator), None
    lengths = (accepted & (drafted >= 0)).long().cumprod(1).sum(1)
    longest = lengths.max()
    if score is None:
        return lengths.argmax(), longest
    counted = torch.arange(drafted.shape[1], device=logits.device) < longest
    likelihood = torch.where(counted, score, 0.0).sum(1)
    best = torch.where(lengths == longest, likelihood, float("-inf")).argmax()
    return torch.where(longest == 0, 0, best), longest


def typical_threshold(probability: Tensor, posterior_threshold: float, posterior_alpha: float) -> Tensor:
    """min(eps, alpha * exp(-H(p))), [..] of distributions [.., V]."""
    entropy = -(probability * (probability + 1e-5).log()).sum(-1)
    return (posterior_alpha * (-entropy).exp()).clamp(max=posterior_threshold)


def _kept_probs(  # noqa: PLR0913, PLR0917
    logits: Tensor, temperature: float, sampling: Rule, posterior_threshold: float, posterior_alpha: float, top_p: float
) -> Tensor:
    """The distribution at a temperature, without what the rule cuts off, renormalized; [.., V]."""
    probs = (logits / temperature).softmax(-1)
    if sampling == "typical":
        kept = probs >= typical_threshold(probs, posterior_threshold, posterior_alpha)[..., None]
    else:
        ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
        mass_before = ordered.cumsum(-1) - ordered
        kept = torch.zeros_like(probs, dtype=torch.bool).scatter(-1, ids, mass_before <= top_p)
    probs = torch.where(kept, probs, 0.0)
    return probs / probs.sum(-1, keepdim=True)


def _shared_draws(probs: Tensor, seen: Tensor, generator: torch.Generator | None) -> Tensor:
    """One token per row of distribution [P, depth, V]; rows after equal tokens `seen` [P, depth] draw the same one.

    Separate draws for one node would be a second chance for it.
    """
    drawn = torch.multinomial(probs.flatten(0, 1), 1, generator=generator).view(seen.shape)
    same = (seen[:, None] == seen[None]).long().cumprod(-1).bool()  # [path, other, depth]
    return drawn.gather(0, same.int().argmax(1))
