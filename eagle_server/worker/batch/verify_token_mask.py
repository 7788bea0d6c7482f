"""Token masks for verification: the tokens that grammars allow after each node, found while the device verifies.

`draft_ranking.py` asks the same matchers while a tree grows. What was asked there is not computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from eagle_server.ops.device import upload
from eagle_server.plan import Chunk, Decode, GrammarMatcher
from eagle_server.speculation.sampling import SamplingBatch
from eagle_server.speculation.transforms import Masks
from eagle_server.speculation.tree import Tree
from eagle_server.worker.host import HostCopy

Masked = TypeVar("Masked", Tree, None)
_NO_TREE: tuple[list[int], list[int]] = ([-1], [-1])  # tokens and parents of a root alone


@dataclass(frozen=True)
class VerifyTokenMask:
    """The scheduled requests with grammars, by their number in the batch, and their trees on the way to the host.

    `Batches.token_mask` makes it.
    """

    scheduled: tuple[tuple[int, Decode | Chunk], ...]
    device: torch.device
    trees: HostCopy | None = None  # tokens and parents [bs, D]; None: there are only roots

    @classmethod
    def of(cls, scheduled: Sequence[Decode | Chunk], device: torch.device, tree: Tree | None = None) -> VerifyTokenMask:
        """Starts the copy of the trees. At least one request has a grammar."""
        masked = tuple((n, request) for n, request in enumerate(scheduled) if request.grammar_matcher is not None)
        has_nodes = tree is not None and tree.size > 1
        trees = HostCopy({"tokens": tree.tokens, "parents": tree.parents}) if tree is not None and has_nodes else None
        return cls(masked, device, trees)

    def sampling(self, sampling: SamplingBatch) -> SamplingBatch:
        """`sampling` with the masks before its other transforms, for requests without trees."""
        return self.masked(None, sampling)[1]

    def masked(self, tree: Masked, sampling: SamplingBatch) -> tuple[Masked, SamplingBatch]:
        """The tree without the nodes that have no mask, and `sampling` with the masks before its other transforms.

        Waits for the copy of the trees.
        """
        tokens, parents = (None, None) if self.trees is None else self.trees.lists("tokens", "parents")
        bits, is_cut = [], False
        for number, request in self.scheduled:
            assert request.grammar_matcher is not None
            request_tree = _NO_TREE if tokens is None else (tokens[number], parents[number])
            found, kept = tree_masks(request.grammar_matcher, request.all_tokens, *request_tree)
            bits.append(found)
            if tokens is not None and kept != tokens[number]:
                tokens[number], is_cut = kept, True
        if tree is not None and is_cut:
            tree = replace(tree, tokens=upload(tokens, self.device))
        masks = Masks(tuple(number for number, _ in self.scheduled), upload(np.stack(bits), self.device, torch.int32))
        return tree, replace(sampling, transforms=(masks, *sampling.transforms))


def tree_masks(
    matcher: GrammarMatcher, all_tokens: Sequence[int], tokens: Sequence[int], parents: Sequence[int]
) -> tuple[NDArray[np.int32], list[int]]:
    """The tokens allowed after each node of a tree: bits of int32 [nodes, words], see `GrammarMatcher`.

    Node 0 is the root, the text's last token. Parents come before children; token -1 is padding. Returns also the
    tokens, with -1 for nodes without a mask, so that no accepted path leads there.
    """
    masks = np.full((len(tokens), matcher.words), -1, dtype=np.int32)
    paths: list[tuple[int, ...] | None] = []
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        above = paths[parent] if node else ()
        path = above if above is None or not node else (*above, token)
        mask = None if path is None else matcher.mask(all_tokens, path)
        paths.append(None if mask is None else path)
        if mask is not None:
            masks[node] = mask
    return masks, [-1 if node and path is None else tokens[node] for node, path in enumerate(paths)]
