"""The table of drafting algorithms: what options, files, loader and engine need to know of each.

A row names modules, because options are checked before torch is imported.
N-grams have no row: they need no files, and any row can be joined with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NONE, NGRAM = "NONE", "NGRAM"
TOKEN_TREE = "--speculative-token-tree"  # the option of EAGLE and MTP heads
_FILES, _DRAFTERS = "eagle_server.models.checkpoints.drafts", "eagle_server.worker.drafters"
_EAGLE, _STATIC_EAGLE = f"{_DRAFTERS}.eagle:EagleDrafter", f"{_DRAFTERS}.static_eagle:StaticEagleDrafter"

_OTHER_TARGET = "a draft for another target or another chat template"
_OVERRIDE = ". The log's first lines say how it is read, and --speculative-draft-config-override changes it"


@dataclass(frozen=True)
class Algorithm:
    """One kind of draft model."""

    name: str  # the value of --speculative-algorithm, and of the head's class attribute `algorithm`
    holds: str  # what its files hold, for messages
    files: str  # the module that reads them, see `DraftFormat`
    drafter: str  # the class that drafts, made from the model and a `DrafterSetup`
    silent_causes: str  # why almost nothing of it may be accepted without an error, for a warning
    static_drafter: str | None = None  # the same for --speculative-token-tree; None: that option is refused
    tree_option: str | None = None  # the option that gives its static tree; then it has no steps and topk
    refuses: tuple[str, ...] = ()  # options that have no effect on it
    stored: Literal["alone", "in the target", "both"] = "alone"  # where its tensors may stand
    prefix: str = ""  # begins the names of its tensors in the target's own files
    needs_config: bool = True  # its files must include a config.json
    is_model: bool = False  # a language model of its own, no head over the target's features
    has_kv: bool = True
    reads_target_kv: bool = False  # it attends to the target's KV
    demo: str = "eagle3"  # the directory of the demo's draft for it

    @property
    def tree_flag(self) -> str:
        """The flag of `tree_option`."""
        return f"--{self.tree_option}".replace("_", "-")

    @property
    def trees_follow(self) -> str:
        """Why the options of dynamic trees are refused."""
        return f"{self.name}'s trees follow from {self.tree_flag} alone"


# In the order in which files are tried: heads often carry the class name of a language model.
_ROWS = (
    Algorithm(
        "MEDUSA",
        "Medusa heads",
        files=f"{_FILES}.medusa_files",
        drafter=f"{_DRAFTERS}.medusa:MedusaDrafter",
        silent_causes=_OTHER_TARGET,
        tree_option="medusa_choices",
        stored="both",
        prefix="medusa_head.",
        needs_config=False,
        has_kv=False,
        demo="medusa",
    ),
    Algorithm(
        "REDRAFTER",
        "a ReDrafter head",
        files=f"{_FILES}.redrafter_files",
        drafter=f"{_DRAFTERS}.redrafter:RedrafterDrafter",
        silent_causes=_OTHER_TARGET,
        has_kv=False,
        demo="redrafter",
    ),
    Algorithm(
        "NEXTN",
        "an MTP layer (NEXTN)",
        files=f"{_FILES}.mtp_files",
        drafter=_EAGLE,
        silent_causes=f"another RoPE, MTP layers that were not trained, or {_OTHER_TARGET}",
        static_drafter=_STATIC_EAGLE,
        stored="in the target",
    ),
    Algorithm(
        "FROZEN_KV_MTP",
        "a Gemma 4 assistant",
        files=f"{_FILES}.gemma4_assistant_files",
        drafter=f"{_DRAFTERS}.frozen_kv:FrozenKVDrafter",
        silent_causes=f"another RoPE, or {_OTHER_TARGET}",
        has_kv=False,
        reads_target_kv=True,
    ),
    Algorithm(
        "DFLASH",
        "a block drafter",
        files=f"{_FILES}.block_files",
        drafter=f"{_DRAFTERS}.block:BlockDrafter",
        silent_causes="another layout (sample_from_anchor), other aux layers (target_layer_ids), another window or "
        f"causality (sliding_window, is_causal), another mask token (mask_token_id), or {_OTHER_TARGET}{_OVERRIDE}",
        demo="block",
    ),
    Algorithm(
        "PEAGLE",
        "a P-EAGLE head",
        files=f"{_FILES}.peagle_files",
        drafter=f"{_DRAFTERS}.peagle:PEagleDrafter",
        silent_causes="other aux layers (eagle_aux_hidden_state_layer_ids), another residual (norm_before_residual), "
        f"another mask token (mask_token_id), or {_OTHER_TARGET}{_OVERRIDE}",
    ),
    Algorithm(
        "EAGLE3",
        "an EAGLE3 head",
        files=f"{_FILES}.eagle3_files",
        drafter=_EAGLE,
        silent_causes="other aux layers (eagle_aux_hidden_state_layer_ids), another residual (norm_before_residual), "
        f"another vocabulary map (d2t), another RoPE, or {_OTHER_TARGET}{_OVERRIDE}",
        static_drafter=_STATIC_EAGLE,
    ),
    Algorithm(
        "EAGLE",
        "an EAGLE head",
        files=f"{_FILES}.eagle_files",
        drafter=_EAGLE,
        silent_causes=f"another vocabulary map (--speculative-token-map), another RoPE, or {_OTHER_TARGET}{_OVERRIDE}",
        static_drafter=_STATIC_EAGLE,
    ),
    Algorithm(
        "STANDALONE",
        "a language model",
        files=f"{_FILES}.standalone_files",
        drafter=f"{_DRAFTERS}.standalone:StandaloneDrafter",
        silent_causes="a model with other token ids, or trained on texts in another chat template",
        refuses=("token_map", "draft_config_override"),
        is_model=True,
    ),
)
ALGORITHMS = {row.name: row for row in _ROWS}
# No draft, or one whose files tell its kind.
UNNAMED = Algorithm("", "a draft", files="", drafter="", silent_causes="", stored="both")
ALIASES = {"MTP": "NEXTN", f"MTP+{NGRAM}": f"NEXTN+{NGRAM}"}
NAMES = (NONE, *sorted(ALGORITHMS), NGRAM, *(f"{name}+{NGRAM}" for name in sorted(ALGORITHMS)))
