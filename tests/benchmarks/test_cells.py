"""Measurements that are kept until a table is whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.cells import Cells

HERE = {"date": "today", "cpu": "one"}


def test_a_stopped_run_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "cells.json"
    cells = Cells(file, HERE)
    assert cells.measured("a", lambda: {"seconds": [1.5]}) == {"seconds": [1.5]}
    with pytest.raises(KeyboardInterrupt):
        cells.measured("b", lambda: (_ for _ in ()).throw(KeyboardInterrupt()))
    again = Cells(file, {**HERE, "date": "tomorrow"})
    assert again.measured("a", lambda: pytest.fail("measured before")) == {"seconds": [1.5]}
    assert again.measured("b", lambda: 2) == 2
    again.done()
    assert list(tmp_path.iterdir()) == []
    again.done()


@pytest.mark.parametrize("there", [{**HERE, "cpu": "two"}, {**HERE, "gpu": "one"}])
def test_another_machine_measures_anew(there: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "cells.json"
    Cells(file, HERE).measured("a", lambda: 1)
    assert Cells(file, there).measured("a", lambda: 2) == 2


def test_nothing_is_kept_without_a_file() -> None:
    assert Cells(None, HERE).measured("a", lambda: 1) == 1
    assert Cells(None, HERE).measured("a", lambda: 2) == 2
