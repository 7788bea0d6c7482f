"""Grammars at verification: which tokens may come after each node, found on the host while the device verifies.

`token_mask.py` has the same grammars for drafting; a node that a drafter asked about is not looked up again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from eagle_server.ops.upload import upload
from eagle_server.plan import Chunk, Decode, GrammarMatcher
from eagle_server.speculation.sampling import SamplingBatch
from eagle_server.speculation.transforms import Masks
from eagle_server.speculation.tree import EagleVerifyInput
from eagle_server.worker.host import HostCopy

_NO_TREE: tuple[list[int], list[int]] = ([-1], [-1])  # tokens and parents of a lone root


@dataclass(frozen=True)
class VerifyTokenMask:
    """The turns of a batch whose outputs must follow grammars, by number, and their trees on the way to the host."""

    turns: tuple[tuple[int, Decode | Chunk], ...]
    device: torch.device
    trees: HostCopy | None = None  # tokens and parents [bs, D]; None: no row has drafts before it

    @classmethod
    def of(
        cls, turns: Sequence[Decode | Chunk], device: torch.device, tree: EagleVerifyInput | None = None
    ) -> VerifyTokenMask:
        """Nothing is copied where no turn has a grammar."""
        chosen = tuple((number, turn) for number, turn in enumerate(turns) if turn.grammar_matcher is not None)
        if not chosen or tree is None or tree.draft_token_num == 1:
            return cls(chosen, device)
        return cls(chosen, device, HostCopy(tree.draft_token.view_as(tree.parents), tree.parents))

    def sampling(self, sampling: SamplingBatch) -> SamplingBatch:
        """`sampling` with the grammars' masks before its other transforms. Waits for the trees, and walks them."""
        if not self.turns:
            return sampling
        tokens, parents = (None, None) if self.trees is None else self.trees.lists()
        found = []
        for number, turn in self.turns:
            assert turn.grammar_matcher is not None
            tree = _NO_TREE if tokens is None else (tokens[number], parents[number])
            found.append(tree_masks(turn.grammar_matcher, turn.text, *tree))
        masks = Masks(tuple(number for number, _ in self.turns), upload(np.stack(found), self.device, torch.int32))
        return replace(sampling, transforms=(masks, *sampling.transforms))


def tree_masks(
    grammar_matcher: GrammarMatcher, text: Sequence[int], tokens: Sequence[int], parents: Sequence[int]
) -> NDArray[np.int32]:
    """Which tokens may come after each node of a tree after `text`: bits of int32 [nodes, words], see `GrammarMatcher`.

    The root, node 0, is the text's last token; parents come before children; token -1 is padding. A node that may not
    stand where it does, or follows such a node or the output's end, has all bits set: no draw leads there.
    """
    masks = np.full((len(tokens), grammar_matcher.words), -1, dtype=np.int32)
    paths: list[tuple[int, ...] | None] = []
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        above = paths[parent] if node else ()
        path = above if above is None or not node else (*above, token)
        mask = None if path is None else grammar_matcher.mask(text, path)
        paths.append(None if mask is None else path)
        if mask is not None:
            masks[node] = mask
    return masks
