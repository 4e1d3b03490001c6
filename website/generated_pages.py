"""What mkdocs calls while it builds the site: pages and pictures that are made of other files, so that no text is written twice.

index.md, contributing.md, changelog.md   README.md, CONTRIBUTING.md and CHANGELOG.md
examples/*.md            the programs in examples/
api/*.md                 a directive of mkdocstrings for each public name
benchmarks/pictures.md   and its SVG files, from the tables' data
troubleshooting.md       ends with every error's text
assets/iframe-worker.js  what the search needs where pages are files; wide.css: room for lines of code

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
# Pages that are files outside of docs/.
MOVED = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
# Where a page says so, the list of all errors begins.
ERRORS = "<!-- errors: the site lists all of them here -->"


def on_files(files: Files, config: Any) -> Files:
    """Add what is made."""
    made: dict[str, str] = {page: (ROOT / source).read_text() for source, page in MOVED.items()}
    made |= {f"examples/{path.stem}.md": _example(path) for path in sorted((ROOT / "examples").glob("*.py"))}
    made |= {f"api/{name}.md": text for name, text in public_names.reference_pages().items()}
    made["benchmarks/pictures.md"] = pictures.page("pictures")
    made |= {f"benchmarks/pictures/{picture.name}.svg": picture.svg() for picture in pictures.pictures()}
    made |= {f"assets/{name}": (ROOT / "website" / name).read_text() for name in ("iframe-worker.js", "wide.css")}
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links as the site has them, and the list of errors where a page wants it."""
    here = page.file.src_uri
    source = next((path for path, moved in MOVED.items() if moved == here), f"docs/{here}")
    return re.sub(r"(?<=\]\()[^)\s:#]+", lambda link: _on_the_site(link[0], source, here), markdown.replace(ERRORS, error_texts.listing()))


def _on_the_site(link: str, source: str, here: str) -> str:
    """A link in a file of the repository, as the page of that file has it. What is no file of a page stays as it is."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    if target in MOVED:
        page = MOVED[target]
    elif target.startswith("examples/") and target.endswith(".py"):
        page = target.removesuffix(".py") + ".md"
    elif target.startswith("docs/"):
        page = target.removeprefix("docs/") + ("" if posixpath.splitext(target)[1] else "/README.md")
    else:
        return link
    return posixpath.relpath(page, posixpath.dirname(here) or ".")


def _example(path: Path) -> str:
    """A page with a program: the first line of its docstring, and its text."""
    text = path.read_text()
    title = (ast.get_docstring(ast.parse(text)) or path.stem).partition("\n")[0]
    return f"# {path.name}\n\n{title}\n\n````python\n{text}````\n"
