"""The design's rules that a machine can check: who imports whom, and what may stand where. See docs/architecture.md."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from eagle_server.algorithms import ALGORITHMS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "eagle_server"
TOOLS = ROOT / "eagle_tools"
MODULES = sorted([*PACKAGE.rglob("*.py"), *TOOLS.rglob("*.py")])

# A part may import itself, the vocabulary, and what stands here: only what lies below it.
# DEMO, require_extra: names of the package itself.
VOCABULARY = {"algorithms", "request", "plan", "version", "hub", "turns", "machine"}
VOCABULARY |= {"tools.DEMO", "tools.require_extra"}
LOWEST = {"ops"}
PEERS = {"models", "attention", "speculation", "cache"}
ARROWS: dict[str, set[str]] = {
    "": {"llm"},  # eagle_server/__init__.py
    "config": set(),
    "algorithms": set(),
    "request": set(),
    "plan": set(),
    "hub": set(),
    "turns": set(),
    "machine": set(),
    "version": set(),
    "ops": set(),
    **{peer: LOWEST | PEERS for peer in PEERS},
    "text": set(),
    "scheduling": LOWEST | PEERS,
    "worker": LOWEST | PEERS,
    "engine": LOWEST | PEERS | {"text", "scheduling", "worker"},
    "client": {"engine"},
    "api": {"text", "client"},
    "llm": LOWEST | PEERS | {"text", "scheduling", "worker", "engine", "client", "api"},
    "__main__": LOWEST | PEERS | {"text", "scheduling", "worker", "engine", "client", "api"},
    "tools": set(),  # eagle_tools/__init__.py
    "tools.chat": set(),
    "tools.tree": LOWEST | PEERS | {"text", "worker", "engine"},
    "tools.training": LOWEST | PEERS | {"text", "tools.bench"},  # it renders conversations, and starts servers
    "tools.training.capture": LOWEST | PEERS | {"engine"},  # an engine computes the features
    "tools.training.tree_search": LOWEST | PEERS | {"text", "engine", "tools.tree"},  # it measures engines
    "tools.bench": LOWEST | PEERS | {"text", "engine"},
    "tools.bench.budget": LOWEST | PEERS | {"worker"},  # it simulates one
    # It runs the server in its own process.
    "tools.bench.hops": LOWEST | PEERS | {"text", "engine", "client", "api", "llm"},
}
SEE_CONFIG = {
    "__main__",
    "api.app",
    "api.service",
    "engine.assembly.from_config",
    "engine.assembly.devices",
    "engine.assembly.memory_estimate",
    "engine.assembly.resolve",
    "llm",
    "tools.bench.__main__",
    "tools.bench.demo",
    "tools.bench.hops",
    "tools.chat.command",
    "tools.chat.conversation",
    "tools.training",
    "tools.tree.command",
    "tools.tree.story",
}  # the composition roots
API_FROM_THE_TOP = {  # the rooms of api/: each imports only rooms below it
    "server": "listens, serves and drains whatever application it gets",
    "health": "a program of its own: it asks a running server",
    "app": "the composition root: it joins the routes and the middleware",
    "openapi": "describes all endpoints",
    "endpoints": "one file each; generating ones give `generation` what differs: how to prepare, how to write",
    "inspection": "endpoints about the server itself; they generate nothing but a probe",
    "generation": "the way of every generating request, which knows no endpoint",
    "guard": "what may enter: bodies, keys, limits, connections; it knows no generation",
    "service": "what all requests share, with or without an HTTP server: so it knows no guard",
    "schemas": "what bodies may say",
    "telemetry": "records and counts what the others do, and asks them nothing",
    "playground": "a page and its files",
    "docs_page": "a page and its files",
    "routes": "common parts of the routes that do not generate",
    "connection": "events to a client, and its leaving",
    "unix_socket": "a listening socket",
    "errors": "errors in the client's shape; all may raise them",
}
MOST_ARGUMENTS = 8
COPIES_TO_HOST = PACKAGE / "worker" / "host.py"
READ_SIZES = {  # functions that read sizes from the device, and why that costs no cycle on a GPU
    "speculation.tree": {
        "compacted": "only where trees are ragged, which no GPU backend takes",
        "_as_chains": "called by `compacted`",
    },
    "attention.spec_info": {"draft_decode_arguments": "only without a buffer, which serving always gives"},
}
SECOND_FILES = {  # of the head of this name in the table, beside those that the table leads to
    "models.drafts.block_edges": "DFLASH",
    "models.checkpoints.drafts.block_edge_files": "DFLASH",
}
BUILT_ON = {  # heads whose modules use those of another head, and why
    "PEAGLE": {"EAGLE3": "an EAGLE-3 head with mask slots"},
    "EAGLE3": {"EAGLE": "the files have the same layers"},
    "DFLASH": {"EAGLE": "the files have the same layers"},
}
NAMES_HEADS = {  # modules that name heads beside the table, and why
    "algorithms": "the table",
    "config.speculative": "the help of --speculative-algorithm",
}
ON_CPUS = PACKAGE / "ops" / "linear" / "grouped.py"  # its twin loops over groups


def name(path: Path) -> str:
    """Module name below eagle_server: "worker.drafters.eagle", or with "tools." before it: "tools.bench.load"."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "eagle_server" else ("tools", *parts[1:])
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_in(module: str, *places: str) -> bool:
    return any(module == place or module.startswith(f"{place}.") for place in places)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(path: Path) -> Iterator[str]:
    """Every absolute name that is imported anywhere in the file, inside functions too."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(path: Path) -> Iterator[str]:
    """What the file imports of ours, named as by `name`."""
    for imported in imports(path):
        if imported.startswith(("eagle_server.", "eagle_tools.")):
            yield imported.removeprefix("eagle_server.").removeprefix("eagle_")


def part_of(module: str) -> str:
    """The folder: "worker", or "tools.bench"."""
    return ".".join(module.split(".")[: 2 if module.startswith("tools.") else 1])


def calls(path: Path) -> Iterator[ast.Call]:
    yield from (node for node in ast.walk(tree(path)) if isinstance(node, ast.Call))


def called(call: ast.Call) -> str:
    """ "print", or "torch.load", or ".item" where the object is not a plain name."""
    if isinstance(call.func, ast.Name):
        return call.func.id
    if isinstance(call.func, ast.Attribute):
        owner = call.func.value.id if isinstance(call.func.value, ast.Name) else ""
        return f"{owner}.{call.func.attr}"
    return ""


def keyword(call: ast.Call, argument: str) -> object:
    for given in call.keywords:
        if given.arg == argument:
            return given.value.value if isinstance(given.value, ast.Constant) else given.value
    return None


def at(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"


def each_module(check: Callable[[Path], None]) -> Callable[[], None]:
    """One test of a rule that holds for every module, and that names all offenders: cheaper than one test each."""

    def test() -> None:
        offenders = []
        for path in MODULES:
            try:
                check(path)
            except AssertionError as error:
                offenders.append(f"{path.relative_to(ROOT)}: {error}")
        assert not offenders, "\n".join(offenders)

    test.__name__, test.__doc__ = check.__name__, check.__doc__
    return test


@each_module
def test_models_and_drafters_ask_for_no_backend(path):
    """What a backend does in a better way is a method of the contract, see docs/design/attention.md."""
    for call in calls(path) if is_in(name(path), "models", "worker") else ():
        if called(call) == "isinstance":
            types = {each.id for each in ast.walk(call.args[1]) if isinstance(each, ast.Name)}
            found = {each for each in types if each.startswith("Bound") or each.endswith("Attention")}
            assert not found, f"{at(path, call)}: isinstance of {sorted(found)}"


@each_module
def test_imports_point_down(path):
    module = name(path)
    part = part_of(module)
    arrows = next((ARROWS[place] for place in sorted(ARROWS, reverse=True) if is_in(module, place)), None)
    assert part in ARROWS, f"{part} is new: give it a place in ARROWS and in docs/architecture.md"
    for imported in own_imports(path):
        target = part_of(imported)
        if target == "config" and part != "config":
            assert is_in(module, *SEE_CONFIG), f"{module} imports config; only {sorted(SEE_CONFIG)} may, pass values"
        elif target not in {part} | VOCABULARY:
            assert target in (arrows or set()), f"{module} may not import {imported}"
    foundation = {"config": {"config", "algorithms", "version"}, "plan": {"request"}}
    foundation |= {alone: set() for alone in ("request", "hub", "turns", "machine")}
    if part in foundation:
        assert {imported.partition(".")[0] for imported in own_imports(path)} <= foundation[part]


@each_module
def test_imports_inside_the_api_point_down(path):
    below = list(API_FROM_THE_TOP)
    if not is_in(name(path), "api") or name(path) == "api":
        return
    room = name(path).split(".")[1]
    assert room in below, f"{room} is new: give it a place in API_FROM_THE_TOP"
    for imported in own_imports(path):
        if is_in(imported, "api"):
            target = imported.split(".")[1]
            assert below.index(target) >= below.index(room), f"{room} may not import {imported}, which stands above it"


def test_every_room_of_the_api_exists():
    rooms = {name(path).split(".")[1] for path in MODULES if is_in(name(path), "api") and name(path) != "api"}
    assert rooms == API_FROM_THE_TOP.keys()


def test_no_modules_import_in_a_circle():
    """Imports for types and inside functions count, too."""
    modules = {name(path): path for path in MODULES}
    graph = {
        module: {found for each in own_imports(path) for found in (each, each.rpartition(".")[0]) if found in modules}
        - {module}
        for module, path in modules.items()
    }
    while leaves := {module for module, imported in graph.items() if not imported & graph.keys()}:
        graph = {module: imported for module, imported in graph.items() if module not in leaves}
    assert not graph, f"in circles, or above one: {sorted(graph)}"


def test_models_attention_speculation_and_cache_do_not_import_in_a_circle():
    graph = {
        peer: {
            imported.partition(".")[0]
            for path in MODULES
            if is_in(name(path), peer)
            for imported in own_imports(path)
            if imported.partition(".")[0] in PEERS - {peer}
        }
        for peer in PEERS
    }
    while leaves := [peer for peer, targets in graph.items() if not targets & graph.keys()]:
        for peer in leaves:
            del graph[peer]
    assert not graph, f"these import one another: {graph}"


def test_no_class_name_stands_twice():
    places: dict[str, list[str]] = {}
    for path in MODULES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(at(path, node))
    twice = {class_name: found for class_name, found in places.items() if len(found) > 1}
    assert not twice, f"one name, one class: {twice}"


@each_module
def test_no_function_takes_more_than_eight_arguments(path):
    """What travels together is a dataclass. Triton's kernels are launched with all that they read."""
    for node in ast.walk(tree(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if any(ast.unparse(each).startswith("jit") for each in node.decorator_list):
                continue
            arguments = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            count = len(arguments) - (arguments[:1] in (["self"], ["cls"]))
            assert count <= MOST_ARGUMENTS, f"{at(path, node)}: {node.name} takes {count} arguments"


@cache
def modules_of_heads() -> dict[str, set[str]]:
    """By name in the table: modules of the head, its files and its drafter. A drafter of several heads is nobody's."""
    found: dict[str, set[str]] = {
        row: {module for module, head in SECOND_FILES.items() if head == row} for row in ALGORITHMS
    }
    drafters = [row.drafter for row in ALGORITHMS.values()]
    for row in ALGORITHMS.values():
        own = [row.files, *([row.drafter.partition(":")[0]] if drafters.count(row.drafter) == 1 else [])]
        found[row.name] |= {module.removeprefix("eagle_server.") for module in own}
    for path in MODULES:
        if is_in(name(path), "models.drafts"):
            for node in ast.walk(tree(path)):
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "algorithm":
                    found[ast.literal_eval(node.value)].add(name(path))
    return found


@cache
def marks_of_heads() -> dict[str, set[str]]:
    """By name in the table: the names of its modules and of the classes in them."""
    paths = {name(path): path for path in MODULES}
    return {
        head: modules
        | {node.name for module in modules for node in tree(paths[module]).body if isinstance(node, ast.ClassDef)}
        for head, modules in modules_of_heads().items()
    }


def named_heads(parsed: ast.Module) -> dict[str, str]:
    """The heads that a module names, each with what it wrote: an import, a class, or its name inside a string."""
    written = {node.id for node in ast.walk(parsed) if isinstance(node, ast.Name)}
    written |= {node.attr for node in ast.walk(parsed) if isinstance(node, ast.Attribute)}
    texts = "\n".join(strings(parsed))
    for node in ast.walk(parsed):
        if isinstance(node, ast.ImportFrom):
            written |= {f"{node.module}".removeprefix("eagle_server.")} | {alias.name for alias in node.names}
            written |= {f"{node.module}.{alias.name}".removeprefix("eagle_server.") for alias in node.names}
        elif isinstance(node, ast.Import):
            written |= {alias.name.removeprefix("eagle_server.") for alias in node.names}
    found = {}
    for head, marks in marks_of_heads().items():
        in_texts = [mark for mark in (head, *marks) if re.search(rf"(?<![\w-]){re.escape(mark)}(?![\w-])", texts)]
        if hits := sorted(marks & written) + in_texts:
            found[head] = hits[0]
    return found


def strings(parsed: ast.Module) -> Iterator[str]:
    """All strings but docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = {
        id(node.body[0].value) for node in ast.walk(parsed) if isinstance(node, documented) and ast.get_docstring(node)
    }
    for node in ast.walk(parsed):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value


@each_module
def test_only_its_own_modules_and_the_table_name_a_head(path):
    """What all heads need to know of one stands in its row, see docs/design/drafters.md. The tools may name heads."""
    if is_in(name(path), "tools", *NAMES_HEADS):
        return
    own = {head for head, modules in modules_of_heads().items() if name(path) in modules}
    allowed = own | {other for head in own for other in BUILT_ON.get(head, {})}
    named = {head: written for head, written in named_heads(tree(path)).items() if head not in allowed}
    assert not named, f"names {named}: put what differs into its row, or into the interface of all"


def test_a_head_that_is_named_elsewhere_is_found():
    for planted in (
        "from eagle_server.models.drafts.medusa import MedusaHeads",
        "from eagle_server.models.checkpoints.drafts import medusa_files",
        "import eagle_server.worker.drafters.medusa",
        "def f(draft): return isinstance(draft, drafts.MedusaHeads)",
        "def f(row): return row.name == 'MEDUSA'",
        "drafter = 'eagle_server.worker.drafters.medusa:medusa_drafter'",
        "def f(name): raise ValueError(f'{name} is not for MEDUSA')",
    ):
        assert set(named_heads(ast.parse(planted))) == {"MEDUSA"}, planted
    assert not named_heads(
        ast.parse('"""As MEDUSA does."""\nfrom eagle_server.models.drafts.interface import DraftModel')
    )


def test_every_reason_to_name_a_head_is_needed():
    paths = {name(path): path for path in MODULES}
    modules = modules_of_heads()
    assert all(named_heads(tree(paths[module])) for module in NAMES_HEADS)
    for head, others in BUILT_ON.items():
        named = set[str]().union(*(named_heads(tree(paths[module])) for module in modules[head]))
        assert named == {head, *others}, head


@each_module
def test_what_a_forward_computes_is_an_argument_and_no_state_of_the_target(path):
    """Engines with different drafts share a target."""
    if is_in(name(path), "models.targets"):
        kept = [
            at(path, node)
            for node in ast.walk(tree(path))
            if isinstance(node, ast.Attribute) and node.attr == "aux_boundaries"
        ]
        assert not kept


@each_module
def test_an_engine_is_assembled_by_constructors_alone(path):
    """What an object needs stands in its constructor: nothing sets an attribute of it later."""
    if is_in(name(path), "engine.assembly"):
        assigned = [target for node in ast.walk(tree(path)) if isinstance(node, ast.Assign) for target in node.targets]
        flat = [each for target in assigned for each in (target.elts if isinstance(target, ast.Tuple) else [target])]
        poked = [
            at(path, each) for each in flat if isinstance(each, ast.Attribute) and ast.unparse(each.value) != "self"
        ]
        assert not poked


@each_module
def test_a_cycle_asks_ops_what_a_device_is(path):
    """`ops.device` has the questions with their names, so that a cycle has no conditions on a device's type."""
    if is_in(name(path), "worker", "cache", "speculation", "scheduling", "attention.torch_native"):
        asked = [
            at(path, node)
            for node in ast.walk(tree(path))
            if isinstance(node, ast.Attribute) and "device.type" in ast.unparse(node)
        ]
        assert not asked, f"ask eagle_server.ops.device: {asked}"


@each_module
def test_imports_are_absolute(path):
    relative = [at(path, n) for n in ast.walk(tree(path)) if isinstance(n, ast.ImportFrom) and n.level]
    assert not relative


@each_module
def test_the_api_process_and_the_scheduler_know_no_torch(path):
    if is_in(name(path), "scheduling", "api", "client", "text", "config", "request"):
        assert not [i for i in imports(path) if i.partition(".")[0] == "torch"]


@each_module
def test_only_one_module_of_the_cycle_copies_to_the_host(path):
    if not is_in(name(path), "worker", "speculation", "attention", "ops") or path in (COPIES_TO_HOST, ON_CPUS):
        return
    copies = [at(path, c) for c in calls(path) if called(c).endswith((".item", ".tolist", ".cpu", ".numpy"))]
    assert not copies, f"a device sync outside {COPIES_TO_HOST.relative_to(ROOT)}"
    if "numpy" in imports(path):  # an array's numbers are the host's, and cannot be told from a tensor's here
        return
    read = {
        function.name: at(path, call)
        for function in ast.walk(tree(path))
        if isinstance(function, ast.FunctionDef)
        for call in ast.walk(function)
        if isinstance(call, ast.Call) and called(call) in ("int", "bool", "float") and reads_a_tensor(call)
    }
    reasons = READ_SIZES.get(name(path), {})
    assert read.keys() == reasons.keys(), f"reads a tensor as a number: {read}; with a reason here: {reasons}"


def reads_a_tensor(call: ast.Call) -> bool:
    """Whether the argument of int, bool or float is a reduction or an entry, as of a tensor."""
    reductions = {"max", "min", "sum", "any", "all", "mean", "argmax", "argmin"}
    return any(
        isinstance(node, ast.Subscript)
        or (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in reductions)
        for argument in call.args
        for node in ast.walk(argument)
    )


@each_module
def test_no_foreign_code_is_run_from_a_checkpoint(path):
    for call in calls(path):
        trusts = keyword(call, "trust_remote_code")
        assert trusts in (None, False), f"{at(path, call)}: trust_remote_code must not be set"
        if called(call) == "torch.load":
            assert keyword(call, "weights_only") is True, f"{at(path, call)}: torch.load needs weights_only=True"
        assert called(call) not in ("pickle.load", "pickle.loads", "eval", "exec"), at(path, call)


@each_module
def test_docstrings_name_what_they_are_about(path):
    for node in ast.walk(tree(path)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node) or ""
            assert not re.match(r"(Those|That) of\b", text), f"{at(path, node)}: {text.splitlines()[0]}"


@each_module
def test_only_programs_print(path):
    if path.name != "__main__.py" and not is_in(name(path), "tools.bench", "tools.training"):
        assert not [at(path, call) for call in calls(path) if called(call) == "print"]


@each_module
def test_only_config_reads_the_environment(path):
    if is_in(name(path), "config"):
        return
    reads = [
        at(path, node)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv")
    ]
    assert not reads


@each_module
def test_files_stay_readable(path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= 400, f"{lines} lines: find the second noun in it"


def test_kernels_holds_sources_only():
    """Hugging Face's package of the same name would be shadowed by ours, and transformers imports it."""
    assert not list((ROOT / "kernels").rglob("*.py"))
    assert not (ROOT / "tests" / "kernels").exists()


def test_every_package_and_no_other_is_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = project["tool"]["setuptools"]["packages"]
    found = {".".join(path.parent.relative_to(ROOT).parts) for path in MODULES if path.name == "__init__.py"}
    assert sorted(listed) == sorted(found | {"eagle_server.ops.kernels"})
    assert found == {".".join(path.parent.relative_to(ROOT).parts) for path in MODULES}, "a package lacks __init__.py"


def test_the_documented_layout_is_the_real_one():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    layout = re.search(r"## Layout\n.*?```text\n(.*?)```", text, re.DOTALL)
    assert layout, "docs/architecture.md has no layout block"
    entries = [re.match(r"( *)(\S+)", line) for line in layout[1].splitlines()]
    inside = {entry[2].rstrip("/") for entry in entries if entry and entry[1]}
    beside = {entry[2].rstrip("/") for entry in entries if entry and not entry[1]}
    assert inside == {
        path.name for path in PACKAGE.iterdir() if path.name not in ("__init__.py", "__pycache__", "py.typed")
    }
    missing = [entry for entry in beside if not (ROOT / entry).exists()]
    assert not missing
    unlisted = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")} - beside
    assert unlisted <= {"build", "dist", "shared", "eagle_server.egg-info", "bench-results", "gpu-results"}
