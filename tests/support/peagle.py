"""A P-EAGLE head that is trained in seconds on texts of a tiny target."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from eagle_server.models.drafts.peagle import PEagleHead
from eagle_server.models.targets.decoder import TargetModel
from eagle_tools.training.generate import continue_texts
from tests.support.dense import Recording, features_of


def trained_peagle(head: PEagleHead, target: TargetModel, *, levels: int, steps: int = 200, seed: int = 0) -> None:
    """Train the head in place, on texts at temperatures 0 and 1. Each step scores the tokens after a few positions."""
    state, generator = torch.get_rng_state(), torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    prompts = torch.randint(target.config.vocab_size, (96, 4), generator=generator)
    texts = continue_texts(target, prompts, 40, torch.tensor([0.0, 1.0]).repeat(48), generator)
    head.mask_hidden.data = torch.randn_like(head.mask_hidden)
    learned = list(head.requires_grad_().parameters())
    optimizer, everything = torch.optim.Adam(learned, lr=0.005), torch.arange(head.draft_vocab_size)
    draft_ids = torch.full((target.config.vocab_size,), -100).index_copy(0, head.target_ids(everything), everything)
    for step in range(steps):
        text = texts[step % len(texts)]
        with torch.no_grad():
            features = features_of(target, text.tolist(), head.aux_boundaries)
        loss = torch.zeros(())
        for length in torch.randint(1, texts.shape[1] - levels, (4,), generator=generator).tolist():
            positions = torch.arange(length + levels - 1)[None]
            context = (text[None, 1 : length + 1], features[:length], torch.tensor([length]))
            y = head.rows(*context, positions, Recording())[0]
            answers = draft_ids[text[length + 1 : length + 1 + levels]]
            loss = loss + F.cross_entropy(head.logits(y), answers, reduction="sum")
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = 0.005 * (1 - step / steps)
        optimizer.step()
    head.requires_grad_(requires_grad=False)
    torch.set_rng_state(state)
