"""Tests of the HTML page and the text of an explanation: both are complete, links have targets, and names are escaped."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import fields, replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dynaxla.explained import formatting
from dynaxla.explained.advice import advise
from dynaxla.explained.explanation import (
    Break,
    CapturedGraph,
    ChosenImplementation,
    CompiledProgram,
    Copy,
    Cost,
    Explanation,
    Fallback,
    Graph,
    Line,
    MemoryUse,
    Recompilation,
    Tensor,
)

# Text that must be escaped in HTML.
MARKUP = '<script>alert("x")</script>&amp;'
# HTML elements without an end tag.
VOID = {"meta", "link", "br"}


class PageParser(HTMLParser):
    """Collects a page's elements. Fails for an element that is not closed, or closed in the wrong order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        for name, value in attributes:
            if name == "id":
                self.ids.append(str(value))
            if name in ("href", "src", "xlink:href", "action", "srcset"):
                self.links.append(str(value))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def example(name: str = "model") -> Explanation:
    """Returns an explanation with an item of each kind. The texts that come from the user's code contain `name`."""
    line = Line(f"/home/user/{name}.py", 41, name, f"y = x @ {name}")
    graph = Graph(
        name="dynaxla_0_forward", phase="forward", ops={"aten.mm.default": 2, f"{name}::op": 1}, kinds={"matmul": 2}, parameters=(3, 4096),
        inputs=(Tensor(name, "f32[8]", 32),), outputs=(Tensor("out", "f32[8]", 32),),
        programs=(CompiledProgram("dynaxla_0_forward", "s0 = 8", {"compile": 1.5}, MemoryUse(10, 2048, 3 << 20), 4, 0.5, 0.25),),
        implementations=(
            ChosenImplementation("convolution", name, "onednn", ("xla",)),
            ChosenImplementation("contraction", name, "xla", (), {"xla": 1e-3, "onednn": None}),
        ),
        fallbacks=(Fallback("lib.op", "it has no lowering", "model.py:3", 2),),
        copies=(Copy(name, "its memory is not aligned to 64 bytes", 1 << 20, 1, 3), Copy("w", "strides (1,) leave gaps", 4, 1, 0)),
    )  # fmt: skip
    explanation = Explanation(
        name=name, captured=(CapturedGraph(0, line, False, Break(line, f"{name} breaks", "why", (name,), 2), (graph,)),),
        breaks=(Break(line, f"{name} breaks", "why", (name,), 2),), recompilations=(Recompilation(line, "tensor 'x' size mismatch"),),
        phases={"TorchDynamo": 1.0, "XLA's compiler": 3.0}, seconds=4.5, later_seconds=2e-3, xla_seconds=1e-3,
        costs=(Cost(line, 9e-4, 0.9, ("oneDNN matmul",)),), unplaced_share=0.1,
        step_modes=(f"{name} runs in eager mode: it prints",), notes=(name,),
        versions="dynaxla 0.1.0", error=name,
    )  # fmt: skip
    return replace(explanation, advice=advise(explanation))


def test_page_needs_no_other_files() -> None:
    page = example().html()
    parsed = PageParser(page)
    assert not parsed.tags.keys() & {"script", "img", "iframe", "object", "embed", "base"}
    anchors = [link for link in parsed.links if link != "data:,"]
    assert anchors
    assert {link.removeprefix("#") for link in anchors} <= set(parsed.ids)
    assert len(set(parsed.ids)) == len(parsed.ids)
    assert "http" not in page
    assert "url(" not in page
    assert "@import" not in page
    assert parsed.tags["svg"] == 2  # bar charts of lines and of phases
    for needed in ("color-scheme: light dark", "prefers-color-scheme: dark", "@media print"):
        assert needed in page


@pytest.mark.parametrize("form", ["text", "page"])
def test_text_and_page_are_complete(form: str) -> None:
    explanation = example()
    text = " ".join((str(explanation) if form == "text" else PageParser(explanation.html()).text).split())
    for expected in (
        "4.5 s", "2 ms", "model.py:41, in model", "y = x @ model", "90.0%", "10.0%", "oneDNN matmul", "2 mm", "model breaks", "s0 = 8",
        "1.5 s", "3.0 MiB", "2.0 KiB", "250 ms", "xla (not measured)", "measured: xla 1 ms, onednn refused", "it has no lowering",
        "1.0 MiB", "aligned to 64 bytes", "size mismatch", "it prints", "TorchDynamo", "dynaxla 0.1.0", "3 (4.0 KiB)",
        "model f32[8] (32 B)",
    ):  # fmt: skip
        assert expected in text, expected
    for advice in explanation.advice:
        assert " ".join(advice.action.split()) in text, advice.action


def test_names_are_escaped() -> None:
    explanation = example(MARKUP)
    page = explanation.html()
    assert "<script" not in page
    assert PageParser(page).tags == PageParser(example().html()).tags
    assert MARKUP in PageParser(page).text
    framed = explanation._repr_html_()
    assert "<script" not in framed
    assert PageParser(framed).tags == {"iframe": 1}
    assert "[bold]" in str(example("[bold]"))


def test_advice_depends_on_the_explanation() -> None:
    explanation = example()
    all_advice = " | ".join(advice.action for advice in explanation.advice)
    for part in (
        "Fix this error",
        "mark_dynamic",
        "no_grad",
        "Copy model once",
        "lowering of lib.op",
        "this line first",
        "one program",
    ):
        assert part in all_advice, part
    empty = replace(
        explanation,
        captured=(),
        breaks=(),
        recompilations=(),
        costs=(),
        step_modes=(),
        error="",
        later_seconds=None,
        xla_seconds=None,
        phases={},
    )
    (advice_item,) = advise(empty)
    assert "torch.compile" in advice_item.action


def test_tuning_is_not_advised_for_unmeasurable_implementations() -> None:
    explanation = replace(example(), error="", xla_seconds=1.0, later_seconds=1.0)
    (captured,) = explanation.captured
    (graph,) = captured.graphs
    implementations = [ChosenImplementation(op, "a problem", "torch", ("xla",), is_measurable=False) for op in ("kernel", "graph")]
    measurable = ChosenImplementation("convolution", "another problem", "onednn", ("xla",))
    for chosen, advised_count in (implementations, 0), ([*implementations, measurable], 1):
        changed = replace(explanation, captured=(replace(captured, graphs=(replace(graph, implementations=tuple(chosen)),)),))
        advised = [advice.reason for advice in advise(changed) if '"tune": True' in advice.action]
        assert len(advised) == advised_count
        assert all(reason.startswith("1 problem (convolution)") for reason in advised)
        assert formatting.implementation_row(implementations[0])[-1] == "xla"


def test_explanation_has_only_plain_values() -> None:
    def leaves(value: object) -> list[object]:
        if hasattr(value, "__dataclass_fields__"):
            return [leaf for field in fields(value) for leaf in leaves(getattr(value, field.name))]  # type: ignore[arg-type]
        if isinstance(value, tuple):
            return [leaf for item in value for leaf in leaves(item)]
        return [leaf for item in value.items() for leaf in item] if isinstance(value, dict) else [value]

    assert {type(leaf) for leaf in leaves(example())} <= {str, int, float, bool, type(None)}


def test_formatting_of_numbers() -> None:
    assert [formatting.seconds(value) for value in (None, 12.3456, 0.01234, 1.5e-6)] == ["-", "12.3 s", "12.3 ms", "1.5 µs"]
    assert [formatting.size(value) for value in (3, 1536, 500 << 20, 3 << 40)] == ["3 B", "1.5 KiB", "500 MiB", "3072 GiB"]
    assert [formatting.number(count, "copy") for count in (1, 2)] == ["1 copy", "2 copies"]


def test_save_writes_the_page(tmp_path: Path) -> None:
    path = example().save(tmp_path / "page.html")
    assert re.match(r"<!DOCTYPE html>\n<html", path.read_text(encoding="utf-8"))
