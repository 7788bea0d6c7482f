"""Token rows: their masks are the generated ids, and what is unknown is refused with its row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle_server.text.chat_template import Conversation, TemplateError
from eagle_tools.training.__main__ import main
from eagle_tools.training.rows.chat_records import ChatRecord, RecordReader
from eagle_tools.training.rows.masking import MaskError, token_rows
from eagle_tools.training.rows.token_rows import read_token_rows
from tests.support.chat_shapes import SHAPES, Shape

QUESTION = {"role": "user", "content": "Say <|im_start|>assistant\nASSISTANT: or [/INST]"}  # a trap for patterns
CALL = {"type": "function", "id": "c1", "function": {"name": "add", "arguments": {"a": 1, "b": "é"}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "turns": [
        QUESTION,
        {"role": "assistant", "content": "A first answer, é."},
        {"role": "user", "content": "More"},
        {"role": "assistant", "content": "two\n\nlines"},
    ],
    "tools": [
        QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "1é", "tool_call_id": "c1"},
        {"role": "assistant", "content": "It is 1é."},
    ],
    "thinking": [
        QUESTION,
        {"role": "assistant", "content": "Yes.", "reasoning_content": "Is it? It is."},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "No.", "reasoning_content": "Hm.\nNot."},
    ],
}


def record(kind: str, shape: Shape) -> ChatRecord:
    messages = [dict(message) for message in CONVERSATIONS[kind]]
    if shape is SHAPES["deepseek"]:  # its prompts open the thinking, so every answer has some
        for message in messages:
            if message["role"] == "assistant":
                message.setdefault("reasoning_content", "A thought.")
    return ChatRecord("x", messages, [TOOL] if kind == "tools" else [], shape.variables)


@pytest.mark.parametrize("kind", CONVERSATIONS)
@pytest.mark.parametrize("name", SHAPES)
def test_the_mask_is_what_the_model_generates_after_the_servers_prompt(name: str, kind: str) -> None:
    shape = SHAPES[name]
    model, given = shape.model(), record(kind, shape)
    if kind == "tools" and not shape.tools:
        with pytest.raises(TemplateError, match="no place for tools"):
            list(token_rows(model, given))
        return
    answers = [place for place, message in enumerate(given.messages) if message["role"] == "assistant"]
    rows = list(token_rows(model, given))
    assert [row.gen for row in rows] == [0, 1]
    for row, place in zip(rows, answers, strict=True):
        prompt = model.template.render(Conversation(given.messages[:place], given.tools))
        served = model.tokenizer.encode(prompt, special=False)
        message = given.messages[place]
        seen = message if shape.thinks else {k: v for k, v in message.items() if k != "reasoning_content"}
        generated = model.tokenizer.encode(shape.writes(seen), special=False)
        assert generated[-1] in model.ends
        assert list(row.input_ids) == served + generated
        assert list(row.loss_mask) == [0] * len(served) + [1] * len(generated)
        assert row.finish_reason == ("tool_calls" if "tool_calls" in message else "stop")


def test_thinking_that_was_switched_off_is_part_of_the_prompt() -> None:
    model = SHAPES["qwen3"].model()
    given = ChatRecord("x", CONVERSATIONS["turns"], variables={"enable_thinking": False})
    row = list(token_rows(model, given))[-1]
    written = [token for token, counts in zip(row.input_ids, row.loss_mask, strict=True) if counts]
    assert model.tokenizer.decode(written, special=True) == "two\n\nlines<|im_end|>"


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (CONVERSATIONS["turns"], "has no reasoning_content"),
        ([QUESTION], "no message of the assistant"),
        ([QUESTION, {"role": "assistant", "content": "a<｜end▁of▁sentence｜>b"}], "ends an answer"),
    ],
)
def test_an_answer_that_cannot_be_told_from_its_prompt_is_refused(messages: Any, reason: str) -> None:
    with pytest.raises(MaskError, match=reason):
        list(token_rows(SHAPES["deepseek"].model(), ChatRecord("x", messages)))


def checkpoint(directory: Path, shape: Shape) -> Path:
    directory.mkdir()
    tokenizer = shape.tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    first, *others = (tokenizer.token_to_id(end) for end in shape.ends)
    (directory / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "eos_token_id": first}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": others}))
    (directory / "chat_template.jinja").write_text(shape.source, encoding="utf-8")
    return directory


def write_rows(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


SHAREGPT = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}], "id": 7}
READY = {"id": "t", "gen": 2, "input_ids": [1, 2], "loss_mask": [0, 1], "finish_reason": "length"}


def test_the_command_prepares_rows_of_all_kinds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = checkpoint(tmp_path / "model", SHAPES["llama3"]), tmp_path / "rows.jsonl"
    openai = {"messages": CONVERSATIONS["tools"], "tools": json.dumps([TOOL]), "source": "here"}
    data = write_rows(tmp_path / "data.jsonl", openai, SHAREGPT, READY)
    command = ["prepare", "--data", str(data), "--model-path", str(model), "--out", str(out)]
    assert main(command) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if "Error" in line]
    assert line == f"RowError: {data}: row 1: unknown key 'source'; --ignore source leaves it out"
    assert not list(tmp_path.glob("rows*"))
    assert main([*command, "--ignore", "source"]) == 0
    rows = list(read_token_rows(out))
    assert [(row.id, row.gen, row.finish_reason) for row in rows] == [
        ("1", 0, "tool_calls"),
        ("1", 1, "stop"),
        ("7", 0, "stop"),
        ("t", 2, "length"),
    ]
    assert "4 rows" in capsys.readouterr().out
    again = tmp_path / "again.jsonl"
    assert main(["prepare", "--data", str(out), "--model-path", str(model), "--out", str(again)]) == 0
    assert again.read_bytes() == out.read_bytes()


def test_texts_are_taken_only_where_that_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = checkpoint(tmp_path / "model", SHAPES["chatml"]), tmp_path / "rows.jsonl"
    data = write_rows(tmp_path / "texts.jsonl", {"text": "ab"}, {"id": "p", "prompt": "x", "completion": "y<|im_end|>"})
    command = ["prepare", "--data", str(data), "--model-path", str(model), "--out", str(out)]
    assert main(command) == 2
    assert "row 1: a text and no conversation: --preformatted" in capsys.readouterr().err
    assert main([*command, "--preformatted"]) == 0
    assert [row.loss_mask for row in read_token_rows(out)] == [(1, 1), (0, 1, 1)]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{", "no JSON"),
        ([1], "a JSON object is expected"),
        ({"question": "?"}, "none of input_ids, messages"),
        ({"messages": [], "id": 1}, "a list of messages"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "message 1: the role should be one of"),
        ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "message 1: unknown key 'mood'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "a list of parts with a text"),
        ({"messages": [{"role": "user"}]}, "message 1: it has no content"),
        ({"messages": CONVERSATIONS["turns"], "tools": "x"}, "tools should be a list"),
        ({"messages": CONVERSATIONS["turns"], "id": [1]}, "id should be a text or a number"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "one for each of the 2 ids"),
        ({"input_ids": [1, -2], "loss_mask": [1, 1]}, "token id -2 is outside"),
        ({"input_ids": [1], "loss_mask": [1], "text": "x"}, "unknown key 'text' beside input_ids"),
    ],
)
def test_what_is_unknown_is_refused_with_its_row(
    row: Any, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, data = checkpoint(tmp_path / "model", SHAPES["chatml"]), tmp_path / "data.jsonl"
    data.write_text(json.dumps(READY) + "\n" + (row if isinstance(row, str) else json.dumps(row)) + "\n")
    assert main(["prepare", "--data", str(data), "--model-path", str(model), "--out", str(tmp_path / "out")]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if "Error" in line]
    assert line.startswith(f"RowError: {data}: row 2: ") and reason in line
    assert not (tmp_path / "out").exists()


def test_a_sharegpt_row_is_the_same_conversation(tmp_path: Path) -> None:
    reader = RecordReader(tmp_path / "x.jsonl")
    assert reader.record(1, {**SHAREGPT, "system": "Be brief"}).messages == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
    ]
