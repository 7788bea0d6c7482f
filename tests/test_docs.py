"""What documents promise that a machine can check: links, paths, modules, class names, and the index of experiments."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PACKAGE, TOOLS = ROOT / "eagle_server", ROOT / "eagle_tools"
PAGES = sorted(
    chain(
        ROOT.glob("*.md"),
        (ROOT / "docs").rglob("*.md"),
        (ROOT / "kernels").glob("*.md"),
        (PACKAGE / "assets").rglob("*.md"),
        (ROOT / ".github").rglob("*.md"),
    )
)
GUIDES = [page for page in PAGES if page.parent == ROOT or page.is_relative_to(ROOT / "docs")]
EXPERIMENTS = ROOT / "docs" / "experiments.md"
README = (ROOT / "README.md").read_text(encoding="utf-8")
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The fragments of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_every_relative_link_leads_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, fragment = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        if fragment:
            assert fragment in anchors(target), link


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_source_file_and_folder_that_is_named_exists(page):
    """`worker/worker.py` is in eagle_server, `bench/load.py` in eagle_tools; <name> is a file to be written."""
    names = {name for name in re.findall(r"`(\w[\w./<>*-]*(?:\.py|/))`", prose(page)) if "<" not in name}
    missing = [name for name in sorted(names) if not [*ROOT.glob(name), *PACKAGE.glob(name), *TOOLS.glob(name)]]
    assert not missing


@each_page
def test_every_module_that_is_run_exists(page):
    for module in re.findall(r"python -m (eagle_(?:server|tools)[\w.]*\w)", page.read_text(encoding="utf-8")):
        assert find_spec(module) is not None, module


def test_the_table_of_trees_names_classes_of_these_files():
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| `(\S+\.py)` \|", prose(ROOT / "docs/design/trees.md"), re.MULTILINE)
    assert len(rows) == 7
    for names, file in rows:
        source = next(folder / file for folder in (PACKAGE, TOOLS) if (folder / file).exists()).read_text("utf-8")
        for name in re.findall(r"\w+", names):
            assert re.search(rf"^(class {name}\b|{name} = )", source, re.MULTILINE), f"{name} is not in {file}"


def test_a_step_of_a_request_and_of_the_construction_names_a_function_of_its_file():
    steps = re.findall(r"^\d\. `([\w/]+\.py)`, `(?:\w+\.)?(\w+)`", prose(ROOT / "docs/architecture.md"), re.MULTILINE)
    assert len(steps) == 8 + 8
    for file, named in steps:
        assert re.search(rf"(def|class) {named}\b", (PACKAGE / file).read_text(encoding="utf-8")), f"{file}: {named}"


def test_every_experiment_is_in_the_index_with_a_verdict():
    text = EXPERIMENTS.read_text(encoding="utf-8")
    index = re.search(r"^## Index\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    assert index
    lines = re.findall(r"^- \[.+?\]\(#(\S+)\): (.+)$", index[1], re.MULTILINE)
    assert [fragment for fragment, _ in lines] == [
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^## (\d.+)$", text, re.MULTILINE)
    ]
    assert all(re.match(r"\*\*(kept|lost|measured|not measured)\*\*", verdict) for _, verdict in lines)


def test_every_number_of_the_budget_names_its_experiment():
    source = (PACKAGE / "worker/budget/policy.py").read_text(encoding="utf-8")
    named = dict(re.findall(r"^\[(\w+)\]:? (.+)$", source, re.MULTILINE))
    headings = re.findall(r"^## (\d.+)$", EXPERIMENTS.read_text(encoding="utf-8"), re.MULTILINE)
    assert named.pop("never") and set(named.values()) <= set(headings)
    numbers = re.findall(r"^    (\w+): (?:int|float) = \S+  # (?:\[(\w+)\])?", source, re.MULTILINE)
    assert len(numbers) == 19 and all(key in {*named, "never"} for _, key in numbers)


def pages_of(navigation: list | dict | str) -> list[str]:
    """The files that a part of mkdocs.yml's `nav` names."""
    if isinstance(navigation, str):
        return [navigation]
    parts = navigation.values() if isinstance(navigation, dict) else navigation
    return [page for part in parts for page in pages_of(part)]


def test_every_page_of_docs_has_a_place_in_the_site():
    nav = re.search(r"^nav:\n.*", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert nav
    pages = pages_of(yaml.safe_load(nav[0])["nav"])
    written = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert sorted(pages) == sorted({*pages} | written), "nav in mkdocs.yml: a line for each page, and no page twice"


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_loads_nothing_from_other_hosts(tmp_path):
    if find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed (pip install -e '.[docs]')")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in tmp_path.glob("*.html")} >= {"index.html", "contributing.html", "changelog.html"}
    for page in tmp_path.rglob("*.html"):
        loads = re.findall(
            r"<(?:script|img|link|iframe)\b[^>]*?(?:src|href)=\"?(\w+:)?//", page.read_text(encoding="utf-8")
        )
        assert not loads, page


def test_the_readme_is_short_and_pins_the_torch_of_the_package():
    assert len(README.splitlines()) < 200
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (torch,) = [name for name in project["dependencies"] if name.startswith("torch==")]
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        assert set(re.findall(r"torch==[\w.]+", page.read_text(encoding="utf-8"))) == {torch}


def test_the_readme_has_the_test_command_that_ci_looks_for():
    (pattern,) = re.findall(r'grep -m 1 -E "([^"]+)" README\.md', (ROOT / ".ci" / "run").read_text(encoding="utf-8"))
    assert re.search(pattern, README, re.MULTILINE)


@pytest.mark.parametrize(
    "path",
    [ROOT / ".pre-commit-config.yaml", *(ROOT / ".github").rglob("*.yml")],
    ids=lambda path: path.name,
)
def test_configuration_is_yaml(path):
    assert isinstance(yaml.safe_load(path.read_text(encoding="utf-8")), dict)


def test_issue_forms_have_what_github_asks_for():
    for path in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*_*.yml")):
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert {"name", "description", "body"} <= form.keys()
        ids = [field["id"] for field in form["body"]]
        assert len(set(ids)) == len(ids)
        assert all({"type", "attributes"} <= field.keys() and field["attributes"]["label"] for field in form["body"])
