"""Reading options from flags, a YAML file and the environment. An error is one line and exit status 2."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

import yaml
from pydantic import SecretStr, ValidationError
from pydantic.fields import FieldInfo

from eagle_server.config.base import ConfigError, Section
from eagle_server.config.other_names import OTHER_NAMES
from eagle_server.config.sections import Config
from eagle_server.version import version

ENV_PREFIX = "EAGLE_SERVER_"

_DESCRIPTION = """\
Serve a language model over HTTP, accelerated by speculative decoding. Without options: the embedded demo.

Any option --some-name may also be a line `some-name: value` in the YAML file of --config, or EAGLE_SERVER_SOME_NAME in
the environment. Flags win over the file, the file over the environment, the environment over the defaults."""

_EXAMPLES = """\
examples:
  eagle-server
      the demo on http://127.0.0.1:30000
  eagle-server --speculative-num-steps 3 --topk 4
      the same with draft trees of depth 3, 4 children per node and 3 * 4 + 1 nodes
  eagle-server --model-path meta-llama/Llama-3.1-8B-Instruct \\
      --speculative-draft-model-path yuhuili/EAGLE3-LLaMA3.1-Instruct-8B
      a published pair: the head's format is detected, the trees are chosen by architecture
  eagle-server --speculative-algorithm NONE
      the demo without speculation
  eagle-server --config configs/llama-3.1-8b-eagle3.yaml --port 8000 --dry-run
      print the configuration of a preset and a flag

other commands, each with its own --help:
  eagle-server serve [MODEL] [options]   the same as eagle-server; MODEL is short for --model-path
  eagle-server chat [MODEL] [options]    talk to a model in the terminal, or with --url URL to a running server
  eagle-server tree --prompt "def f(n):" generate a text without a server and show the tree of each cycle
  eagle-server bench                     speculative and plain serving, side by side
  eagle-server train                     train a target, or a draft head for one
  eagle-server help COMMAND              the same as COMMAND --help"""


@dataclass(frozen=True)
class Option:
    """One option: its flag (`name` without the dashes), its section and field, and its declaration."""

    name: str
    section: str
    field: str
    declaration: FieldInfo

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.name.upper().replace("-", "_")

    @property
    def metavar(self) -> str:
        for part in (self.declaration.annotation, *get_args(self.declaration.annotation)):
            if get_origin(part) is Literal:
                return "{" + ",".join(get_args(part)) + "}"
        if self.name.endswith("-per-key"):
            return "N"
        return self.name.rpartition("-")[2].upper()


@dataclass(frozen=True)
class Setting:
    """A value, and the place that an error message names for it."""

    place: str
    value: Any


def _options() -> dict[str, Option]:
    options = {}
    for section, info in Config.model_fields.items():
        cls = info.annotation
        assert isinstance(cls, type) and issubclass(cls, Section)
        for field, declaration in cls.model_fields.items():
            name = cls.prefix + field.replace("_", "-")
            options[name] = Option(name, section, field, declaration)
    return options


OPTIONS = _options()
COMMON = (  # the options of the short help
    *("model-path", "served-model-name", "dtype", "quantization", "context-length", "device", "cpu-threads"),
    *("speculative-algorithm", "speculative-draft-model-path", "speculative-num-steps", "speculative-eagle-topk"),
    *("speculative-num-draft-tokens", "speculative-adaptive", "max-total-tokens", "max-running-requests"),
    *("host", "port", "api-key", "log-level", "log-format"),
)
SECRET = ("api-key", "ssl-keyfile-password")
_ALGORITHM = "speculative-algorithm"
ALIASES = {
    "speculative-eagle-topk": ["--topk"],
    "speculative-medusa-choices": ["--medusa-choices"],
    "speculative-acceptance": ["--acceptance"],
    "speculative-typical-posterior-threshold": ["--typical-posterior-threshold"],
    "speculative-typical-posterior-alpha": ["--typical-posterior-alpha"],
}


def parse_args(
    argv: Sequence[str], environ: Mapping[str, str] = os.environ, more: Callable[[Config], dict[str, Any]] | None = None
) -> Config:
    """The configuration from all sources. `more` returns what --dry-run also prints, or raises a ValueError.

    Raises:
        SystemExit: status 0 after --help or --dry-run; status 2 after one line on stderr if anything is wrong.
    """
    if "--help-all" in argv:
        _parser().print_help()
        sys.exit(0)
    parser = _parser(everything=False)
    parsed, unknown = parser.parse_known_args(argv)
    flags = {key.replace("_", "-"): value for key, value in vars(parsed).items() if value is not None}
    dry_run = flags.pop("dry-run")
    del flags["help-all"]
    file = flags.pop("config", environ.get(f"{ENV_PREFIX}CONFIG"))
    try:
        if unknown:
            raise unknown_name("flag", unknown[0].partition("=")[0], [f"--{name}" for name in OPTIONS])
        settings = _from_environment(environ)
        settings |= {} if file is None else _from_yaml(file)
        if flags.get(_ALGORITHM) == "NONE":  # drop the drafting options of a preset
            settings = {name: entry for name, entry in settings.items() if OPTIONS[name].section != "speculative"}
        settings |= {name: Setting(f"--{name}", value) for name, value in flags.items()}
        config = _validate(settings)
    except ConfigError as error:
        parser.error(str(error))
    if dry_run:
        try:
            printed = config.public_dict() | ({} if more is None else more(config))
        except (OSError, ValueError) as error:
            parser.error(str(error))
        sys.stdout.write(json.dumps(printed, indent=2) + "\n")
        parser.exit()
    return config


def from_options(options: Mapping[str, Any]) -> Config:
    """The configuration of options by name, with underscores or dashes. Environment and files are not read.

    Raises:
        ConfigError: an unknown option or a value that is not allowed.
    """
    short = {alias.removeprefix("--"): name for name, aliases in ALIASES.items() for alias in aliases}
    settings: dict[str, Setting] = {}
    for key, value in options.items():
        name = key.replace("_", "-")
        name = short.get(name, name)
        if name not in OPTIONS:
            raise unknown_name("option", key, [known.replace("-", "_") for known in (*OPTIONS, *short)])
        if value is not None:
            settings[name] = Setting(key, str(value).lower() if isinstance(value, bool) else value)
    return _validate(settings)


def changed_options(config: Config) -> list[str]:
    """The options that differ from their defaults, as flags. Secrets are not shown."""
    changed = []
    for option in OPTIONS.values():
        value = getattr(getattr(config, option.section), option.field)
        if value not in (option.declaration.get_default(call_default_factory=True), None):
            shown = "(set)" if isinstance(value, SecretStr) else str(value)
            changed.append(f"--{option.name} {shown}")
    return changed


class OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print one line and exit with status 2, without argparse's usage text."""
        self.exit(2, f"eagle_server: error: {' '.join(message.splitlines())}\n")


def _parser(*, everything: bool = True) -> OneLineParser:
    """`everything`: the help shows all options, not only COMMON ones."""
    parser = OneLineParser(
        prog="eagle-server",
        usage="%(prog)s [options]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="a YAML file of options; configs/ has presets")
    parser.add_argument("--version", action="version", version=version())
    parser.add_argument("--help-all", action="store_true", help=f"show all {len(OPTIONS)} options and exit")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print as JSON the configuration and, for local checkpoints, the memory it needs, and exit",
    )
    groups = {
        section: parser.add_argument_group(f"{section} options", info.annotation.__doc__ if info.annotation else None)
        for section, info in Config.model_fields.items()
    }
    for option in OPTIONS.values():
        default = option.declaration.default
        shown = f" [default: {default}]" if default else ""
        text = f"{option.declaration.description}{shown}".replace("%", "%%")
        keywords: dict[str, Any] = {"help": text if everything or option.name in COMMON else argparse.SUPPRESS}
        if option.declaration.annotation is bool:
            keywords |= {"action": "store_const", "const": "true"}
        else:
            keywords |= {"metavar": option.metavar}
        groups[option.section].add_argument(f"--{option.name}", *ALIASES.get(option.name, ()), **keywords)
    return parser


def _from_environment(environ: Mapping[str, str]) -> dict[str, Setting]:
    names = {option.variable: name for name, option in OPTIONS.items()}
    settings = {}
    for variable, value in environ.items():
        if not variable.startswith(ENV_PREFIX) or variable == f"{ENV_PREFIX}CONFIG":
            continue
        if variable not in names:
            raise unknown_name("environment variable", variable, names)
        settings[names[variable]] = Setting(variable, value)
    return settings


def _from_yaml(file: str) -> dict[str, Setting]:
    if not file:
        raise _empty(f"--config ({ENV_PREFIX}CONFIG)")
    path = Path(file)
    try:
        content = yaml.safe_load(path.expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path}: should hold lines like 'page-size: 16'")
    settings: dict[str, Setting] = {}
    for key, value in content.items():
        name = str(key).replace("_", "-")
        if name not in OPTIONS:
            raise unknown_name(f"key in {path}:", str(key), OPTIONS)
        if name in settings:
            raise ConfigError(f"{path}: {name} stands there twice")
        # Booleans become text, so that `page-size: true` is refused like any wrong number and not read as 1.
        settings[name] = Setting(f"{path}: {key}", str(value).lower() if isinstance(value, bool) else value)
    return settings


def unknown_name(kind: str, name: str, known: Collection[str]) -> ConfigError:
    """The error for an unknown name, with the similar one that may be meant."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    hint = f"did you mean {close[0]}?" if close else "--help-all lists what there is"
    hint = OTHER_NAMES.get(name.lstrip("-").replace("_", "-"), hint)
    return ConfigError(f"unknown {kind} {name}; {hint}")


def _empty(place: str) -> ConfigError:
    """The error for an empty value: it may mean "not given", as in an environment file's template, or a lost secret."""
    return ConfigError(f"{place} is empty: give it a value, or leave it out")


def _validate(settings: Mapping[str, Setting]) -> Config:
    values: dict[str, dict[str, Any]] = {}
    for name, entry in settings.items():
        option = OPTIONS[name]
        values.setdefault(option.section, {})[option.field] = entry.value
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    message = re.sub(r"^(Value error, |(Input|String|Value) (?=should))", "", first["msg"])
    for name, entry in settings.items():
        if first["loc"][:2] == (OPTIONS[name].section, OPTIONS[name].field):
            if entry.value == "":
                raise _empty(entry.place)
            shown = "" if name in SECRET else f" {entry.value!r}"
            raise ConfigError(f"{entry.place}{shown}: {message}")
    raise ConfigError(message)  # a rule between options; its message names them
