"""A tokenizer that can spell JSON, and one grammar of each kind that a client may ask for."""

from __future__ import annotations

import json
import string

from tokenizers import AddedToken, Tokenizer, decoders, models

from eagle_server.engine.grammars.matcher import MaskBudget
from eagle_server.request import Grammar

END = "<end>"
PIECES = ('{"', '": ', '", "', "true", "false", "null", "[]", "12", "ab", "}}")
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["ab", "ba", "b"]},
        "flag": {"type": "boolean"},
        "parts": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["kind", "flag", "parts"],
    "additionalProperties": False,
}
GRAMMARS = {
    "json_schema": Grammar(kind="json_schema", source=json.dumps(SCHEMA)),
    "json_object": Grammar(kind="json_object"),
    "regex": Grammar(kind="regex", source=r"(ab|ba|true){2,6}[0-9]{3}"),
    "choice": Grammar(kind="choice", source=json.dumps(["abba", 'say "true"\\', "abab\n", "12ab12ab", "baab é"])),
    "ebnf": Grammar(kind="ebnf", source='root ::= "(" root ")" root | [a-c]{0,2}'),
}

# llguidance's limit for a row of items is 2,000. After a bracket there are three for each alternative.
ALTERNATIVES = Grammar(
    kind="ebnf",
    source='root ::= [a-c]* ("(" any)?\n'
    + f"any ::= {' | '.join(f'r{n}' for n in range(680))}\n"
    + "".join(f'r{n} ::= "{n}x" r{n} | "{n}y"\n' for n in range(680)),
)


def json_tokenizer() -> Tokenizer:
    """Token 0 is the end of sequence. The other tokens are single characters and PIECES."""
    tokens = [END, *string.printable, "é", *PIECES]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


VOCAB = json_tokenizer().get_vocab_size()


def unhurried() -> MaskBudget:
    """For what is drafted or allowed: else the speed of the machine decides."""
    return MaskBudget(slow=60.0, longest=60.0, per_cycle=60.0, per_request=60.0)
