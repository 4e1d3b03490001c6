"""The tables of docs/options.md, generated from the fields of `dynaxla.config.Options`: `python website/options_page.py` updates them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from dynaxla.config import OptionDocumentation, documentation

PAGE = Path(__file__).parents[1] / "docs" / "options.md"
# A table is between two such lines of the page. The first line names the table.
_PLACE = re.compile(r"(<!-- table: (\w+), made by website/options_page\.py -->\n).*?(<!-- end -->\n)", re.DOTALL)


def page(text: str) -> str:
    """Returns the page with updated tables. Raises: KeyError for an unknown table."""
    known = documentation()
    tables = {
        "options": _options((name, documented) for name, documented in known.items() if documented.backend == "dynaxla"),
        "auto": _options((name, documented) for name, documented in known.items() if documented.backend == "dynaxla_auto"),
        "variables": _variables(known),
    }
    return _PLACE.sub(lambda table: f"{table[1]}\n{tables[table[2]]}\n{table[3]}", text)


def _options(options: Iterable[tuple[str, OptionDocumentation]]) -> str:
    rows = [f"| `{name}` | `{_code(documented.default)}` | {_values(documented)} | {documented.text} |" for name, documented in options]
    return "\n".join(["| option | default | values | meaning |", "| --- | --- | --- | --- |", *rows, ""])


def _variables(known: dict[str, OptionDocumentation]) -> str:
    rows = []
    for name, documented in known.items():
        if documented.variable:
            meaning = f"The default of the option `{name}`" if documented.backend else documented.text
            rows.append(f"| `{documented.variable}` | {meaning} | `{documented.example}` |")
    return "\n".join(["| variable | meaning | example |", "| --- | --- | --- |", *rows, ""])


def _values(documented: OptionDocumentation) -> str:
    return ", ".join(f"`{_code(word)}`" for word in documented.values.choices) or documented.values.text


def _code(value: object) -> str:
    if isinstance(value, tuple):
        return json.dumps(list(value))
    return json.dumps(value) if isinstance(value, str) else repr(value)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
