"""The text of the demo's model card."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eagle_tools.training.loop import History


@dataclass(frozen=True)
class CardFacts:
    """The facts in a card: the target's curves, the evaluation of the head, the held-out files, sizes in bytes.

    recipes: of the heads whose mean is the head. The first was trained from new weights, the others from the first.
    """

    target: History
    head: Mapping[str, float]
    recipes: Sequence[Mapping[str, Any]]
    held_out_files: Sequence[str]
    target_bytes: int
    head_bytes: int


@dataclass(frozen=True)
class HeadFacts:
    """The facts about one more head: the curves of its training, and the size of its files in bytes."""

    history: History
    size: int


def heads_card(heads: Mapping[str, HeadFacts]) -> str:
    """The Markdown card of the heads "medusa", "redrafter" and "block"."""
    block = {name: points[-1][1] for name, points in heads["block"].history.curves.items()}
    drafts = sum(name.startswith("T=0 step ") for name in block)
    tv = ", ".join(f"{block[f'T=1 TV step {step + 1}']:.3f}" for step in range(drafts))
    return _HEADS_CARD.format(
        table=_heads_table(heads),
        block=_accuracy_table(block, drafts),
        tv=tv,
        confidence_error=block["T=1 confidence error"],
    )


def _heads_table(heads: Mapping[str, HeadFacts]) -> str:
    lines = ["| | MB | steps | held-out loss | accept length, T=0 | T=1 |", "|---|---|---|---|---|---|"]
    for name, facts in heads.items():
        (steps, loss), lengths = facts.history.curves["held-out loss"][-1], []
        for label in ("T=0", "T=1"):
            lengths.append(f"{facts.history.curves[f'{label} accept length'][-1][1]:.2f}")
        lines.append(
            f"| [`{name}/`]({name}-loss.png) | {facts.size / 1e6:.1f} | {steps} | {loss:.3f} | {' | '.join(lengths)} |"
        )
    return "\n".join(lines)


def model_card(facts: CardFacts) -> str:
    """The Markdown card of the demo pair."""
    target_steps, target_loss = facts.target.curves["held-out loss"][-1]
    first, *tunings = facts.recipes
    return _CARD.format(
        python=platform.python_version(),
        target_mb=facts.target_bytes / 1e6,
        head_mb=facts.head_bytes / 1e6,
        target_steps=target_steps,
        target_loss=target_loss,
        head_loss=facts.head["held-out loss"],
        first=_training(first),
        tunings="; ".join(f"the same and then {_training(recipe)}" for recipe in tunings),
        curves=", ".join(f"[`{recipe['loss']}`](eagle3-{recipe['loss']}-loss.png)" for recipe in facts.recipes),
        passes=first["passes"],
        own_texts=first["sampled_texts"],
        accuracy=_accuracy_table(facts.head, first["passes"]),
        tv=", ".join(f"{facts.head[f'T=1 TV step {step + 1}']:.3f}" for step in range(first["passes"])),
        held_out="\n".join(f"- `{name}`" for name in facts.held_out_files),
    )


def _training(recipe: Mapping[str, Any]) -> str:
    return f"{recipe['steps']} steps of {recipe['texts'] * recipe['length']} rows by `{recipe['loss']}`"


def _accuracy_table(head: Mapping[str, float], passes: int) -> str:
    steps = range(1, passes + 1)
    lines = [
        "| text written by the target at | " + " | ".join(f"step {step}" for step in steps) + " | accept length |",
        "|---|" + "---|" * (len(steps) + 1),
    ]
    for label in ("T=0", "T=1", "T=1 coupled"):
        rates = " | ".join(f"{head[f'{label} step {step}']:.3f}" for step in steps)
        lines.append(f"| {label} | {rates} | {head[f'{label} accept length']:.2f} |")
    return "\n".join(lines)


_HEADS_CARD = """# More heads for the demo's target

Small ones, for the repository's sake: `medusa/` has four heads of two residual blocks, whose logits are by the target's
own lm_head; `redrafter/` a recurrent head of width 256; `block/` a block drafter in DSpark's format: two causal layers
over the streams that the EAGLE-3 head reads, 8 rows that draft the token after their own, Markov edges of rank 64, and
a confidence head. Data, limits and licence are those of the [demo](README.md).

    python -m eagle_server --speculative-algorithm MEDUSA
    python -m eagle_server --speculative-algorithm REDRAFTER
    python -m eagle_server --speculative-algorithm DFLASH

{table}

The accept length is that of a chain without a tree, bonus included, in texts that the target wrote after held-out
prompts, as in the table of the EAGLE-3 head; a tree accepts more. `python -m eagle_tools.bench.drafters` compares them
as served. The block drafter's loss is `kl+tv` with that of its confidence; the others' is a cross-entropy.

The block drafter, draft by draft, for a chain of all of them, as in the table of the EAGLE-3 head:

{block}

At T=1 TV(p, q) is {tv} in these steps.
The confidence head is wrong by {confidence_error:.3f} on average about 1 - TV. The rate of the shipped head's training
was first planned for more steps, and came down in the last 600.

    python -m eagle_tools.training demo-heads --work DIR

makes them anew, and this file.
"""

_CARD = """# The embedded demo pair

A small language model of Python source (`target/`) and an EAGLE-3 draft head for it (`eagle3/`), made so that
`python -m eagle_server` has something real to serve on any machine ([more heads](HEADS.md)). They are a
demonstration of speculative decoding and a fixture of the tests, not a coding assistant.

| | target | eagle3 |
|---|---|---|
| architecture | LlamaForCausalLM, 16 layers of width 256, 4 heads over 2 KV heads, tied embeddings | \
LlamaForCausalLMEagle3, one layer of the same width over the streams after layers 2, 8 and 13 |
| vocabulary | 4096, byte-level BPE | the 2048 most frequent of them (`d2t`, `t2d`) |
| `model.safetensors` | {target_mb:.1f} MB, bfloat16 (served in float32) | {head_mb:.1f} MB, bfloat16 |
| context | 1024 tokens | 1024 tokens |
| training | {target_steps} steps of 6144 tokens | \
the mean of heads trained for {first}; {tunings}; with {passes} passes of training-time test |
| held-out loss | {target_loss:.3f} nats per token | {head_loss:.3f} nats (soft labels, mean of the passes) |

Curves: [`target-loss.png`](target-loss.png); of the heads, by their losses: {curves}.

## Use
The prompt is raw Python source, with no template: `def fibonacci(n):\\n`. The text ends with `<|endoftext|>` (id 0)
where a file would end. Sensible temperatures are 0 to 1.

## How well the head drafts
How often the head's first choice is what the target writes next, after 64-token prompts from held-out files, for a
chain of {passes} steps without a tree; accept length counts tokens per target forward, bonus included:

{accuracy}

The server drafts coupled: it adds the noise of the target's draws to the head's log-probabilities. That row is the
probability that the draw is drafted, not a count. TV(p, q) is {tv} in these steps.

A tree (topk 4, 13 nodes) accepts more; `python -m eagle_tools.bench` measures it as served. At T=0 so small a model
soon repeats itself, and repetition is easy to draft: the rows of T=1 say more about the head.

## Data
The source code of the Python {python} standard library with its tests, without files over 200 kB and without
`site-packages`, `lib2to3`, `idlelib`, `turtledemo` and `encodings`. Python is copyright (c) 2001 Python Software
Foundation, all rights reserved, and distributed under the PSF License Agreement (https://docs.python.org/3/license.html).
The models reproduce fragments of that source. The head also saw {own_texts} texts of 257 tokens that the target itself
wrote, at temperatures 0, 0.7 and 1, after prompts from the training files.

Whole files are held out by a hash of their path, about 1.5 %; nothing was trained, and no draft vocabulary counted, on:

{held_out}

## Making it
    python -m eagle_tools.training demo --work DIR

trains tokenizer, target and heads one after the other, each resumable, and writes this directory: about four hours on
two cores. `python -m eagle_tools.training --help` names the stages, and how to train a head for a target of
your own.

## Limits
Sixteen thin layers and one small corpus: the target writes plausible Python, in the style of the standard library, and
means nothing by it; it knows nothing after its context of 1024 tokens. It can emit code with errors, or text in the
likeness of the corpus's licences and names. Do not run what it writes.
"""
