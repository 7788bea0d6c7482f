"""Options of drafting and acceptance, and the rules between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from eagle_server.algorithms import (
    ALGORITHMS,
    ALIASES,
    NAMES,
    NGRAM,
    NONE,
    STATIC_TREE_OPTIONS,
    UNNAMED,
    Algorithm,
    StaticTreeOption,
)
from eagle_server.config.base import ConfigError, Count, Section, Text, WeightsLocation, file_location, json_object
from eagle_server.config.trees import TreeOptions, automatic, completed, head_tree, mixture, refuse_root_alone, tries

POSTERIOR_THRESHOLD, POSTERIOR_ALPHA = 0.09, 0.3  # Medusa's


def _as_text(value: object) -> object:
    return str(value) if isinstance(value, list) else value  # YAML's own lists


def _as_switch(value: object) -> object:
    return {"True": "on", "False": "off"}.get(str(value).title(), value)  # YAML reads on and off as booleans


Switch = Annotated[Literal["on", "off"], BeforeValidator(_as_switch)]
if TYPE_CHECKING:
    AlgorithmName = str
else:
    AlgorithmName = Literal[NAMES]
Positive = Annotated[float, Field(gt=0)]


class SpeculativeSection(Section):
    """How tokens are drafted, and which drafts are kept. These options do not change the output, except
    --acceptance typical, which is lossy."""

    prefix: ClassVar[str] = "speculative-"

    algorithm: AlgorithmName | None = Field(
        default=None,
        description="NONE: plain decoding; NEXTN (or MTP): the MTP layer in the target's own files; STANDALONE: a "
        "smaller language model with the same vocabulary; DFLASH: a block drafter (DFlash, DFlash 2, DSpark, Domino); "
        "PEAGLE: a P-EAGLE head; NGRAM: the tokens that followed the same tokens earlier in "
        "the request, no draft model needed; X+NGRAM: both in one tree; default: detected from the draft's files; "
        "without a draft, NEXTN if the target's own files have MTP layers",
    )
    draft_model_path: WeightsLocation | None = Field(
        default=None,
        description="the draft head, or STANDALONE's smaller model: a Hugging Face id, a local directory or a GGUF "
        "file; the demo has its own, NEXTN needs none",
    )
    num_steps: Count | None = Field(
        default=None,
        description="depth of the draft tree; what is not given of steps, topk and draft tokens is chosen by "
        "architecture, to fit what is; default for NGRAM: 8",
    )
    eagle_topk: Count | None = Field(
        default=None,
        description="maximum children of a drafted node; 1 drafts a chain; not for NGRAM, whose branches follow from "
        "its counts",
    )
    num_draft_tokens: Count | None = Field(
        default=None,
        description="nodes that the target verifies at once, root included; default: steps * topk + 1 if one of them "
        "is given; always steps + 1 if topk is 1; default for NGRAM: 16; X+NGRAM: nodes of both together; default for "
        "MEDUSA+NGRAM: the size of Medusa's tree",
    )
    adaptive: Switch | None = Field(
        default=None,
        description="on: steps, topk and draft tokens are the largest tree; each cycle drafts as much of it, for as "
        "many requests, as is expected to pay on this machine under its present load, which may be nothing; off: every "
        "request drafts the whole tree in every cycle; texts are the same; default: on, but off with --acceptance "
        "typical, whose texts depend on the trees",
    )
    token_map: Annotated[str, AfterValidator(file_location)] | None = Field(
        default=None,
        description="FR-Spec: a file of frequent token ids (`eagle-server train token-map` makes one); the draft "
        "proposes only these, and texts stay the same; refused for drafts with a smaller vocabulary of their own",
    )
    draft_quantization: Literal["auto", "none", "int8", "int4", "fp8"] = Field(
        default="auto",
        description="round the weights of the draft alone, as --quantization does; texts stay the same, fewer drafts "
        "may be accepted; none: keep them; auto: as the target's, or int8 where native kernels compute (on CPUs); "
        "weights that are quantized in its files stay so",
    )
    draft_config_override: Annotated[dict[str, Any], BeforeValidator(json_object)] | None = Field(
        default=None, description="a JSON object; its values replace those of the draft's config.json"
    )

    medusa_choices: Annotated[Text, BeforeValidator(_as_text)] | None = Field(
        default=None,
        description="Medusa's tree: the name of a published one, or a list of nodes by rank, like [(0,), (0, 0), "
        "(1,)], or a file with such a list; default: mc_sim_7b_63, cut to the number of heads",
    )

    token_tree: Annotated[Text, BeforeValidator(_as_text)] | None = Field(
        default=None,
        description="a static tree for an EAGLE or MTP head: the nodes that it drafts, whatever their scores, each as "
        "a list of ranks: [(0,), (0, 0), (1,)], or a file with such a list (python -m "
        "eagle_tools.training.tree_search writes one); instead of steps, topk and draft tokens",
    )
    coupling: Switch | None = Field(
        default=None,
        description="on: above temperature 0 drafters rank tokens by their probability and by the random numbers with "
        "which the target will draw, so they guess the draw itself and more drafts are kept; off: by probability "
        "alone, for comparison; texts are the same; default: on, but off with --acceptance typical, which keeps what "
        "is likely",
    )
    acceptance: Literal["lossless", "typical"] = Field(
        default="lossless",
        description="typical: LOSSY: also keep drafts that are only likely enough under the target, as Medusa does, so "
        "sampled texts no longer follow the target's distribution; requests with temperature 0 stay lossless",
    )
    typical_posterior_threshold: Annotated[Positive, Field(le=1)] | None = Field(
        default=None,
        description="--acceptance typical keeps a draft more probable than the smaller of this and alpha * "
        f"exp(-entropy); default: {POSTERIOR_THRESHOLD}",
    )
    typical_posterior_alpha: Positive | None = Field(
        default=None, description=f"alpha of --acceptance typical; default: {POSTERIOR_ALPHA}"
    )

    @field_validator("algorithm", mode="before")
    @classmethod
    def _name_of_alias(cls, value: object) -> object:
        return ALIASES.get(value, value) if isinstance(value, str) else value

    @property
    def drafts_ngrams(self) -> bool:
        """Whether n-grams are drafted, alone or together with a head's tree."""
        return self.algorithm is not None and self.algorithm.endswith(NGRAM)

    @property
    def head_algorithm(self) -> str | None:
        """The kind of draft that the files must hold; None: any kind, or there are no files."""
        name = (self.algorithm or NONE).removesuffix(f"+{NGRAM}")
        return name if name in ALGORITHMS else None

    @property
    def drafts(self) -> Algorithm:
        """The row of `head_algorithm`."""
        return ALGORITHMS.get(self.head_algorithm or "", UNNAMED)

    @property
    def static_trees(self) -> set[StaticTreeOption]:
        """The options whose trees may be drafted, as far as the algorithm says what the files hold."""
        asked = self.head_algorithm or self.algorithm
        rows = (row for row in ALGORITHMS.values() if asked in (None, row.name))
        return {row.static_tree for row in rows if row.static_tree is not None}

    @property
    def couples(self) -> bool:
        """Whether drafters also rank by the noise of the target's draws."""
        return self.coupling != "off" and self.acceptance == "lossless"

    @property
    def adapts(self) -> bool:
        """Whether trees follow cost and load."""
        return self.adaptive != "off" and self.acceptance == "lossless"

    @property
    def posterior(self) -> tuple[float, float] | None:
        """Threshold and alpha of typical acceptance, None if acceptance is lossless."""
        if self.acceptance == "lossless":
            return None
        threshold, alpha = self.typical_posterior_threshold, self.typical_posterior_alpha
        return threshold or POSTERIOR_THRESHOLD, alpha or POSTERIOR_ALPHA

    @model_validator(mode="after")
    def _options_agree(self) -> Self:
        self.given_tree_options()
        for option in STATIC_TREE_OPTIONS:
            if self.lists(option):
                self._check_static_tree(option)
        is_lossless = self.acceptance == "lossless"
        for field, needed, is_met in (
            ("coupling", "--acceptance lossless", is_lossless),
            ("adaptive", "--acceptance lossless", is_lossless or self.adaptive == "off"),
            ("typical_posterior_threshold", "--acceptance typical", not is_lossless),
            ("typical_posterior_alpha", "--acceptance typical", not is_lossless),
        ):
            if getattr(self, field) is not None and not is_met:
                raise ConfigError(f"{_flag(field)} needs {needed}")
        return self

    def lists(self, option: StaticTreeOption) -> bool:
        """Whether a static tree is given by this option."""
        return getattr(self, option.field) is not None

    def _check_static_tree(self, option: StaticTreeOption) -> None:
        """The option stands alone, with an algorithm that takes it."""
        if self.algorithm not in (None, NONE) and not self.drafts.drafts(option, ngrams=self.drafts_ngrams):
            algorithm = f"--speculative-algorithm {self.algorithm}"
            raise ConfigError(f"{option.flag} has no effect with {algorithm}: drop one of them")
        self._refuse_beside(option, f"the tree is that of {option.flag}; drop one of them")

    def _refuse_beside(self, option: StaticTreeOption, reason: str) -> None:
        for field in option.excludes(ngrams=self.drafts_ngrams):
            if getattr(self, field) is not None:
                raise ConfigError(f"{_flag(field)}: {reason}")

    @property
    def shapes_tree(self) -> bool:
        """Whether any option of dynamic trees is given."""
        return any(value is not None for value in (self.num_steps, self.eagle_topk, self.num_draft_tokens))

    def tree_options(self, architecture: str) -> TreeOptions:
        """The given tree options, completed for the target's architecture (`architectures[0]`).

        Raises:
            ConfigError: no tree has the given options together.
        """
        base = automatic(architecture, is_model=self.drafts.is_model, ngrams=self.drafts_ngrams)
        if (whole := self.given_tree_options()) is not None:
            return whole
        if self.drafts.own_tree is not None or not self.shapes_tree:
            return base
        return completed(base, self.num_steps, self.eagle_topk, self.num_draft_tokens)

    def given_tree_options(self) -> TreeOptions | None:
        """The tree options, checked; None if they depend on the target's architecture.

        Raises:
            ConfigError: options contradict each other.
        """
        steps, topk, row = self.num_steps, self.eagle_topk, self.drafts
        if row.own_tree is not None:
            self._refuse_beside(row.own_tree, f"{row.trees_follow}; drop it")
            refuse_root_alone(self.num_draft_tokens)
            return None
        if self.algorithm == NGRAM:
            self._refuse("draft_model_path", "eagle_topk", "token_map", "draft_config_override")
            return tries(steps, self.num_draft_tokens)
        self._refuse(*row.refuses)
        refuse_root_alone(self.num_draft_tokens)
        if steps is None or topk is None:
            return None
        if self.drafts_ngrams:
            return mixture(steps, topk, self.num_draft_tokens or steps * topk + 1)
        return head_tree(steps, topk, self.num_draft_tokens)

    def _refuse(self, *fields: str) -> None:
        for field in fields:
            if getattr(self, field) is not None:
                algorithm = f"--speculative-algorithm {self.algorithm}"
                raise ConfigError(f"{_flag(field)} has no effect with {algorithm}: drop one of them")


def _flag(field: str) -> str:
    return f"--speculative-{field.replace('_', '-')}"
