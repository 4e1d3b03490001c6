"""Tests of tables of times. test_cpu.py and test_gpu.py have whole tables."""

from __future__ import annotations

from benchmarks import tables


def test_table_of_times_and_ratios() -> None:
    """Ratios are another engine's time over the last engine's. A failure is in the table, but not in the means."""
    good = {"eager": {"good": True, "ms": 8.0}, "mine": {"good": True, "ms": 2.0}}
    failed = {"eager": {"good": True, "ms": 1.0}, "mine": {"good": False, "failure": "no luck", "ms": 1.0}}
    slow = {"eager": {"good": True, "ms": 1.0}, "mine": {"good": True, "ms": 1.0}}
    lines = tables.times(("eager", "mine"), [("eager", "mine")], {"good": good, "failed": failed, "slow": slow, "older": {}})
    assert lines == [
        "| model | eager ms | mine ms | eager / mine |",
        "| --- | ---: | ---: | ---: |",
        "| good | 8 | 2 | 4.00 |",
        "| failed | 1 | failed: no luck | - |",
        "| slow | 1 | 1 | 1.00 |",
        "| older | not measured | not measured | - |",
        "| **geometric mean** |  |  | **2.00** |",
        "| **minimum** |  |  | **1.00** |",
    ]


def test_circumstances() -> None:
    facts = {"date": "today", "python": "3.12", "torch": "2.11", "timm": "1.0", "cpu": "some cores"}
    assert tables.circumstances(facts) == "today; python 3.12, torch 2.11; some cores."
    assert tables.circumstances({**facts, "gpu": "H100"}) == "today; python 3.12, torch 2.11; H100; some cores."
