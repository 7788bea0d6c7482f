"""Where a long text may be cut into pieces that have the same tokens as the whole text.

A cut is between a letter or digit and a space, line feed or common sign. It is exact if the tokenizer splits there
anyway, and if nothing else in the text depends on what is on the other side. That is so for byte-level tokenizers whose
pre-tokenizers consist of the known expressions below: those of GPT-2, Llama 3, Qwen, DeepSeek, gpt-oss, and the like.
None of these matches a letter or digit with one of the signs after it, and none reads the text before a match.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import tokenizers

PIECE = 2**14  # characters; a longer text is cut
_CUT = re.compile(r"[A-Za-z0-9一-龥](?=[ \n.,;:!?\"()，。])")
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_FIRST = r"[^\r\n\p{L}\p{N}]?"
_WORDS = (  # each matches all letters before cuts
    r" ?\p{L}+",
    _FIRST + r"\p{L}+",
    _FIRST + r"[\p{L}\p{M}]+",
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
    f"{_FIRST}{_UPPER}*{_LOWER}+|{_FIRST}{_UPPER}+{_LOWER}*",
    f"{_FIRST}{_UPPER}*{_LOWER}+{_CONTRACTION}?|{_FIRST}{_UPPER}+{_LOWER}*{_CONTRACTION}?",
)
_NUMBERS = (r"\p{N}", r"\p{N}{1,3}", r" ?\p{N}+")  # each matches all digits before cuts
_OTHERS = (
    *(_CONTRACTION, "'(?i:[sdmt]|ll|ve|re)", "'s", "'t", "'re", "'ve", "'m", "'ll", "'d"),
    *(r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"),
    *(r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", r" ?[\p{P}\p{S}]+[\r\n]*"),
    *("\n", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"),
    *("[0-9][0-9][0-9]", "[一-龥぀-ゟ゠-ヿ]+", r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""),
)
_KNOWN = re.compile(rf"({'|'.join(map(re.escape, (*_WORDS, *_NUMBERS, *_OTHERS)))})(?:\||$)")


def cuts_of(text: str) -> list[int]:
    """Where to cut a text: at most one place in every PIECE characters, and none in a short text."""
    found = (_CUT.search(text, start, start + PIECE) for start in range(PIECE, len(text), PIECE))
    return [match.end() for match in found if match]


def special_around(tokenizer: tokenizers.Tokenizer) -> tuple[list[int], list[int]] | None:
    """The special tokens before and after every text. None: unknown."""
    text, whole = (tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True))
    places = [start for start in range(len(whole)) if text and whole[start : start + len(text)] == text]
    if len(places) != 1:
        return None
    return whole[: places[0]], whole[places[0] + len(text) :]


def splits_at_cuts(tokenizer: tokenizers.Tokenizer) -> bool:
    """Whether the pieces of every text have the tokens of the whole text, for certain."""
    normalizers, splits = (list(_parts(part)) for part in (tokenizer.normalizer, tokenizer.pre_tokenizer))
    added = tokenizer.get_added_tokens_decoder().values()  # they are found before the text is split
    return (
        all(each["type"] == "NFC" for each in normalizers)
        and all(map(_is_known, splits))
        and all(any(_splits_after(kinds, split) for split in splits) for kinds in (_WORDS, _NUMBERS))
        and not any(token.single_word or token.rstrip or _CUT.search(token.content) for token in added)
    )


def _parts(part: Any) -> Iterator[Mapping[str, Any]]:
    """The normalizers or pre-tokenizers that are applied one after the other, as in tokenizer.json."""
    waiting = [] if part is None else [json.loads(part.__getstate__())]
    while waiting:
        described = waiting.pop(0)
        if described["type"] == "Sequence":
            waiting = [*(described.get("normalizers") or described.get("pretokenizers") or ()), *waiting]
        else:
            yield described


def _is_known(split: Mapping[str, Any]) -> bool:
    """Whether it splits the texts on both sides of a cut as it splits the whole text."""
    if split["type"] == "Split":
        pattern = split["pattern"].get("Regex", "")
        return split["behavior"] in ("Isolated", "Removed") and "|".join(_KNOWN.findall(pattern)) == pattern
    return split["type"] == "Digits" or (split["type"] == "ByteLevel" and not split["add_prefix_space"])


def _splits_after(kinds: Collection[str], split: Mapping[str, Any]) -> bool:
    """Whether a known one splits at every cut that comes after a match of one of these kinds."""
    if split["type"] == "Split":
        return not set(kinds).isdisjoint(_KNOWN.findall(split["pattern"]["Regex"]))
    return bool(split.get("use_regex"))  # GPT-2's
