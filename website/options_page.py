"""The tables of docs/options.md, made of the fields of `dynaxla.config.Options`: `python website/options_page.py` writes them anew."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from dynaxla.config import OptionDocumentation, documentation

PAGE = Path(__file__).parents[1] / "docs" / "options.md"
# A table stands between two such lines of the page, the first of which names it.
_PLACE = re.compile(r"(<!-- table: (\w+), made by website/options_page\.py -->\n).*?(<!-- end -->\n)", re.DOTALL)


def page(text: str) -> str:
    """The page with the tables of today. Raises: KeyError for a table that there is not."""
    known = documentation()
    tables = {
        "options": _options((name, about) for name, about in known.items() if about.backend == "dynaxla"),
        "auto": _options((name, about) for name, about in known.items() if about.backend == "dynaxla_auto"),
        "variables": _variables(known),
    }
    return _PLACE.sub(lambda place: f"{place[1]}\n{tables[place[2]]}\n{place[3]}", text)


def _options(options: Iterable[tuple[str, OptionDocumentation]]) -> str:
    rows = [f"| `{name}` | `{_code(about.default)}` | {_values(about)} | {about.text} |" for name, about in options]
    return "\n".join(["| option | default | values | meaning |", "| --- | --- | --- | --- |", *rows, ""])


def _variables(known: dict[str, OptionDocumentation]) -> str:
    rows = []
    for name, about in known.items():
        if about.variable:
            meaning = f"The default of the option `{name}`" if about.backend else about.text
            rows.append(f"| `{about.variable}` | {meaning} | `{about.example}` |")
    return "\n".join(["| variable | meaning | example |", "| --- | --- | --- |", *rows, ""])


def _values(about: OptionDocumentation) -> str:
    return ", ".join(f"`{_code(word)}`" for word in about.values.choices) or about.values.text


def _code(value: object) -> str:
    if isinstance(value, tuple):
        return json.dumps(list(value))
    return json.dumps(value) if isinstance(value, str) else repr(value)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
