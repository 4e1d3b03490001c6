"""Tests of the reports of rewrites to listeners and to the dump."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from dynaxla.observe import events, rewrites

pytestmark = pytest.mark.quick


def test_dump_has_a_line_for_each_pass(tmp_path: Path) -> None:
    torch.compile(lambda x: torch.nn.functional.conv2d(x, x).relu(), backend="dynaxla", options={"dump": str(tmp_path)})(
        torch.randn(2, 2, 3, 3)
    )
    (captured,) = [path for path in tmp_path.iterdir() if path.name.endswith(".passes.txt") and "inference" not in path.name]
    lines = [line.split() for line in captured.read_text().splitlines()]
    assert ["aten", "late_writes"] in [line[:2] for line in lines]
    assert all(int(line[2]) > 0 and line[3] == "->" and int(line[4]) > 0 for line in lines)
    (traced,) = [path for path in tmp_path.iterdir() if path.name.endswith("inference.passes.txt")]
    assert traced.read_text().startswith("jaxpr   transposes")


def test_rewrites_of_other_threads_are_not_reported(tmp_path: Path) -> None:
    reported: list[bool] = []
    with rewrites.dumping_to(tmp_path, "graph"):
        thread = threading.Thread(target=lambda: reported.append(rewrites.are_reported()))
        thread.start()
        thread.join()
        assert rewrites.are_reported()
    assert not rewrites.are_reported()
    assert reported == [False]


def test_evaluations_are_reported_with_their_numbers_of_equations() -> None:
    received: list[events.GraphRewritten] = []
    rewrites.note_evaluation("outside of a trace", 3)
    with events.listening(received.append), rewrites.tracing() as report:
        rewrites.note_evaluation("first", 10)
        with rewrites.tracing():  # a trace of another program
            rewrites.note_evaluation("inner", 1)
        rewrites.note_evaluation("second", 8)
        report(9)
    assert received == [events.GraphRewritten("first", "jaxpr", 10, (8,)), events.GraphRewritten("second", "jaxpr", 8, (9,))]
