"""`python tests/commands/prose.py`: finds unclear sentences in docstrings and comments. Part of `make lint`.

It finds only a few patterns, and names of modules that do not exist. A reviewer must read the prose all the same.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("src", "benchmarks", "tests", "website", "examples")

# A docstring's first line says what the object is or does.
_BEGINNINGS = re.compile(r"(What|Whether|Of|Who|That|Those)\b")
# Words with everyday replacements: fix, reported, next to.
_WORDS = re.compile(r"\b(mend(?:s|ed|ing)?|is told|are told|beside)\b")
# Several attributes or arguments in one paragraph: one a line is easier to read.
_RUN_ON = re.compile(r"\b(Attributes|Args): \w+ \([^)]*\)[;,] \w+ \(")

# A module by its path. Paths begin at the repository, at the package or at its folder `lowering`, or are those of other packages.
_MODULES = re.compile(r"(?<![\w/.])((?:\w+/)+\w+\.py)\b")
_STARTS = (ROOT, ROOT / "src" / "dynaxla", ROOT / "src" / "dynaxla" / "lowering")
_OTHERS = ("torch", "jax", "functorch", "path", "Lib")


def findings(source: str) -> Iterator[tuple[int, str]]:
    """Yields the line and the text of each finding in a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and (text := ast.get_docstring(node)):
            line = node.body[0].lineno
            if match := _BEGINNINGS.match(text):
                yield line, f"the docstring begins with {match[0]!r}: begin with a noun or a verb"
            yield from ((line, message) for message in _in_text(text))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from ((token.start[0], message) for message in _in_text(token.string))


def _in_text(text: str) -> Iterator[str]:
    if match := _WORDS.search(text):
        yield f"{match[0]!r}: use an everyday word (fix, reported, next to)"
    if match := _RUN_ON.search(text):
        yield f"{match[1]} in one paragraph: write one a line"
    for match in _MODULES.finditer(text):
        if match[1].split("/")[0] not in _OTHERS and not any((start / match[1]).exists() for start in _STARTS):
            yield f"there is no {match[1]}"


def main() -> int:
    count = 0
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        for line, message in findings(path.read_text()):
            count += 1
            print(f"{path.relative_to(ROOT)}:{line}: {message}")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
