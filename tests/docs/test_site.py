"""Tests that the site's pages agree with the code: options, errors, public names, figures. `make docs` builds the site."""

from __future__ import annotations

import ast
import dataclasses
import importlib.metadata
import json
import os
import pydoc
import re
import types
from xml.etree import ElementTree

import error_texts
import options_page
import pictures
import public_names
import pytest

import dynaxla
from dynaxla import errors, sharding
from dynaxla.config import Options, documentation
from support.paths import ROOT

DOCS = ROOT / "docs"


def tables_of(page: str) -> list[list[list[str]]]:
    """Returns the rows of a page's tables, without headings."""
    tables = re.findall(r"(?:^\|.*\n)+", (DOCS / page).read_text(), re.MULTILINE)
    return [[[cell.strip() for cell in line.strip("|\n").split(" | ")] for line in table.splitlines()[2:]] for table in tables]


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_navigation_lists_each_page_once() -> None:
    """Pages made from other files are listed, too. `make docs` finds broken links."""
    listed = re.findall(r"^ +- .+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    written = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")]
    examples = [f"examples/{path.stem}.md" for path in (ROOT / "examples").glob("*.py")]
    reference = [f"api/{page}.md" for page in public_names.reference_pages()]
    generated = ["index.md", "contributing.md", "changelog.md", "benchmarks/pictures.md", *reference]
    assert sorted(listed) == sorted([*written, *examples, *generated])


def test_page_of_options_is_up_to_date() -> None:
    """`python website/options_page.py` writes the page."""
    assert options_page.PAGE.read_text() == options_page.page(options_page.PAGE.read_text())
    options, variables, _, _, auto = tables_of("options.md")
    assert [code(row[0])[0] for row in (*options, *auto)] == [item.name for item in dataclasses.fields(Options)][:-2]
    assert [code(row[0])[0] for row in variables] == [
        "DYNAXLA_DUMP",
        "DYNAXLA_COMPILE",
        "DYNAXLA_CACHE",
        "DYNAXLA_IMPLEMENTATIONS",
        "DYNAXLA_HEAP",
    ]


def test_documented_defaults_equal_those_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("DYNAXLA_")]:
        monkeypatch.delenv(name)
    for name, documented in documentation().items():
        assert getattr(Options.parse(None, None, documented.backend), name) == documented.default


def test_page_of_options_lists_all_modes_and_backends() -> None:
    _, _, modes, backends, _ = tables_of("options.md")
    named = [ast.literal_eval(mode) for row in modes for mode in code(row[0])]
    for mode in named:
        assert Options.parse(None, mode).tune == ("autotune" in mode)
    with pytest.raises(dynaxla.errors.OptionError) as refused:
        Options.parse(None, "none of these")
    assert refused.value.hint.removeprefix("the modes are: ").split(", ") == named
    entry_points = [entry for entry in importlib.metadata.entry_points(group="torch_dynamo_backends") if entry.module == "dynaxla.backend"]
    assert [ast.literal_eval(code(row[0])[0]) for row in backends] == [entry.name for entry in entry_points]


def test_messages_quoted_in_troubleshooting_exist() -> None:
    """Each message in the page's tables of errors is one of dynaxla's, or one of the messages of torch that are listed here."""
    messages_of_torch = {"torch._dynamo.exc.Unsupported", "index out of range in self", "Trying to resize storage that is not resizable"}
    quoted = [code(row[0])[0] for table in tables_of("troubleshooting.md")[:2] for row in table]
    assert len(quoted) > 10
    texts = error_texts.error_texts()
    assert [text for text in quoted if not any(known.says(text) for known in texts)] == [
        text for text in quoted if text in messages_of_torch
    ]


def test_error_texts_match_raised_messages() -> None:
    with pytest.raises(dynaxla.errors.OptionError) as unknown:
        Options.parse({"dmup": "here"}, None)
    with pytest.raises(dynaxla.errors.ArgumentError) as bad_mesh:
        sharding.Mesh((0,), ("rows",))
    for error in (unknown.value, bad_mesh.value):
        assert [text for text in error_texts.error_texts() if text.error == type(error).__name__ and text.says(error.message)]
    assert not any(text.says("something else altogether") for text in error_texts.error_texts())


def test_all_classes_of_errors_are_listed() -> None:
    classes = [name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, errors.DynaxlaError)]
    assert list(error_texts.error_classes()) == classes
    listing = error_texts.listing()
    assert re.findall(r"^### (\w+)$", listing, re.MULTILINE) == classes
    assert {text.error for text in error_texts.error_texts()} >= set(classes) - {"DynaxlaError"}
    assert listing.count("\n| ") > 200


def test_error_texts_of_a_source() -> None:
    source = """
HINT = "give " + str(2)
def refuse(x):
    what = "one" if x else f"a {x!r}"
    raise OptionError(f"no {what}: {x} {x}", hint=HINT)
"""
    texts = {(text.message, text.hint) for text in error_texts._texts_of(source)}
    assert texts == set()  # too few constant letters to recognize the message
    texts = {(text.message, text.hint) for text in error_texts._texts_of(source.replace("no {", "there is no {"))}
    assert texts == {("there is no one: …", "give …"), ("there is no a …: …", "give …")}


def test_reference_has_all_public_names() -> None:
    shown = re.findall(r"^::: dynaxla\.(\S+)$", "\n".join(public_names.reference_pages().values()), re.MULTILINE)
    assert len(shown) == len(set(shown))
    modules = {name for name in dynaxla.__all__ if isinstance(getattr(dynaxla, name), types.ModuleType)}
    assert modules == {"device", "errors", "metrics", "sharding"}
    expected = set(dynaxla.__all__) - modules | {f"{name}.{member}" for name in modules for member in public_names.members(name)}
    assert set(shown) == expected | {name for page in public_names.PAGES.values() for name in page.more}
    assert [name for name in shown if not callable(pydoc.locate(f"dynaxla.{name}"))] == []


def test_pictures_have_the_data_of_the_tables() -> None:
    drawn = pictures.pictures()
    assert len({picture.name for picture in drawn}) == len(drawn) > 10
    for picture in drawn:
        assert (DOCS / "benchmarks" / picture.table).exists()
        root = ElementTree.fromstring(picture.svg())
        width, height = (float(root.get(side, "0")) for side in ("width", "height"))
        bars = [item for item in root.iter("{http://www.w3.org/2000/svg}rect") if item.get("height") == str(pictures.ROW - 1)]
        assert len(bars) >= sum(map(len, picture.groups.values()))
        assert all(float(bar.get("x", "")) + float(bar.get("width", "")) <= width and float(bar.get("y", "")) < height for bar in bars)
    models_picture = drawn[0]
    report = json.loads((DOCS / "benchmarks" / "models-cpu-batch1-float32.json").read_text())
    assert f"dynaxla {report['geometric_means']['dynaxla']['speedup']:.2f}" in models_picture.summary
    assert all(f"pictures/{picture.name}.svg" in pictures.page("pictures") for picture in drawn)
