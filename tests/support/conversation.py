"""Ten turns of a model with tools, with the mistakes that models make. The last is an answer in the form of DONE."""

from __future__ import annotations

import json

CAP = 600  # tokens of a turn; one turn is longer
DONE = {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}
KEYS = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"], "additionalProperties": False}


def call(arguments: str, name: str = "lookup") -> str:
    """A call as the model writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


SCRIPT = [
    f"<think>\nWhat is a?\n</think>\n\n{call(json.dumps({'key': 'a'}))}",
    call('{"key": "b"}') + "\n" + call('{"key": "c"}'),
    call('{"key": "d" "e"}'),  # no JSON
    call("{}", name="look_up"),  # no such function
    call(json.dumps({"key": "x" * 2 * CAP})),  # cut by the cap
    "<think>\nHm.\n</think>\n\n",  # nothing but thinking
    '<tool_call>\n{"name": "lookup"}\n</tool_call>',
    call('{"key": "\u2028\u0085\x85"}'),
    call('{"key": "f"}\n'),
    '{"answer": "done"}',
]
