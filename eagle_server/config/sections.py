"""What can be configured, and the rules between options. Descriptions are the text of --help."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    field_validator,
    model_validator,
)

from eagle_server.config.base import ConfigError, Count, ModelLocation, Section, Text, file_location, json_object
from eagle_server.config.device import DeviceSection

logger = logging.getLogger(__name__)

_DEMO = Path(__file__).parents[1] / "assets" / "demo"
DEMO_TARGET = _DEMO / "target"
DEMO_DRAFT = _DEMO / "eagle3"
NGRAM_DEPTH = 8  # longer guesses are seldom right to their end


class ModelSection(Section):
    """What is served."""

    model_path: ModelLocation | None = Field(
        default=None,
        description="the target: a Hugging Face id or a local directory; without it, the embedded demo is served; an "
        "architecture without a class of its own here is run by transformers' code",
    )
    tokenizer_path: ModelLocation | None = Field(
        default=None, description="where the tokenizer is, if not beside the target's weights"
    )
    served_model_name: Text | None = Field(
        default=None, description="the name clients ask for; without it, the id or the directory's name"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="what weights and KV are held in; auto: what the checkpoint says"
    )
    context_length: Count | None = Field(
        default=None, description="most tokens of a request, prompt and output together; without it, the model's own"
    )


def _as_text(value: object) -> object:
    return str(value) if isinstance(value, list) else value  # YAML's own lists


Algorithm = Literal[
    "NONE",
    "EAGLE",
    "EAGLE3",
    "MEDUSA",
    "NEXTN",
    "REDRAFTER",
    "STANDALONE",
    "NGRAM",
    "EAGLE+NGRAM",
    "EAGLE3+NGRAM",
    "NEXTN+NGRAM",
    "STANDALONE+NGRAM",
]


class SpeculativeSection(Section):
    """How tokens are drafted. The output is the same, whatever stands here."""

    prefix: ClassVar[str] = "speculative-"

    algorithm: Algorithm | None = Field(
        default=None,
        description="NONE decodes plainly, NEXTN (or MTP) drafts with the MTP layer in the target's own files, "
        "STANDALONE with a smaller language model of the same vocabulary, NGRAM with what followed the same tokens "
        "earlier in the request, which needs no draft; X+NGRAM joins X's tree and that; without it, detected from the "
        "draft's files",
    )
    draft_model_path: ModelLocation | None = Field(
        default=None,
        description="the draft head, or the smaller model of STANDALONE: a Hugging Face id or a local directory; the "
        "demo brings its own, NEXTN needs none",
    )
    num_steps: Count | None = Field(
        default=None,
        description="depth of the draft tree; given with topk, or both are chosen by architecture; NGRAM: 8 without it",
    )
    eagle_topk: Count | None = Field(
        default=None,
        description="children that each drafted node may have; 1 drafts a chain; not for NGRAM, which "
        "branches as its counts call for",
    )
    num_draft_tokens: Count | None = Field(
        default=None,
        description="nodes that the target verifies at once, the root included; without it, steps * topk + 1; "
        "always steps + 1 where topk is 1; NGRAM: 16 without it; X+NGRAM: of both together",
    )
    token_map: Annotated[str, AfterValidator(file_location)] | None = Field(
        default=None, description="FR-Spec: a file of frequent token ids; the draft proposes no others"
    )
    draft_config_override: Annotated[dict[str, Any], BeforeValidator(json_object)] | None = Field(
        default=None, description="a JSON object whose values replace those of the draft's config.json"
    )

    medusa_choices: Annotated[Text, BeforeValidator(_as_text)] | None = Field(
        default=None,
        description="Medusa's tree: a published one by name, or a list of ranks for each node, like [(0,), (0, 0), "
        "(1,)]; without it, mc_sim_7b_63 as deep as there are heads",
    )

    token_tree: Annotated[Text, BeforeValidator(_as_text)] | None = Field(
        default=None,
        description="the nodes that an EAGLE or MTP head drafts, whatever their scores, each as a list of ranks: "
        "[(0,), (0, 0), (1,)]; in the place of steps, topk and draft tokens",
    )

    @field_validator("algorithm", mode="before")
    @classmethod
    def _name_of_alias(cls, value: object) -> object:
        return {"MTP": "NEXTN", "MTP+NGRAM": "NEXTN+NGRAM"}.get(value, value) if isinstance(value, str) else value

    @property
    def drafts_ngrams(self) -> bool:
        """Whether n-grams are drafted, alone or beside a head's tree."""
        return self.algorithm is not None and self.algorithm.endswith("NGRAM")

    @property
    def head_algorithm(self) -> str | None:
        """What the draft's files must hold; None: whatever they do, or there are none."""
        return None if self.algorithm in (None, "NONE", "NGRAM") else str(self.algorithm).removesuffix("+NGRAM")

    @model_validator(mode="after")
    def _parameters_agree(self) -> Self:
        self.given_parameters()
        if self.medusa_choices is not None and self.algorithm not in (None, "NONE", "MEDUSA"):
            raise ConfigError(f"--medusa-choices has no effect with --speculative-algorithm {self.algorithm}: drop one")
        if self.token_tree is not None:
            self._token_tree_stands_alone()
        return self

    def _token_tree_stands_alone(self) -> None:
        if self.algorithm not in (None, "NONE", "EAGLE", "EAGLE3", "NEXTN"):
            flag = f"--speculative-algorithm {self.algorithm}"
            raise ConfigError(f"--speculative-token-tree has no effect with {flag}: drop one of them")
        for field in ("num_steps", "eagle_topk", "num_draft_tokens"):
            if getattr(self, field) is not None:
                flag = f"--speculative-{field.replace('_', '-')}"
                raise ConfigError(f"{flag}: the tree is that of --speculative-token-tree; drop one of them")

    def given_parameters(self) -> SpeculativeParams | None:
        """The tree parameters completed and checked, None if none is given.

        Raises:
            ConfigError: only some of the parameters are given, or they contradict each other.
        """
        steps, topk = self.num_steps, self.eagle_topk
        if self.algorithm == "MEDUSA":
            self._refuse_tree_parameters()
        if self.algorithm == "NGRAM":
            return self._ngram_parameters()
        if self.head_algorithm == "STANDALONE":
            self._refuse("token_map", "draft_config_override")
        if steps is not None and topk is not None:
            if self.drafts_ngrams:
                return _joined(steps, topk, self.num_draft_tokens or steps * topk + 1)
            return _tree_parameters(steps, topk, self.num_draft_tokens)
        flags = {"num-steps": steps, "eagle-topk": topk, "num-draft-tokens": self.num_draft_tokens}
        given = " and ".join(f"--speculative-{name}" for name, value in flags.items() if value is not None)
        missing = " and ".join(f"--speculative-{name}" for name in ("num-steps", "eagle-topk") if flags[name] is None)
        if given:
            raise ConfigError(f"{given} needs {missing} as well; give none of them for automatic values")
        return None

    def _ngram_parameters(self) -> SpeculativeParams:
        self._refuse("draft_model_path", "eagle_topk", "token_map", "draft_config_override")
        steps, nodes = self.num_steps or NGRAM_DEPTH, self.num_draft_tokens or 2 * NGRAM_DEPTH
        if nodes == 1:
            raise ConfigError("--speculative-num-draft-tokens 1: should be 2 or more: the root is one of them")
        return SpeculativeParams(steps, 0, nodes, ngram_depth=steps)

    def _refuse(self, *fields: str) -> None:
        for field in fields:
            if getattr(self, field) is not None:
                flag = f"--speculative-{field.replace('_', '-')}"
                raise ConfigError(
                    f"{flag} has no effect with --speculative-algorithm {self.algorithm}: drop one of them"
                )

    def _refuse_tree_parameters(self) -> None:
        for field in ("num_steps", "eagle_topk", "num_draft_tokens"):
            if getattr(self, field) is not None:
                flag = f"--speculative-{field.replace('_', '-')}"
                raise ConfigError(f"{flag}: Medusa's trees follow from --medusa-choices alone; drop it")


class CacheSection(Section):
    """The KV cache."""

    page_size: Count = Field(default=1, description="tokens per KV page")
    max_total_tokens: Count | None = Field(
        default=None, description="KV slots that requests share; without it, as many as memory and requests call for"
    )
    disable_radix_cache: bool = Field(
        default=False, description="do not keep KV for later requests with the same prefix"
    )


class SchedulerSection(Section):
    """How requests share the engine."""

    max_running_requests: Count = Field(default=48, description="most requests decoding at once; others wait")
    chunked_prefill_size: Count = Field(
        default=512, description="most prompt tokens per cycle; longer prompts go in chunks"
    )


class ServerSection(Section):
    """The HTTP server."""

    host: Text = Field(default="127.0.0.1", description="address to listen on; 0.0.0.0: all")
    port: Annotated[int, Field(ge=1, le=65535)] = Field(default=30000, description="port to listen on")
    api_key: Annotated[SecretStr, Field(min_length=1)] | None = Field(
        default=None, description="bearer token that clients must send; set it in the environment: ps shows flags"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="least severity that is logged"
    )


class Config(BaseModel):
    """Everything the server was told. None means that the value follows from the checkpoint or the machine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: ModelSection = Field(default_factory=ModelSection)
    device: DeviceSection = Field(default_factory=DeviceSection)
    speculative: SpeculativeSection = Field(default_factory=SpeculativeSection)
    cache: CacheSection = Field(default_factory=CacheSection)
    scheduler: SchedulerSection = Field(default_factory=SchedulerSection)
    server: ServerSection = Field(default_factory=ServerSection)

    @property
    def speculates(self) -> bool:
        """Whether anything is drafted."""
        algorithm, draft = self.speculative.algorithm, self.speculative.draft_model_path
        own = algorithm == "NGRAM" or self.speculative.head_algorithm == "NEXTN"
        has_draft = self.model.model_path is None or draft is not None or own
        return has_draft and algorithm != "NONE"

    @property
    def target_path(self) -> str:
        """Hugging Face id or directory of the target."""
        return self.model.model_path or str(DEMO_TARGET)

    @property
    def draft_path(self) -> str | None:
        """Hugging Face id or directory of the draft head, None where there is none."""
        if not self.speculates or self.speculative.algorithm == "NGRAM":
            return None
        own = self.target_path if self.speculative.head_algorithm == "NEXTN" else str(DEMO_DRAFT)
        return self.speculative.draft_model_path or own

    @property
    def served_model_name(self) -> str:
        """The model's name in the API; never a path of this machine."""
        path = self.model.model_path
        if self.model.served_model_name or path is None:
            return self.model.served_model_name or "demo"
        return Path(path).resolve().name if Path(path).is_dir() else path

    def public_dict(self) -> dict[str, Any]:
        """JSON-ready values for logs and /v1/server_info, resolved as far as that needs no loading; never the key."""
        values = self.model_dump(mode="json")
        values["model"].update(model_path=self.target_path, served_model_name=self.served_model_name)
        given = self.speculative.given_parameters()
        values["speculative"].update(asdict(given) if given else {}, draft_model_path=self.draft_path)
        values["server"]["api_key"] = None if self.server.api_key is None else "(set)"
        return values

    @model_validator(mode="after")
    def _options_agree(self) -> Self:
        target, draft = self.model.model_path, self.speculative.draft_model_path
        algorithm = self.speculative.head_algorithm
        if draft is not None and target is None:
            raise ConfigError(
                "--speculative-draft-model-path needs --model-path: without it the demo is served with its own draft"
            )
        if algorithm == "NEXTN" and target is None:
            raise ConfigError("--speculative-algorithm NEXTN needs --model-path: the demo's target has no MTP layer")
        if algorithm == "STANDALONE" and draft is None:
            raise ConfigError(
                "--speculative-algorithm STANDALONE needs --model-path and, for the smaller model that drafts, "
                "--speculative-draft-model-path"
            )
        same = draft is not None and target is not None and Path(draft).resolve() == Path(target).resolve()
        if same and algorithm in ("EAGLE", "EAGLE3", "REDRAFTER"):
            raise ConfigError(
                f"--speculative-draft-model-path {draft}: should differ from --model-path, which is no {algorithm} head"
            )
        if not self.speculates:
            self._refuse_speculative_options()
        return self

    def _refuse_speculative_options(self) -> None:
        values = self.speculative.model_dump(exclude={"algorithm"}, exclude_none=True)
        flags = [f"--speculative-{field.replace('_', '-')}" for field in values]
        algorithm = self.speculative.algorithm
        if algorithm == "NONE" and flags:
            raise ConfigError(f"{flags[0]} has no effect with --speculative-algorithm NONE: drop one of them")
        if algorithm != "NONE" and (algorithm or flags):
            needy = f"--speculative-algorithm {algorithm}" if algorithm else flags[0]
            raise ConfigError(f"{needy} needs --speculative-draft-model-path, or a target with an MTP layer and NEXTN")


@dataclass(frozen=True)
class SpeculativeParams:
    """The shape of draft trees: depth, children per node (0: any), and nodes verified at once (root included)."""

    num_steps: int
    eagle_topk: int
    num_draft_tokens: int
    ngram_depth: int = 0  # of n-gram tries, 0: there are none


# SGLang's choice: a tree of 8, but a short chain for targets whose own MTP layer drafts.
_AUTO = {"DeepseekV2ForCausalLM": SpeculativeParams(3, 1, 4), "DeepseekV3ForCausalLM": SpeculativeParams(3, 1, 4)}
_AUTO_STANDALONE = SpeculativeParams(3, 1, 4)  # a model's forwards cost more than a head's
_AUTO_OTHERWISE = SpeculativeParams(5, 4, 8)  # Llama, Grok and all others


def resolve_speculative(section: SpeculativeSection, architecture: str) -> SpeculativeParams:
    """The trees' shape: as given, or by the target's architecture (`architectures[0]`) where nothing is given."""
    auto = _AUTO_STANDALONE if section.head_algorithm == "STANDALONE" else _AUTO.get(architecture, _AUTO_OTHERWISE)
    params = section.given_parameters() or auto
    if section.drafts_ngrams and not params.ngram_depth:
        return _joined(
            params.num_steps, params.eagle_topk, max(params.num_draft_tokens, _AUTO_OTHERWISE.num_draft_tokens)
        )
    if section.num_draft_tokens not in (None, params.num_draft_tokens):
        logger.warning(
            "--speculative-num-draft-tokens %d is adjusted to %d: with topk 1 the draft is a chain of %d and its root",
            section.num_draft_tokens,
            params.num_draft_tokens,
            params.num_steps,
        )
    return params


def _joined(steps: int, topk: int, nodes: int) -> SpeculativeParams:
    """A head's tree and tries: any number of nodes, as the tries fill what the head leaves free."""
    if nodes == 1:
        raise ConfigError("--speculative-num-draft-tokens 1: should be 2 or more: the root is one of them")
    return SpeculativeParams(steps, topk, nodes, ngram_depth=NGRAM_DEPTH)


def _tree_parameters(steps: int, topk: int, draft_tokens: int | None) -> SpeculativeParams:
    if topk == 1:
        return SpeculativeParams(steps, 1, steps + 1)
    # The first level has topk candidates; each of topk frontier nodes of every further level adds topk children.
    pool = topk + (steps - 1) * topk * topk
    nodes = steps * topk + 1 if draft_tokens is None else draft_tokens
    if not 1 < nodes <= pool + 1:
        raise ConfigError(
            f"--speculative-num-draft-tokens {nodes}: should be from 2 to {pool + 1}: {steps} steps with topk {topk} "
            f"give {topk} + {steps - 1} * {topk} * {topk} = {pool} candidates, and the root"
        )
    return SpeculativeParams(steps, topk, nodes)
