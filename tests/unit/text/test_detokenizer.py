"""Detokenized text has no incomplete characters and no part of a stop string."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from eagle_server.text.detokenizer import IncrementalDetokenizer
from eagle_server.text.stop_strings import StopStrings
from eagle_server.text.token_spelling import TokenSpelling
from eagle_server.text.tokenizer import FastTokenizer, TransformersTokenizer, load_tokenizer
from tests.api.fake_engine import EOS, ID, byte_tokenizer

BYTES = FastTokenizer(byte_tokenizer())


def sentencepiece_like() -> FastTokenizer:
    """Like Llama 2's: spaces as U+2581, bytes as <0x00>, and a decoder that strips the first space."""
    words = ["▁Hello", "▁world", "▁", "H", "e", "l", "o", "w", "r", "d", "a"]
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {w: 256 + i for i, w in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return FastTokenizer(tokenizer)


def pieces(tokenizer: FastTokenizer, token_ids: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt or [])
    return [*(detokenizer.push(token) for token in token_ids), detokenizer.flush()]


@given(st.text(max_size=80))
@pytest.mark.deep
def test_pieces_add_up_to_the_text(text: str) -> None:
    out = pieces(BYTES, BYTES.encode(text))
    assert "".join(out) == text
    assert not any("\ufffd" in piece for piece in out) or "\ufffd" in text


@given(st.binary(max_size=300))
def test_broken_utf8_adds_up_to_its_decoding(raw: bytes) -> None:
    assert "".join(pieces(BYTES, list(raw))) == raw.decode(errors="replace")


def test_a_character_comes_with_its_last_token() -> None:
    assert pieces(BYTES, list("a😀b".encode())) == ["a", "", "", "", "😀", "b", ""]


def test_an_unfinished_character_comes_at_the_end() -> None:
    assert pieces(BYTES, list("a😀".encode()[:-1])) == ["a", "", "", "", "\ufffd"]


def test_what_is_held_back_is_bounded() -> None:
    detokenizer = IncrementalDetokenizer(BYTES)
    held = 0
    for _ in range(500):
        held = held + 1 if not detokenizer.push(0xFF) else 0
        assert held <= 8


def test_special_tokens_have_no_text() -> None:
    assert pieces(BYTES, [ord("a"), ID[EOS], ord("b")]) == ["a", "", "b", ""]
    assert "".join(pieces(BYTES, [ID[EOS]] * 200 + [ord("b")])) == "b"


def test_the_space_before_the_first_output_token_stays() -> None:
    tokenizer = sentencepiece_like()
    hello, world = (tokenizer._tokenizer.token_to_id(piece) for piece in ("▁Hello", "▁world"))
    assert pieces(tokenizer, [world, hello], prompt=[hello]) == [" world", " Hello", ""]
    assert pieces(tokenizer, [hello, world]) == ["Hello", " world", ""]


def test_byte_fallback_characters_stay_whole() -> None:
    tokenizer = sentencepiece_like()
    world = tokenizer._tokenizer.token_to_id("▁world")
    ids = [world, *"😀😀é".encode(), world]
    out = pieces(tokenizer, ids, prompt=[world])
    assert "".join(out) == " world😀😀é world"
    assert not any("\ufffd" in piece for piece in out)


def test_demo_like_bpe_adds_up(tmp_path: Path) -> None:
    from tokenizers import trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["héllo wörld 😀😀 日本語 日本語 def f(x):\n    return x\n"] * 10, trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(str(tmp_path))
    rng = random.Random(0)
    for _ in range(200):
        ids = [rng.randrange(tokenizer.get_vocab_size()) for _ in range(rng.randrange(60))]
        assert "".join(pieces(loaded, ids)) == loaded.decode(ids)  # type: ignore[arg-type]


def stopped(stops: list[str], chunks: list[str]) -> tuple[list[str], bool]:
    strings = StopStrings(stops)
    out = [strings.push(chunk) for chunk in chunks]
    return ([*out, strings.flush()], strings.found)


def test_text_is_cut_before_the_stop_string() -> None:
    assert stopped(["STOP"], ["one STOP two"]) == (["one ", ""], True)


def test_a_stop_string_is_found_across_borders() -> None:
    assert stopped(["STOP"], ["one S", "T", "OP two"]) == (["one ", "", "", ""], True)


def test_what_only_began_like_a_stop_string_comes_later() -> None:
    assert stopped(["STOP"], ["a ST", "x"]) == (["a ", "STx", ""], False)
    assert stopped(["STOP"], ["a ST"]) == (["a ", "ST"], False)


def test_the_earliest_of_several_stop_strings_counts() -> None:
    assert stopped(["cd", "b"], ["abcd"]) == (["a", ""], True)


def test_overlapping_beginnings_are_held_back() -> None:
    assert stopped(["aab"], ["aaa", "b"]) == (["a", "", ""], True)


@given(
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.text(alphabet="ab", max_size=5), max_size=12),
)
def test_stop_strings_do_not_depend_on_where_the_borders_are(stops: list[str], chunks: list[str]) -> None:
    out, found = stopped(stops, chunks)
    by_character, found_too = stopped(stops, list("".join(chunks)))
    assert found == found_too == any(stop in "".join(chunks) for stop in stops)
    if not found:
        assert "".join(out) == "".join(by_character) == "".join(chunks)


@pytest.mark.parametrize(
    ("token", "shown"),
    [(ord("a"), "a"), (ord(" "), " "), (ord("\n"), "\n"), (0xF0, "bytes:\\xf0"), (ID[EOS], EOS), (9999, "")],
)
def test_single_tokens_are_shown_distinctly(token: int, shown: str) -> None:
    assert TokenSpelling(BYTES)(token) == shown


def test_sentencepiece_tokens_are_shown_with_their_space() -> None:
    tokenizer = sentencepiece_like()
    spelling = TokenSpelling(tokenizer)
    assert spelling(tokenizer._tokenizer.token_to_id("▁Hello")) == " Hello"
    assert spelling(0xF0) == "bytes:\\xf0"


def test_a_directory_without_tokenizer_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="no usable tokenizer in .*: "):
        load_tokenizer(str(tmp_path))


def test_a_directory_without_any_tokenizer_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no usable tokenizer in .*: it has no tokenizer.json"):
        load_tokenizer(str(tmp_path))


def test_other_tokenizers_come_from_transformers(tmp_path: Path) -> None:
    byte_vocabulary = {"h": 0, "e": 1, "l": 2, "o": 3, "Ġ": 4, "he": 5, "<|endoftext|>": 6}
    (tmp_path / "vocab.json").write_text(json.dumps(byte_vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh e\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    tokenizer = load_tokenizer(str(tmp_path))
    assert isinstance(tokenizer, TransformersTokenizer)
    assert tokenizer.encode("hello hello") == [5, 2, 2, 3, 4, 5, 2, 2, 3]
    assert tokenizer.decode([5, 2, 2, 3, 6]) == "hello"
    assert tokenizer.piece(6) == "<|endoftext|>"
    assert tokenizer.longest_piece == len("<|endoftext|>")
