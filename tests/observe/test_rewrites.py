"""Reports of rewrites reach listeners and the dump."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from dynaxla.observe import events, rewrites

pytestmark = pytest.mark.quick


def test_a_dump_has_a_line_for_each_pass(tmp_path: Path) -> None:
    torch.compile(lambda x: torch.nn.functional.conv2d(x, x).relu(), backend="dynaxla", options={"dump": str(tmp_path)})(
        torch.randn(2, 2, 3, 3)
    )
    (captured,) = [path for path in tmp_path.iterdir() if path.name.endswith(".passes.txt") and "inference" not in path.name]
    lines = [line.split() for line in captured.read_text().splitlines()]
    assert ["aten", "late_writes"] in [line[:2] for line in lines]
    assert all(int(line[2]) > 0 and line[3] == "->" and int(line[4]) > 0 for line in lines)
    (traced,) = [path for path in tmp_path.iterdir() if path.name.endswith("inference.passes.txt")]
    assert traced.read_text().startswith("jaxpr   transposes")


def test_reports_are_of_one_thread(tmp_path: Path) -> None:
    found: list[bool] = []
    with rewrites.dumping_to(tmp_path, "graph"):
        thread = threading.Thread(target=lambda: found.append(rewrites.are_reported()))
        thread.start()
        thread.join()
        assert rewrites.are_reported()
    assert not rewrites.are_reported()
    assert found == [False]


def test_an_evaluation_is_reported_with_the_equations_that_result() -> None:
    heard: list[events.GraphRewritten] = []
    rewrites.note_evaluation("outside of a trace", 3)
    with events.listening(heard.append), rewrites.tracing() as report:
        rewrites.note_evaluation("first", 10)
        with rewrites.tracing():  # of another program
            rewrites.note_evaluation("inner", 1)
        rewrites.note_evaluation("second", 8)
        report(9)
    assert heard == [events.GraphRewritten("first", "jaxpr", 10, (8,)), events.GraphRewritten("second", "jaxpr", 8, (9,))]
