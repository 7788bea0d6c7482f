"""What `eagle-server tree` shows: a generation with the tree of every cycle."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.text import Text

from eagle_server.config import Config
from eagle_server.engine.assembly.from_config import build_engine, with_directory
from eagle_server.engine.engine import Engine
from eagle_server.request import Request, SamplingParams
from eagle_server.text.token_spelling import TokenSpelling
from eagle_server.text.tokenizer import Tokenizer, load_tokenizer
from eagle_tools.tree.picture import draw_cycle
from eagle_tools.tree.record import DraftedTree, recorded
from eagle_tools.tree.spelling import visible
from eagle_tools.tree.terminal import ACCEPTED, QUIET, console_for, print_cycle


@dataclass
class StoryCycle:
    """A cycle's tree, and the tokens that the request sent in this cycle."""

    tree: DraftedTree
    sent: list[int]


@dataclass
class Story:
    """A generation: the token drawn after the prompt, and the cycles after it."""

    first: list[int] = field(default_factory=list)
    cycles: list[StoryCycle] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [*self.first, *(token for cycle in self.cycles for token in cycle.sent)]


def show(options: argparse.Namespace, config: Config) -> None:
    """Generate and print. With --out, also draw the trees.

    Raises:
        ValueError: a configuration that cannot be served, or a refused prompt.
        OSError: a file that cannot be read or written.
    """
    console = console_for(sys.stdout)
    prompt = options.prompt_file.read_text(encoding="utf-8") if options.prompt_file is not None else options.prompt
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    config = with_directory(config)
    tokenizer = load_tokenizer(config.model.tokenizer_path or config.target_path)
    engine = build_engine(config, progress=sys.stderr.isatty())
    sampling = SamplingParams(max_tokens=options.max_tokens, temperature=options.temperature, seed=options.seed)
    story = tell(engine, Request(request_id="tree", prompt_token_ids=tokenizer.encode(prompt), sampling=sampling))
    spelling = TokenSpelling(tokenizer)
    drawn = list[Path]()
    _print_prompt(console, engine, prompt, story, spelling)
    for number, cycle in enumerate(story.cycles[: options.cycles], start=1):
        print_cycle(console, number, cycle.tree, spelling)
        if options.out is not None:
            drawn += draw_cycle(number, cycle.tree, spelling, options.out / f"cycle-{number}")
    _print_end(console, story, tokenizer, options.cycles)
    if drawn:
        console.print(Text(f"{len(drawn)} pictures, {drawn[0].name} to {drawn[-1].name}, in {options.out}"))


def tell(engine: Engine, request: Request) -> Story:
    """Run the request alone and record its trees.

    Raises:
        ValueError: the request was refused or failed; the message says why.
    """
    trees: list[DraftedTree] = []
    engine.add(request)
    story = Story()
    with recorded(engine.worker, trees.extend):
        while engine.has_work():
            for delta in engine.step():
                if delta.error is not None:
                    raise ValueError(delta.error)
                if trees:
                    story.cycles.append(StoryCycle(trees.pop(), delta.token_ids))
                else:
                    story.first += delta.token_ids
    return story


def _print_prompt(console: Console, engine: Engine, prompt: str, story: Story, spelling: TokenSpelling) -> None:
    name = engine.ready().speculative_algorithm
    console.print(Text.assemble(("drafter ", QUIET), name))
    console.print(Text.assemble(("prompt  ", QUIET), visible(prompt)))
    first = "".join(spelling(token) for token in story.first)
    console.print(Text.assemble(("first   ", QUIET), (visible(first), ACCEPTED), ("  drawn after the prompt", QUIET)))
    console.print()


def _print_end(console: Console, story: Story, tokenizer: Tokenizer, shown: int) -> None:
    left = len(story.cycles) - shown
    if left > 0:
        console.print(Text(f"{left} more cycles; --cycles {len(story.cycles)} shows them\n", style=QUIET))
    console.print(Text.assemble(("text    ", QUIET), visible(tokenizer.decode(story.tokens))))
    if story.cycles:
        mean = sum(len(cycle.tree.emitted) for cycle in story.cycles) / len(story.cycles)
        total = f"{len(story.tokens)} tokens, {len(story.cycles)} cycles, {mean:.2f} tokens per cycle"
        console.print(Text.assemble(("in all  ", QUIET), total))
