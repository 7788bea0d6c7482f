"""Functions and buffers of other systems, which tests compare ours with.

    reference                                                     serving path
    verify_tree_greedy (SGLang)                                   ops.accept.walk_tree: the walk by parents and masks
    flat_custom_mask, page_arguments (FlashInfer's plan)          ops.mask.pack_tree_mask, and pages of one slot
    generate_medusa_buffers, generate_candidates (Medusa)         static_tree.static_tree, drafters.medusa
    evaluate_posterior (Medusa)                                   accept.accept; typical.Typical, which is lossy

Sources: SGLang's EAGLE worker; FlashInfer's paged wrappers; Medusa (arXiv 2401.10774), sections 2.1 and 2.3.
"""

from __future__ import annotations

from typing import Literal, TypedDict

import torch
from torch import Tensor

from eagle_server.attention.interface import TreeMask
from eagle_server.attention.spec_info import kv_arguments
from eagle_server.speculation.sampling import typical_threshold
from eagle_server.speculation.static_tree import Choices, sorted_choices

Rule = Literal["typical", "nucleus"]
TOPK = 10  # candidate tokens of each head
PAD = -1


class MedusaBuffers(TypedDict):
    """A static tree of n nodes, root included, and P paths from the root to a leaf."""

    medusa_attn_mask: Tensor  # float32 [1, 1, n, n], additive: 0 at ancestors and self, -inf elsewhere
    tree_indices: Tensor  # int64 [n], indices into [root, topk tokens of head 0, topk tokens of head 1, ...]
    medusa_position_ids: Tensor  # int64 [n], depths
    retrieve_indices: Tensor  # int64 [P, depth + 1], nodes of each path, -1: padding
    sorted_medusa_choices: list[tuple[int, ...]]  # choice i is node i + 1


def verify_tree_greedy(
    draft_token: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_argmax: Tensor,
    steps: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The walk by links: from each node to its first child that has the target's token at the node.

    If two siblings have the same token, this walk takes the first one. `walk_tree` takes the one with the longer path.

    Args:
        draft_token, target_argmax: int64 [bs, D].
        retrive_next_token, retrive_next_sibling: int64 [bs, D], -1: none.

    Returns:
        path int64 [bs, steps + 1], accept_length int64 [bs], tokens int64 [bs, steps + 1], as `walk_tree`.
    """

    def at(values: Tensor, node: Tensor) -> Tensor:
        return values.gather(1, node.clamp(min=0)[:, None])[:, 0]

    last = torch.zeros_like(draft_token[:, 0])
    path = [last]
    for _ in range(steps):
        node = torch.where(path[-1] < 0, -1, at(retrive_next_token, last))
        wanted = at(target_argmax, last)
        for _ in range(draft_token.shape[1] - 2):
            refused = (node >= 0) & (at(draft_token, node) != wanted)
            node = torch.where(refused, at(retrive_next_sibling, node), node)
        node = torch.where((node >= 0) & (at(draft_token, node) == wanted), node, -1)
        last = torch.where(node < 0, last, node)
        path.append(node)
    nodes = torch.stack(path, dim=1)
    tokens = torch.where(nodes < 0, -1, target_argmax.gather(1, nodes.clamp(min=0)))
    return nodes, (nodes >= 0).sum(1) - 1, tokens


def flat_custom_mask(mask: TreeMask, seq_lens: Tensor) -> Tensor:
    """The mask as FlashInfer's plan takes it: bool, the rows [R, L + W] of every request, flattened and concatenated.

    seq_lens int64 [bs] are the sequence lengths L. Every row sees the whole prefix.
    """
    parts = []
    for length, window in zip(seq_lens, mask.visible, strict=True):
        prefix = window.new_ones(len(window), int(length))
        parts.append(torch.cat([prefix, window], dim=1).view(-1))
    return torch.cat(parts)


def page_arguments(
    req_pool_indices: Tensor, kv_lens: Tensor, req_to_token: Tensor, page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """kv_indptr, kv_indices and kv_last_page_len in pages, as FlashInfer's paged wrappers take them."""
    pages = torch.div(kv_lens + page_size - 1, page_size, rounding_mode="floor")
    kv_indptr, first_slots = kv_arguments(req_pool_indices, pages, req_to_token[:, ::page_size])
    last_page_len = (kv_lens - 1) % page_size + 1
    return kv_indptr, torch.div(first_slots, page_size, rounding_mode="floor"), last_page_len.int()


def generate_medusa_buffers(
    medusa_choices: Choices | list[tuple[int, ...]] | list[list[int]],
    topk: int = TOPK,
    device: str | torch.device = "cpu",
) -> MedusaBuffers:
    """The tensors of a tree. Nodes are sorted by depth, then by ranks. Paths are sorted by leaf, the last leaf first.

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


def generate_candidates(
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
    """The candidates of one sequence: by path [P, depth + 1], and by node [1, n].

    The root comes from the last row of `logits` [1, rows, V]: its argmax, or a draw from its distribution truncated by
    the rule `sampling`. The other candidates are the topk tokens of each head in `medusa_logits` [heads, 1, rows, V].
    Padding is -1, which is no token id.
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


def evaluate_posterior(
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
    """best_candidate and accept_length, int64 scalars: the path with the most accepted tokens, and their number.

    logits [P, depth + 1, V] and candidates int64 [P, depth + 1] are by path. accept_length does not count the root. An
    entry of -1 is never accepted. Lossy above temperature 0.

        temperature 0   candidate == argmax of the logits before it
        typical         p(candidate) > min(posterior_threshold, posterior_alpha * exp(-entropy of p)); if several paths
                        are longest, the most probable of them
        nucleus         candidate == a draw from p within top_p; paths with a common prefix share its draws
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


def _kept_probs(
    logits: Tensor, temperature: float, sampling: Rule, posterior_threshold: float, posterior_alpha: float, top_p: float
) -> Tensor:
    """Probabilities [.., V] at a temperature, truncated by the rule and renormalized."""
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
    """One token per row of probs [P, depth, V], the same one for rows with equal prefixes in `seen` [P, depth].

    Several draws at one node would raise its probability of being accepted.
    """
    drawn = torch.multinomial(probs.flatten(0, 1), 1, generator=generator).view(seen.shape)
    same = (seen[:, None] == seen[None]).long().cumprod(-1).bool()  # [path, other, depth]
    return drawn.gather(0, same.int().argmax(1))
