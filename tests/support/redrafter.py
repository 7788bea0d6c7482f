"""ReDrafter heads for tests: a random one, a briefly trained one, and the formula in plain arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_server.models.drafts.redrafter import RedrafterHead
from eagle_server.models.targets.decoder import TargetModel
from eagle_tools.training.generate import continue_texts
from eagle_tools.training.loop import Optimizers
from eagle_tools.training.redrafter import NewRedrafter, new_redrafter, rollout_loss
from eagle_tools.training.ttt import teach


def random_redrafter(
    target: TargetModel, *, exit_dim: int | None = None, draft_layers: int = 2, rnn: bool = True, seed: int = 1
) -> RedrafterHead:
    """An untrained head with random weights and biases."""
    torch.manual_seed(seed)
    head = new_redrafter(target, exit_dim=exit_dim, draft_layers=draft_layers, rnn=rnn).head
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.25)
    return head.requires_grad_(requires_grad=False).eval()


def trained_redrafter(target: TargetModel, *, steps: int = 80, rollout: int = 3, seed: int = 0) -> NewRedrafter:
    """A head trained for a few seconds on texts of a tiny target, at temperatures 0 and 1."""
    state, generator = torch.get_rng_state(), torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    vocab = target.config.vocab_size
    prompts = torch.randint(vocab, (384, 4), generator=generator)
    texts = continue_texts(target, prompts, 46, torch.tensor([0.0, 1.0, 1.0]).repeat(128), generator)
    new = new_redrafter(target, draft_layers=1)
    optimizers, everything = Optimizers.of(new.head), torch.arange(vocab)
    for step in range(steps):
        window = texts[torch.randint(len(texts), (24,), generator=generator)]
        loss, _ = rollout_loss(new.head, teach(target, window, everything), rollout)
        loss.backward()
        optimizers.step(0.01 * (1 - step / steps))
    new.head.requires_grad_(requires_grad=False)
    torch.set_rng_state(state)
    return new


def reference_logits(w: dict[str, Tensor], embed: Tensor, context: Tensor, tokens: list[int]) -> Tensor:
    """The logits after `tokens`, by the formula. The first token follows the position of context [H]."""
    state = torch.zeros_like(context)
    for token in tokens:
        if "rnn_u.weight" in w:
            x = w["rnn_w.weight"] @ embed[token] + w["rnn_u.weight"] @ state + w["rnn_u.bias"]
            state = x * x.sigmoid()
        else:
            state = embed[token] + state
    y = torch.cat([context, state])
    if "input_proj.weight" in w:
        y = w["input_proj.weight"] @ y + w["input_proj.bias"]
    layer = 0
    while f"lm_head.{layer}.linear.weight" in w:
        x = w[f"lm_head.{layer}.linear.weight"] @ y + w[f"lm_head.{layer}.linear.bias"]
        y = y + x * x.sigmoid()
        layer += 1
    return w[f"lm_head.{layer}.weight"] @ y
