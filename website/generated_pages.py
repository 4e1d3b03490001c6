"""Hooks of mkdocs, which add pages and pictures that are generated from other files, so that no text is written twice.

index.md, contributing.md, changelog.md   README.md, CONTRIBUTING.md and CHANGELOG.md
examples/*.md            the programs in examples/
api/*.md                 a directive of mkdocstrings for each public name
benchmarks/pictures.md   and its SVG files, from the tables' data
troubleshooting.md       ends with the texts of all errors
assets/iframe-worker.js  is needed by the search if pages are opened as files; wide.css: wider lines of code

Links between files of the repository become links between pages.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

import error_texts
import pictures
import public_names
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
# Pages that are files outside docs/.
MOVED = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
# A line of a page that is replaced by the list of all errors.
ERRORS = "<!-- errors: the site lists all of them here -->"
# The ranks of pages in searches, where they are not 1: pages for users come before those for contributors.
RANKS = {
    "troubleshooting.md": 2.0, "internals/": 0.1, "benchmarks/": 0.1, "changelog.md": 0.1,
    "random_programs.md": 0.1, "private-names.md": 0.1,
}  # fmt: skip


def on_files(files: Files, config: Any) -> Files:
    """Adds the generated files."""
    generated: dict[str, str] = {page: (ROOT / source).read_text() for source, page in MOVED.items()}
    generated |= {f"examples/{path.stem}.md": _example(path) for path in sorted((ROOT / "examples").glob("*.py"))}
    generated |= {f"api/{name}.md": text for name, text in public_names.reference_pages().items()}
    generated["benchmarks/pictures.md"] = pictures.page("pictures")
    generated |= {f"benchmarks/pictures/{picture.name}.svg": picture.svg() for picture in pictures.pictures()}
    generated |= {f"assets/{name}": (ROOT / "website" / name).read_text() for name in ("iframe-worker.js", "wide.css")}
    for name, text in generated.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Converts links to those of the site, inserts the list of errors, and sets the rank of the page in searches."""
    site_page = page.file.src_uri
    page.meta["search"] = {"boost": next((rank for start, rank in RANKS.items() if site_page.startswith(start)), 1.0)}
    source = next((path for path, moved in MOVED.items() if moved == site_page), f"docs/{site_page}")
    return re.sub(
        r"(?<=\]\()[^)\s:#]+", lambda link: _on_the_site(link[0], source, site_page), markdown.replace(ERRORS, error_texts.listing())
    )


def _on_the_site(link: str, source: str, site_page: str) -> str:
    """Converts a link in a file of the repository to a link between pages. A link to a file without a page stays."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    if target in MOVED:
        page = MOVED[target]
    elif target.startswith("examples/") and target.endswith(".py"):
        page = target.removesuffix(".py") + ".md"
    elif target.startswith("docs/"):
        page = target.removeprefix("docs/") + ("" if posixpath.splitext(target)[1] else "/README.md")
    else:
        return link
    return posixpath.relpath(page, posixpath.dirname(site_page) or ".")


def _example(path: Path) -> str:
    """Returns a page with a program: the first line of its docstring, and its text."""
    text = path.read_text()
    title = (ast.get_docstring(ast.parse(text)) or path.stem).partition("\n")[0]
    return f"# {path.name}\n\n{title}\n\n````python\n{text}````\n"
