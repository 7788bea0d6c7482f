"""Every Triton kernel compiles for Hopper, without a GPU. The interpreter accepts more than the compiler.

Add a row to KERNELS for each new kernel, and for each combination of constexpr arguments that changes its code.
`test_no_kernel_is_left_out` finds kernels without a row.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from eagle_server.ops.linear.rounded import TILES
from eagle_server.ops.triton_support import HAS_TRITON

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
ROOT = Path(__file__).parents[3]
OPS = ROOT / "eagle_server" / "ops"


@dataclass(frozen=True)
class Kernel:
    """A kernel, the types of its arguments in order ("i64* None i32"), and its constexpr arguments."""

    module: str
    name: str
    types: str
    constants: dict[str, object] = field(default_factory=dict)
    variant: str = ""

    @property
    def id(self) -> str:
        return f"{self.module}.{self.name}" + (f"-{self.variant}" if self.variant else "")


BLOCK_TYPES = "bf16* bf16* bf16* i64* u8* bf16* fp32* bf16*" + 17 * " i32" + " fp32"
BLOCK_CONSTANTS = {"MERGES": True, "VALUES_ARE_KEYS": False, "PAIRS": 32, "COLUMNS": 32, "FRONT": 128, "REST": 0}
MLA = {"VALUES_ARE_KEYS": True, "FRONT": 512, "REST": 64}
ROTATED = "bf16* i64* fp32* bf16* bf16* i64*"  # qkv, positions, table, keys, values, slots
STATES = "fp32* bf16* bf16* fp32* fp32* fp32*"  # states, rings, inputs, keys, updates, decays
DELTA = f"bf16* fp32* fp32* {STATES} fp32*{9 * ' i32'} fp32"  # from the convolution's weight on
NOISE = "i64* i64* fp32*"  # keys, positions, temperature
BEST = "fp32* i32* fp32* i64*"  # values, candidates, mass, tokens of a top-k
PLAIN = f"None None None i32 i32 i32 fp32{5 * ' i32'}"  # no corrections
FP8, INT4 = (
    f"bf16* {codes} fp32* {zeros} fp32*{6 * ' i32'}" for codes, zeros in (("fp8e4nv*", "None"), ("u8*", "u8*"))
)
PAGED = {"COLUMNS": 64, "HEAD": 128, "DIM": 128, "PDL": True}
ROUNDED = ("linear.rounded", "_product_kernel")
MERGE: dict[str, object] = {"PIECES": 64, "CANDIDATES": 1024, "BEST": 8}
DRAWN = "i64* i64* fp32* fp32* i32* i32 i32 i32"
SELECTED = f"{2 * 'i64* fp32* fp32* '}{7 * 'i64* '}u8* fp32* fp32*{4 * ' i32'}"
KERNELS = [
    Kernel(
        "tree.candidates",
        "_children_kernel",
        f"fp32* i64* u8* i32 i32 i32 fp32* i64* i64* i64* u8*{6 * ' i32'}",
        {"CHILDREN": 64, "NODES": 8, "WIDTH": 64},
    ),
    Kernel("tree.candidates", "_candidates_kernel", "fp32* i64* None i64* i64* fp32* None i32 i32", {"SIZE": 512}),
    Kernel(
        "tree.candidates",
        "_candidates_kernel",
        "fp32* i64* fp32* i64* i64* fp32* fp32* i32 i32",
        {"SIZE": 2048},
        "guesses",
    ),
    Kernel("sampling.gumbel", "_gumbel_kernel", "i64* i64* None fp32* i32", {"BLOCK": 1024}),
    Kernel("sampling.gumbel", "_gumbel_kernel", "i64* i64* i64* fp32* i32", {"BLOCK": 1024}, "ids"),
    Kernel(
        "kv.indices", "_kv_indices_kernel", "i32* i64* i64* i32* i32* i32", {"REQUESTS": 64, "SPLITS": 8, "BLOCK": 512}
    ),
    Kernel("kv.indices", "_window_kernel", "i32* i64* i64* i64* i32 i32 i32", {"BLOCK": 128}),
    Kernel(
        "kv.indices",
        "_draft_decode_kv_indices_kernel",
        "i32* i64* i64* u8* i32* i32* i32 i32 i32",
        {"WINDOW_BLOCK": 32, "SPLITS": 8, "BLOCK": 512},
    ),
    Kernel(
        "kv.prefill_plan",
        "_plan_kernel",
        f"i32* i32* i32* i32* i32* i32* u8* i32* i32* i32*{6 * ' i32'}",
        {"SMALLEST": 128, "REQUESTS": 64, "BLOCK": 128},
    ),
    Kernel("kv.move", "_move_kernel", "i64* i64* i64* i64* i32* i32 i32 i32 i32", {"BLOCK": 256}),
    Kernel("tree.attention", "_sinks_kernel", "bf16* fp32* fp32* i32 i32 i32 i32 i32", {"SIZE": 64}),
    Kernel(
        "tree.mask",
        "_pack_kernel",
        "u8* i64* i64* i64* u8* i32* i32 i32 i32",
        {"SLIDES": True, "REQUESTS": 64, "SPLITS": 16, "BLOCK": 128},
    ),
    Kernel(
        "tree.build",
        "_link_kernel",
        "i64* i64* i64* i64* u8* i32 i32 i32 i32",
        {"HALVINGS": 8, "ROWS": 16, "NODES": 256},
    ),
    Kernel(
        "tree.accept",
        "_walk_kernel",
        "i64* i64* i64* u8* i64* fp32* i64* i64* i64* i64* u8* i32 i32",
        {"NODES": 256, "COLUMNS": 32, "WIDTH": 16},
    ),
    Kernel(
        "sampling.correction", "_correction_kernel", f"fp32* fp32* fp32* i64* fp32* {8 * 'i32 '}fp32", {"BLOCK": 64}
    ),
    Kernel("tree.accepted", "_store_kernel", f"bf16* i64* i64* i64* bf16* i64* bf16*{7 * ' i32'}", {"BLOCK": 1024}),
    Kernel("tree.accepted", "_lengths_kernel", f"{7 * 'i64* '}i32 i32", {"BLOCK": 128}),
    Kernel("tree.accepted", "_extend_kernel", f"i64* bf16* {4 * 'i64* '}bf16* i64* i64*{5 * ' i32'}", {"BLOCK": 1024}),
    Kernel("tree.accepted", "_newest_kernel", "bf16* bf16* i64* bf16* bf16* i32 i32 i32", {"BLOCK": 1024}),
    Kernel("kv.indices", "_draft_slots_kernel", "i32* i64* i64* i64* i64* i32 i32 i32", {"BLOCK": 128}),
    Kernel("sampling.draw", "_draw_kernel", f"fp32* {DRAWN}", {"BLOCK": 2048}),
    Kernel("sampling.draw", "_draw_kernel", f"bf16* {DRAWN}", {"BLOCK": 2048}, "bfloat16"),
    Kernel("sampling.draw", "_merge_kernel", "fp32* i32* i64* fp32* i32", {"PIECES": 64}),
    Kernel(
        "sampling.topk",
        "_block_kernel",
        "bf16* None None None None fp32* i32* fp32* i32 i32 i32 i32 i32",
        {"BLOCK": 2048},
    ),
    Kernel(
        "sampling.topk",
        "_block_kernel",
        f"bf16* {NOISE} None fp32* i32* fp32* i32 i32 i32 i32 i32",
        {"BLOCK": 2048},
        "coupled",
    ),
    Kernel(
        "sampling.topk",
        "_block_kernel",
        f"bf16* {NOISE} i64* fp32* i32* fp32* i32 i32 i32 i32 i32",
        {"BLOCK": 2048},
        "ids",
    ),
    Kernel("sampling.topk", "_merge_kernel", f"{BEST} None fp32* None None {PLAIN}", MERGE),
    Kernel("sampling.topk", "_merge_kernel", f"{BEST} None fp32* i64* None {PLAIN}", MERGE, "ids"),
    Kernel("sampling.topk", "_merge_kernel", f"{BEST} fp32* fp32* None fp32* {PLAIN}", MERGE, "scores"),
    Kernel(
        *("sampling.topk", "_merge_kernel"),
        f"{BEST} fp32* fp32* i64* fp32* fp32* fp32* i64* i32 i32 i32 fp32{5 * ' i32'}",
        *(MERGE, "corrected"),
    ),
    Kernel(
        *("layers.normed_pairs", "_pairs_kernel", "i64* bf16* bf16* None bf16* bf16* bf16* bf16* i32 i32 fp32"),
        {"KEEPS_NORMED": False, "SIZE": 4096},
    ),
    Kernel(
        *("layers.normed_pairs", "_pairs_kernel", "i64* bf16* bf16* i64* bf16* bf16* bf16* bf16* i32 i32 fp32"),
        *({"KEEPS_NORMED": True, "SIZE": 8192}, "normed"),
    ),
    Kernel("tree.build", "_select_kernel", SELECTED, {"TOPK": 8, "SIZE": 512, "ROWS": 8, "NODES": 64}),
    Kernel("tree.build", "_select_kernel", SELECTED, {"TOPK": 6, "SIZE": 1024, "ROWS": 8, "NODES": 256}, "large"),
    Kernel(
        "layers.rope_kv",
        "_rotation_kernel",
        f"{ROTATED} None None {11 * 'i32 '}fp32 fp32",
        {"HALF": 64, "REST": 0, "PDL": True},
    ),
    Kernel(
        *("layers.rope_kv", "_rotation_kernel", f"{ROTATED} bf16* bf16* {11 * 'i32 '}fp32 fp32"),
        *({"HALF": 32, "REST": 64, "PDL": False}, "norms"),
    ),
    Kernel(
        *("sampling.truncate", "_candidates_kernel", "fp32* fp32* fp32* i64* fp32* i32 i32 i32"),
        {"BLOCK": 2048, "RUN": 64, "CANDIDATES": 128},
    ),
    Kernel(
        *("sampling.truncate", "_cut_kernel", "fp32* fp32* fp32* i64* fp32* i64* i32 i32 i32 i32"),
        {"BLOCK": 4096, "PIECES": 64, "CANDIDATES": 128},
    ),
    Kernel("sampling.truncate", "_drop_kernel", "fp32* i64* fp32* i32", {"BLOCK": 2048}),
    Kernel(
        *("sampling.truncate", "_candidates_kernel", "bf16* fp32* fp32* i64* fp32* i32 i32 i32"),
        *({"BLOCK": 2048, "RUN": 64, "CANDIDATES": 128}, "bfloat16"),
    ),
    Kernel(
        *("sampling.truncate", "_cut_kernel", "bf16* fp32* fp32* i64* fp32* i64* i32 i32 i32 i32"),
        *({"BLOCK": 4096, "PIECES": 64, "CANDIDATES": 128}, "bfloat16"),
    ),
    Kernel("sampling.truncate", "_drop_kernel", "bf16* i64* fp32* i32", {"BLOCK": 2048}, "bfloat16"),
    Kernel("tree.attention", "_block_kernel", BLOCK_TYPES, BLOCK_CONSTANTS, "heads"),
    Kernel(
        "recurrent.kernels",
        "_tree_kernel",
        f"bf16* bf16* i64* u8* i64* i64* i64* {DELTA}",
        {"KERNEL": 4, "NODES": 64, "KEYS": 16, "VALUE": 64},
    ),
    Kernel(
        "recurrent.kernels",
        "_keep_kernel",
        f"i64* i64* {STATES}{9 * ' i32'}",
        {"KERNEL": 4, "KEY": 128, "VALUE": 64},
    ),
    Kernel("tree.attention", "_block_kernel", BLOCK_TYPES, BLOCK_CONSTANTS | MLA, "latent"),
    *(
        Kernel(
            *("tree.paged", "_attention_kernel"),
            f"bf16* bf16* bf16* i32* i64* i64* {mask} {depths} {sinks} bf16* fp32* fp32*{14 * ' i32'} fp32",
            {
                "CAUSAL": mask == "None",
                "SLIDES": slides,
                "SINKS": sinks != "None",
                "PARTS": parts,
                "PAIRS": pairs,
                **PAGED,
            },
            f"{'causal' if mask == 'None' else 'tree'}, {pairs} pairs, {parts} parts, sliding {slides}",
        )
        for mask, depths, sinks, pairs, parts, slides in (
            ("u8*", "None", "None", 64, 4, False),
            ("u8*", "i64*", "fp32*", 16, 8, True),
            ("None", "None", "fp32*", 32, 1, True),
            ("None", "None", "None", 32, 1, False),
        )
    ),
    Kernel(
        *("tree.paged", "_merge_kernel", "fp32* fp32* bf16* i32 i32 i32 i32"),
        {"PARTS": 8, "ROWS": 4, "HEAD": 128, "DIM": 128, "PDL": True},
    ),
    Kernel("linear.fp8_rows", "_rows_kernel", "bf16* fp8e4nv* fp32* i32", {"SIZE": 16384}),
    Kernel("linear.rounded", "_sum_kernel", "fp32* bf16* i32", {"SPLITS": 2, "BLOCK": 1024}),
    *(
        Kernel(
            *(*ROUNDED, types),
            {"GROUP": group, "ROWS": tile.rows, "OUTPUTS": tile.outputs, "BLOCK": min(group, 128) or tile.inputs},
            f"{name}, {tile.rows} rows",
        )
        for name, types, group in (
            ("fp8", FP8, 0),
            ("fp8 in blocks", FP8, 128),
            ("int4", INT4, 128),
            ("int4 in small groups", INT4, 32),
        )
        for tile in TILES
    ),
]


def arguments(kernel: Kernel) -> list[str]:
    """The names of the kernel's arguments without its constexpr arguments."""
    source = ast.parse((OPS / f"{kernel.module.replace('.', '/')}.py").read_text(encoding="utf-8"))
    function = next(n for n in source.body if isinstance(n, ast.FunctionDef) and n.name == kernel.name)
    return [argument.arg for argument in function.args.args if argument.annotation is None]


@pytest.fixture(scope="module")
def errors(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The compiler error of each selected kernel, "" if it compiled. One process compiles all."""
    selected = {item.name for item in request.session.items}
    kernels = [
        kernel for kernel in KERNELS if f"{test_the_kernel_compiles_for_hopper.__name__}[{kernel.id}]" in selected
    ]
    cases = []
    for kernel in kernels:
        types = [f"*{t[:-1]}" if t.endswith("*") else t for t in kernel.types.split()]
        signature = dict(zip(arguments(kernel), types, strict=True))
        absent = {argument: None for argument, t in signature.items() if t == "None"}
        signature = {argument: t for argument, t in signature.items() if t != "None"}
        cases.append([f"eagle_server.ops.{kernel.module}", kernel.name, signature, kernel.constants | absent])
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "TRITON_INTERPRET": "0"}
    program = [sys.executable, "-m", "tests.support.compile_kernels"]
    done = subprocess.run(
        program, input=json.dumps(cases), capture_output=True, text=True, cwd=ROOT, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    return {kernel.id: error for kernel, error in zip(kernels, said, strict=True)}


@pytest.mark.deep
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.id)
def test_the_kernel_compiles_for_hopper(kernel: Kernel, errors: dict[str, str]) -> None:
    assert errors[kernel.id] == ""


def test_no_kernel_is_left_out() -> None:
    """A kernel is a @jit function with a name that ends in _kernel. Other @jit functions are called by kernels."""
    found = {
        f"{'.'.join(path.relative_to(OPS).with_suffix('').parts)}.{node.name}"
        for path in OPS.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.decorator_list and node.name.endswith("_kernel")
    }
    assert found == {f"{kernel.module}.{kernel.name}" for kernel in KERNELS}
