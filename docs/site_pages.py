"""Pages of the site that are not below docs/: a Git host wants them at the top, and links lead there.

mkdocs calls the functions here (`hooks` in mkdocs.yml).
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "kernels/README.md": "kernels.md"}
PLACES = {**PAGES, "README.md": "index.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page with links that lead to the site's place of each file; folders and sources have none and stay text."""
    here = page.file.src_uri
    source = {place: name for name, place in PAGES.items()}.get(here, f"docs/{here}")

    def moved(link: re.Match[str]) -> str:
        text, path, fragment = link.groups(default="")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        place = PLACES.get(path, path.removeprefix("docs/"))
        if files.get_file_from_path(place) is None:
            return text
        return f"[{text}]({posixpath.relpath(place, posixpath.dirname(here) or '.')}{fragment})"

    return re.sub(r"\[([^\]]*)\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)", moved, markdown)
