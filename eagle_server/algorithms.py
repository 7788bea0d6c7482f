"""The table of drafting algorithms: what options, files, loader and engine need to know of each.

A row names modules, because options are checked before torch is imported.
N-grams have no row: they need no files, and any row can be joined with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NONE, NGRAM = "NONE", "NGRAM"
DEEPEST_TREE = 63  # levels below the root; see RECENT in kernels/cpu/attention.h
_FILES, _DRAFTERS = "eagle_server.models.checkpoints.drafts", "eagle_server.worker.drafters"
_EAGLE, _STATIC_EAGLE = f"{_DRAFTERS}.eagle:eagle_drafter", f"{_DRAFTERS}.eagle:static_eagle_drafter"
_PAIRS, _NO_KV = f"{_DRAFTERS}.eagle:lookahead", f"{_DRAFTERS}.feature:lookahead"

_OTHER_TARGET = "a draft for another target or another chat template"
_OVERRIDE = ". The log's first lines say how it is read, and --speculative-draft-config-override changes it"


@dataclass(frozen=True)
class StaticTreeOption:
    """An option that lists the nodes of a static tree.

    Drafters whose option has a default draft static trees alone, also together with n-grams. Others draft the tree of
    the option if it is given, and otherwise trees that grow by scores.
    """

    field: str  # of the options of drafting
    flag: str
    takers: str  # the heads that take it, for messages
    default: str | None = None

    def excludes(self, *, ngrams: bool) -> tuple[str, ...]:
        """The options that have no effect beside its tree. With n-grams, num_draft_tokens counts the nodes of both."""
        return ("num_steps", "eagle_topk") if ngrams else ("num_steps", "eagle_topk", "num_draft_tokens")


_MEDUSA_CHOICES = StaticTreeOption("medusa_choices", "--medusa-choices", "Medusa heads", default="mc_sim_7b_63")
TOKEN_TREE = StaticTreeOption("token_tree", "--speculative-token-tree", "EAGLE and MTP heads")
STATIC_TREE_OPTIONS = (_MEDUSA_CHOICES, TOKEN_TREE)


@dataclass(frozen=True)
class Algorithm:
    """One kind of draft model."""

    name: str  # the value of --speculative-algorithm, and of the head's class attribute `algorithm`
    holds: str  # what its files hold, for messages
    files: str  # the module that reads them, see `DraftFormat`
    drafter: str  # makes its `Drafter` from the model and a `DrafterSetup`
    lookahead: str  # how many KV slots after a request's text it writes, as a function of the `TreeConfig`
    silent_causes: str  # why almost nothing of it may be accepted without an error, for a warning
    static_tree: StaticTreeOption | None = None  # None: its trees always grow
    static_drafter: str | None = None  # makes the drafter of static trees, if it is another
    speculators: tuple[str, ...] = ()  # values of `speculators_model_type` in files of the library speculators
    stored: Literal["alone", "in the target", "both"] = "alone"  # where its tensors may stand
    prefixes: tuple[str, ...] = ()  # begin the names of its tensors in the target's own files
    has_rows: bool = False  # one pass scores all levels: row k the tokens of level k
    is_model: bool = False  # a language model of its own, no head over the target's features
    demo: str = "eagle3"  # the directory of the demo's draft for it

    @property
    def own_tree(self) -> StaticTreeOption | None:
        """The option that alone gives its trees; None: they grow, if no option lists one."""
        return None if self.static_tree is None or self.static_tree.default is None else self.static_tree

    @property
    def trees_follow(self) -> str:
        """Why the options of growing trees are refused."""
        return "" if self.static_tree is None else f"{self.name}'s trees follow from {self.static_tree.flag} alone"

    @property
    def refuses(self) -> tuple[str, ...]:
        """Options that have no effect on it: a language model's config is read like a target's."""
        return ("draft_config_override",) if self.is_model else ()

    def drafts(self, option: StaticTreeOption, *, ngrams: bool) -> bool:
        """Whether it drafts the trees of this option, together with n-grams or alone."""
        return option == (self.own_tree if ngrams else self.static_tree)


# In the order in which files are tried: heads often carry the class name of a language model.
_ROWS = (
    Algorithm(
        "MEDUSA",
        "Medusa heads",
        files=f"{_FILES}.medusa_files",
        drafter=f"{_DRAFTERS}.medusa:medusa_drafter",
        lookahead=_NO_KV,
        silent_causes=_OTHER_TARGET,
        static_tree=_MEDUSA_CHOICES,
        stored="both",
        prefixes=("medusa_head.",),
        demo="medusa",
    ),
    Algorithm(
        "REDRAFTER",
        "a ReDrafter head",
        files=f"{_FILES}.redrafter_files",
        drafter=f"{_DRAFTERS}.redrafter:redrafter_drafter",
        lookahead=_NO_KV,
        silent_causes=_OTHER_TARGET,
        demo="redrafter",
    ),
    Algorithm(
        "NEXTN",
        "an MTP layer (NEXTN)",
        files=f"{_FILES}.mtp_files",
        drafter=_EAGLE,
        lookahead=_PAIRS,
        silent_causes=f"another RoPE, MTP layers that were not trained, or {_OTHER_TARGET}",
        static_tree=TOKEN_TREE,
        static_drafter=_STATIC_EAGLE,
        stored="in the target",
        prefixes=("mtp.", "model.mtp.", "model.mtp_layers."),
    ),
    Algorithm(
        "FROZEN_KV_MTP",
        "a Gemma 4 assistant",
        files=f"{_FILES}.gemma4_assistant_files",
        drafter=f"{_DRAFTERS}.frozen_kv:frozen_kv_drafter",
        lookahead=_NO_KV,
        silent_causes=f"another RoPE, or {_OTHER_TARGET}",
    ),
    Algorithm(
        "DFLASH",
        "a block drafter",
        files=f"{_FILES}.block_files",
        drafter=f"{_DRAFTERS}.block:block_drafter",
        lookahead=f"{_DRAFTERS}.block:lookahead",
        silent_causes="another layout (sample_from_anchor), other aux layers (target_layer_ids), another window or "
        f"causality (sliding_window, is_causal), another mask token (mask_token_id), or {_OTHER_TARGET}{_OVERRIDE}",
        speculators=("dflash", "dflash2", "dspark"),
        has_rows=True,
        demo="block",
    ),
    Algorithm(
        "PEAGLE",
        "a P-EAGLE head",
        files=f"{_FILES}.peagle_files",
        drafter=f"{_DRAFTERS}.peagle:peagle_drafter",
        lookahead=f"{_DRAFTERS}.peagle:lookahead",
        silent_causes="other aux layers (eagle_aux_hidden_state_layer_ids), another residual (norm_before_residual), "
        f"another mask token (mask_token_id), or {_OTHER_TARGET}{_OVERRIDE}",
        speculators=("peagle",),
        has_rows=True,
    ),
    Algorithm(
        "EAGLE3",
        "an EAGLE3 head",
        files=f"{_FILES}.eagle3_files",
        drafter=_EAGLE,
        lookahead=_PAIRS,
        silent_causes="other aux layers (eagle_aux_hidden_state_layer_ids), another residual (norm_before_residual), "
        f"another vocabulary map (d2t), another RoPE, or {_OTHER_TARGET}{_OVERRIDE}",
        static_tree=TOKEN_TREE,
        static_drafter=_STATIC_EAGLE,
        speculators=("eagle3",),
    ),
    Algorithm(
        "EAGLE",
        "an EAGLE head",
        files=f"{_FILES}.eagle_files",
        drafter=_EAGLE,
        lookahead=_PAIRS,
        silent_causes=f"another vocabulary map (--speculative-token-map), another RoPE, or {_OTHER_TARGET}{_OVERRIDE}",
        static_tree=TOKEN_TREE,
        static_drafter=_STATIC_EAGLE,
    ),
    Algorithm(
        "STANDALONE",
        "a language model",
        files=f"{_FILES}.standalone_files",
        drafter=f"{_DRAFTERS}.standalone:standalone_drafter",
        lookahead=f"{_DRAFTERS}.standalone:lookahead",
        silent_causes="a model with other token ids, or trained on texts in another chat template",
        is_model=True,
    ),
)
ALGORITHMS = {row.name: row for row in _ROWS}
# No draft, or one whose files tell its kind.
UNNAMED = Algorithm("", "a draft", files="", drafter="", lookahead="", silent_causes="", stored="both")
ALIASES = {"MTP": "NEXTN", f"MTP+{NGRAM}": f"NEXTN+{NGRAM}"}
NAMES = (NONE, *sorted(ALGORITHMS), NGRAM, *(f"{name}+{NGRAM}" for name in sorted(ALGORITHMS)))
