"""Tests of stored measurements of an unfinished table."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.cells import Cells

MACHINE = {"date": "today", "cpu": "one"}


def test_interrupted_run_continues_with_stored_measurements(tmp_path: Path) -> None:
    file = tmp_path / "cells.json"
    cells = Cells(file, MACHINE)
    assert cells.measured("a", lambda: {"seconds": [1.5]}) == {"seconds": [1.5]}
    with pytest.raises(KeyboardInterrupt):
        cells.measured("b", lambda: (_ for _ in ()).throw(KeyboardInterrupt()))
    continued = Cells(file, {**MACHINE, "date": "tomorrow"})
    assert continued.measured("a", lambda: pytest.fail("measured before")) == {"seconds": [1.5]}
    assert continued.measured("b", lambda: 2) == 2
    continued.done()
    assert list(tmp_path.iterdir()) == []
    continued.done()


@pytest.mark.parametrize("machine", [{**MACHINE, "cpu": "two"}, {**MACHINE, "gpu": "one"}])
def test_measurements_of_another_machine_are_ignored(machine: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "cells.json"
    Cells(file, MACHINE).measured("a", lambda: 1)
    assert Cells(file, machine).measured("a", lambda: 2) == 2


def test_nothing_is_stored_without_a_file() -> None:
    assert Cells(None, MACHINE).measured("a", lambda: 1) == 1
    assert Cells(None, MACHINE).measured("a", lambda: 2) == 2
