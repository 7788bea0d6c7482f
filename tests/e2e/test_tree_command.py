"""`eagle-server tree` shows the tokens that the demo writes."""

from __future__ import annotations

import re

import pytest

from eagle_server.__main__ import main
from eagle_server.config import parse_args
from eagle_server.engine.assembly.from_config import build_engine
from eagle_server.text.tokenizer import load_tokenizer
from eagle_tools.tree.command import DEFAULT_PROMPT
from eagle_tools.tree.spelling import visible
from eagle_tools.tree.story import Story, tell
from tests.support.engines import request, run, tokens_of

FLAGS = ["--max-total-tokens", "512", "--max-running-requests", "2", "--cpu-threads", "1"]


def engine(*flags: str):
    return build_engine(parse_args([*FLAGS, *flags], environ={}), progress=False)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(parse_args([], environ={}).target_path)


@pytest.fixture(scope="module")
def plain(tokenizer) -> list[int]:
    asked = request("plain", tokenizer.encode(DEFAULT_PROMPT), max_tokens=16)
    return tokens_of(run(engine("--speculative-algorithm", "NONE"), [asked]))["plain"]


@pytest.mark.parametrize(
    "flags", [[], ["--speculative-token-tree", "[(0,), (1,), (0, 0)]"], ["--speculative-algorithm", "NGRAM"]], ids=str
)
@pytest.mark.slow
def test_the_accepted_paths_are_the_plain_text(flags, tokenizer, plain):
    story: Story = tell(engine(*flags), request("tree", tokenizer.encode(DEFAULT_PROMPT), max_tokens=16))
    assert story.tokens == plain
    assert len(story.first) == 1
    for cycle in story.cycles:
        tree = cycle.tree
        assert list(tree.emitted)[: len(cycle.sent)] == cycle.sent
        assert [tree.tokens[node] for node in tree.path[1:]] == list(tree.emitted[:-1])
        assert [tree.parents[node] for node in tree.path] == [-1, *tree.path[:-1]]
    roots = [cycle.tree.tokens[0] for cycle in story.cycles]
    assert roots == [story.first[-1], *(cycle.sent[-1] for cycle in story.cycles[:-1])]


def test_the_command_prints_and_draws(tokenizer, plain, tmp_path, capsys):
    arguments = ["tree", *FLAGS, "--max-tokens", "16", "--cycles", "2", "--out", str(tmp_path / "pictures")]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "drafter EAGLE3" in shown
    assert f"text    {visible(tokenizer.decode(plain))}\n" in shown
    headings = re.findall(r"cycle \d+  (\d+) drafted, (\d+) accepted \+ 1 = (\d+) tokens?", shown)
    assert len(headings) == 2
    assert all(int(accepted) + 1 == int(tokens) for _, accepted, tokens in headings)
    names = sorted(path.name for path in (tmp_path / "pictures").iterdir())
    assert names == ["cycle-1.png", "cycle-1.svg", "cycle-2.png", "cycle-2.svg"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "8000"], "--port: nothing is served here; drop it"),
        (["--cycles", "0"], "--cycles: '0': should be a number, 1 or more"),
        (["--temperature", "hot"], "--temperature: 'hot': should be a number, 0 or more"),
        (["--prompt-file", "no/such"], "No such file or directory: 'no/such'"),
        (["--prompt", ""], "the prompt is empty"),
        (["--speculative-nodes", "3"], "unknown flag --speculative-nodes"),
        (
            ["--speculative-token-tree", "no/such.txt"],
            "--speculative-token-tree no/such.txt: No such file or directory",
        ),
    ],
    ids=str,
)
def test_what_is_wrong_is_one_line(arguments, message, capsys):
    try:
        status: object = main(["tree", *arguments])
    except SystemExit as stopped:
        status = stopped.code
    assert status == 2
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1
    assert error[0].startswith("eagle_server: error: ")
    assert message in error[0]
