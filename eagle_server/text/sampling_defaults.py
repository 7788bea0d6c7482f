"""How a model's makers want it to be sampled: generation_config.json, where a request is silent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle_server.text.model_files import read_json

FILE = "generation_config.json"
FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_OF_SAMPLING = frozenset(FIELDS) - {"repetition_penalty"}  # without effect where `do_sample` is false


def sampling_defaults(location: str, choice: str) -> dict[str, float]:
    """The parameters that the file gives, by their names in requests.

    Args:
        location: the model's directory or Hub id.
        choice: the option: auto, none, or a directory.

    Raises:
        ValueError: there is no such directory or file in it, or a value is no number; the message is one line.
    """
    if choice == "none":
        return {}
    if choice != "auto" and not (Path(choice).expanduser() / FILE).is_file():
        raise ValueError(f"--generation-config {choice}: there is no {FILE}; give auto, none, or a directory with it")
    source = location if choice == "auto" else str(Path(choice).expanduser())
    values = {name: value for name, value in read_json(source, FILE).items() if value is not None}
    unused = _OF_SAMPLING if values.get("do_sample") is False else frozenset()
    given = {name: values[name] for name in FIELDS if name in values and name not in unused}
    for name, value in given.items():
        if not _is_number(value):
            reason = f"{name} should be a number, not {value!r}; --generation-config none ignores the file"
            raise ValueError(f"{FILE} of {source}: {reason}")
    return given


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
