"""The base class of the option sections, and the types that several sections use."""

from __future__ import annotations

import json
import re
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Annotated, ClassVar, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


class ConfigError(ValueError):
    """A wrong option. The message is one line: the option, the value found, and what is allowed."""


def model_location(value: str) -> str:
    path = Path(value).expanduser()
    if path.is_dir():
        return str(path)
    if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", value) and not path.exists():
        return value
    raise ValueError("no such directory, and not a Hugging Face id (owner/name)")


class HubGGUF(NamedTuple):
    """A GGUF file on the Hub. wanted: its name, or the type that it is named after, as Q4_K_M."""

    repository: str
    wanted: str


def weights_location(value: str) -> str:
    path = Path(value).expanduser()
    if gguf_file(path) == path:
        return str(path)
    if hub_gguf(value) is not None:
        return value
    try:
        return model_location(value)
    except ValueError:
        raise ValueError(
            "no such directory or GGUF file, and not a Hugging Face id (owner/name, or owner/name:Q4_K_M of GGUF files)"
        ) from None


def hub_gguf(value: str) -> HubGGUF | None:
    """What owner/name:TYPE, owner/name:FILE.gguf and owner/name/FILE.gguf name; None: something else."""
    found = re.fullmatch(r"(\w[\w.-]*/\w[\w.-]*)(?::([\w./-]+)|/([\w./-]+\.gguf))", value)
    if found is None or Path(value).expanduser().exists():
        return None
    return HubGGUF(found[1], found[2] or found[3])


def gguf_file(path: Path) -> Path | None:
    """The GGUF file at this path, or the only one in this directory, without safetensors; None: there is none.

    Of a file in parts it is the first one.
    """
    if path.is_dir():
        found = sorted(path.glob("*.gguf"))
        is_one = len(found) == 1 or (found and found[0].stem == f"{gguf_name(found[0])}-00001-of-{len(found):05d}")
        return found[0] if is_one and not any(path.glob("*.safetensors")) else None
    return path if path.suffix == ".gguf" and path.is_file() else None


def gguf_name(file: Path) -> str:
    """The model's name in the name of a GGUF file, without the number of a part."""
    return re.sub(r"-\d{5}-of-\d{5}$", "", file.stem)


def file_location(value: str) -> str:
    path = Path(value).expanduser()
    if path.is_file():
        return str(path)
    if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*/\S+", value) and not path.exists():
        return value
    raise ValueError("no such file, and not a file on Hugging Face (owner/name/file)")


def local_file(value: str) -> str:
    path = Path(value).expanduser()
    if not path.is_file():
        raise ValueError("no such file")
    return str(path)


def proxy_address(value: str) -> str:
    try:
        return value if value == "unix" else str(ip_network(value) if "/" in value else ip_address(value))
    except ValueError:
        raise ValueError("should be an address like 127.0.0.1, a network like 10.0.0.0/8, or unix") from None


def comma_separated(value: object) -> object:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def json_object(value: object, *, like: str = '{"rope_theta": 10000}') -> object:
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise ValueError(f"should be a JSON object, like {like}")
    return parsed


Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1)]
ModelLocation = Annotated[Text, AfterValidator(model_location)]
WeightsLocation = Annotated[Text, AfterValidator(weights_location)]


class Section(BaseModel):
    """A group of options. Its docstring is the heading in --help; its option names begin with `prefix`."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    prefix: ClassVar[str] = ""
