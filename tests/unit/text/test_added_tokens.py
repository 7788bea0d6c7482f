"""Tokens that files beside tokenizer.json add, as transformers reads them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers import models, pre_tokenizers

from eagle_server.text.tokenizer import load_tokenizer, read_tokenizer_file

TEXT = "a<|call|>b<|end|> a"


def write(directory: Path, **files: Any) -> None:
    made = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 1, " ": 2, "Ġ": 3}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<s>"])
    made.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **files.pop("config", {})}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))


def described(content: str, *, special: bool) -> dict[str, Any]:
    return {"content": content, "special": special, "lstrip": False, "rstrip": False, "normalized": False}


@pytest.mark.parametrize("special", [True, False])
def test_tokens_of_the_config_are_added_as_in_transformers(tmp_path: Path, special: bool) -> None:
    more = {"5": described("<|call|>", special=special), "6": described("<|end|>", special=True)}
    write(tmp_path, config={"added_tokens_decoder": {"4": described("<s>", special=True), **more}})
    tokenizer, theirs = load_tokenizer(str(tmp_path)), transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer.encode(TEXT)
    assert ids == theirs.encode(TEXT)
    assert {5, 6} <= set(ids)
    assert (tokenizer.piece(5), tokenizer.token_id("<|end|>")) == ("<|call|>", 6)
    assert set(tokenizer.special) == {4, *([5] if special else []), 6}
    assert read_tokenizer_file(str(tmp_path)).encode(TEXT).ids == ids, "grammars read the same tokens"


def test_tokens_of_the_older_file_are_added(tmp_path: Path) -> None:
    write(tmp_path, added_tokens={"<|end|>": 6, "<|call|>": 5, "<s>": 4})
    assert load_tokenizer(str(tmp_path)).encode(TEXT)[1:4] == [5, 1, 6]


def test_an_id_that_cannot_be_given_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, added_tokens={"<|end|>": 9})
    with caplog.at_level(logging.WARNING):
        load_tokenizer(str(tmp_path))
    assert "'<|end|>' is declared with id 9, and gets 5" in caplog.text


def test_what_tokenizer_json_has_stays_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, config={"added_tokens_decoder": {"4": described("<s>", special=True)}})
    with caplog.at_level(logging.WARNING):
        tokenizer = load_tokenizer(str(tmp_path))
    assert not caplog.records
    assert set(tokenizer.special) == {4}
