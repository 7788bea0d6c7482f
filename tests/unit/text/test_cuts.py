"""Long texts are tokenized in pieces: their tokens are those of the whole text, and only the needed ones are made."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from eagle_server.text import cuts
from eagle_server.text import tokenizer as tokenizer_module
from eagle_server.text.tokenizer import FastTokenizer, TextTooLong, TooManyTokens, load_tokenizer
from eagle_tools import DEMO

CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TITLE = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
END = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
PATTERNS = {
    "Llama 3": [CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + END],
    "Qwen 2": [CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + END],
    "gpt-oss": [
        f"{TITLE}*{LOWER}+{CONTRACTION}?|{TITLE}+{LOWER}*{CONTRACTION}?|"
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "Tekken": [f"{TITLE}*{LOWER}+|{TITLE}+{LOWER}*|" + r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "DeepSeek V3": [
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
        r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
}
SPLITS = {name: [pre_tokenizers.Split(Regex(each), "isolated") for each in given] for name, given in PATTERNS.items()}
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT_2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
EXACT = {
    "GPT-2": GPT_2,
    "StarCoder": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT_2]),
    **{name: pre_tokenizers.Sequence([*splits, BYTES]) for name, splits in SPLITS.items()},
}
# Many cuts, and what might join the letters before them with what follows.
PARTS = [*"aaAbzé'sS  \n\n\r\t.,;:!?\"()，。文字ひ112٣-/_|😀\u0301\u200d\u00a0İß", "  ", " a", "\n\n", "<|x>"]
PARTS += ["'s", "'S", "'re", "a's", "A"]
TEXTS = st.one_of(
    st.lists(st.sampled_from(PARTS), max_size=60).map("".join),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
)


def drawn(draw: random.Random, parts: int) -> str:
    return "".join(draw.choices(PARTS, k=parts))


def trained(split: pre_tokenizers.PreTokenizer, *added: AddedToken) -> Tokenizer:
    """A tokenizer that merges whatever its pre-tokenizer leaves together, with tokens before and after a text."""
    draw = random.Random(0)
    made = Tokenizer(models.BPE())
    made.normalizer, made.pre_tokenizer = normalizers.NFC(), split
    trainer = trainers.BpeTrainer(vocab_size=3000, initial_alphabet=BYTES.alphabet(), show_progress=False)
    made.train_from_iterator([drawn(draw, 60) for _ in range(2000)], trainer)
    made.add_tokens([AddedToken("<|x>", normalized=False, lstrip=True), *added])
    made.add_special_tokens(["<s>", "</s>"])
    around = [(piece, made.token_to_id(piece)) for piece in ("<s>", "</s>")]
    made.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=around)
    return made


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (cuts, tokenizer_module):
        monkeypatch.setattr(module, "PIECE", 4)


@pytest.fixture(scope="module", params=[*EXACT, "the demo"])
def exact(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "the demo":
        return Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))
    return trained(EXACT[request.param])


@settings(max_examples=300)
@given(text=TEXTS, last=st.integers(1, 40), special=st.booleans())
@example(text="it's' a  \n\n bA. '文，字。 a\u0301 .b'r, e a'll a <|x> b<|x>.b", last=3, special=True)
def test_the_tokens_of_the_pieces_are_those_of_the_whole_text(
    exact: Tokenizer, text: str, last: int, special: bool
) -> None:
    whole = exact.encode(text, add_special_tokens=special).ids
    tokenizer = FastTokenizer(exact)
    assert tokenizer._around is not None
    assert tokenizer.encode(text, special=special) == whole
    assert tokenizer.encode(text, special=special, last=last) == whole[-last:]
    assert tokenizer.encode(text, special=special, limit=len(whole)) == whole
    if whole:
        with pytest.raises(TooManyTokens) as refused:
            tokenizer.encode(text, special=special, limit=len(whole) - 1)
        assert refused.value.count <= len(whole)


def test_the_texts_of_the_property_have_cuts() -> None:
    draw = random.Random(1)
    assert all(len(cuts.cuts_of(drawn(draw, 400))) > 5 for _ in range(20))


WORDS = PATTERNS["Llama 3"][0]
INEXACT = {
    "nothing splits": trained(BYTES),
    "spaces become a sign": trained(pre_tokenizers.Metaspace()),
    "a space comes first": trained(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "an unknown expression": trained(
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(WORDS + r"|.+\z"), "isolated"), BYTES])
    ),
    "words join what follows": trained(
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(WORDS), "merged_with_next"), BYTES])
    ),
    "numbers do not split": trained(
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r" ?\p{L}+|\s+"), "isolated"), BYTES])
    ),
    "only lower case splits": trained(
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(f"{TITLE}*{LOWER}+|\\p{{N}}|\\s+"), "isolated"), BYTES])
    ),
    "a token has a cut": trained(GPT_2, AddedToken("a:b")),
    "a token strips what follows": trained(GPT_2, AddedToken("xa", rstrip=True)),
    "a token is a word": trained(GPT_2, AddedToken(".b", single_word=True)),
}


@pytest.mark.parametrize("name", INEXACT)
def test_other_tokenizers_get_the_whole_text(name: str) -> None:
    tokenizer = FastTokenizer(INEXACT[name])
    assert tokenizer._around is None
    assert tokenizer.encode("some words, " * 50, last=5) == INEXACT[name].encode("some words, " * 50).ids[-5:]


class Counting(FastTokenizer):
    """Counts the characters that it tokenizes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self.characters = 0

    def _encode(self, text: str, limit: int | None = None, *, special: bool = False) -> list[int]:
        self.characters += len(text)
        return super()._encode(text, limit, special=special)


def test_no_more_is_tokenized_than_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    text = "ab c" * 62_500
    tokenizer = Counting(Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json")))
    assert len(tokenizer.encode(text, last=1)) == 1
    assert tokenizer.characters <= 2 * cuts.PIECE
    tokenizer.characters = 0
    with pytest.raises(TooManyTokens):
        tokenizer.encode(text, limit=1024)
    assert tokenizer.characters <= 2 * cuts.PIECE


def test_what_is_tokenized_at_once_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "MAX_PIECE_BYTES", 100)
    tokenizer = load_tokenizer(str(DEMO / "target"))
    assert len(tokenizer.encode("😀" * 25)) > 25
    for text in ("😀" * 26, "some words " * 50 + "x" * 101):
        with pytest.raises(TextTooLong, match="at most 100"):
            tokenizer.encode(text)
    assert tokenizer.encode("😀" * 1000 + " some words" * 50, last=3) == tokenizer.encode(" some words" * 3, last=3)
    assert len(tokenizer.encode("some words " * 1000)) >= 2000
