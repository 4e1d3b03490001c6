"""Tests of the tables of measurements."""

from __future__ import annotations

import io

from rich.console import Console

from dynaxla.tuning import Measurement
from dynaxla.tuning.table import show


def shown(*measurements: Measurement) -> str:
    console = Console(file=io.StringIO(), width=200)
    show(measurements, console)
    return console.file.getvalue()


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("│")[1:-1]]


def test_each_op_and_machine_has_a_table() -> None:
    def measured(op: str, problem: str, machine: str, chosen: str = "xla", **seconds: float | None) -> Measurement:
        return Measurement(op, problem, machine, seconds, "xla", chosen)

    text = shown(
        measured("matmul", "2 x 2", "old", xla=3e-6),
        measured("conv", "wide [b]", "new", "onednn", xla=20e-6, onednn=1.25e-6),
        measured("conv", "narrow", "new", xla=2e-6, torch=None),
        measured("matmul", "2 x 2", "new", xla=4e-6),
    )
    lines = text.splitlines()
    titles = [line.strip() for line in lines if "microseconds" in line]
    assert titles == [f"{op}, microseconds on {machine}" for op, machine in [("conv", "new"), ("matmul", "new"), ("matmul", "old")]]
    rows = {cells(line)[0]: cells(line)[1:] for line in lines if line.startswith("│") and ("narrow" in line or "wide" in line)}
    assert rows == {"narrow": ["2.0 *", "-", "refused", "xla"], "wide [b]": ["20.0", "1.2 *", "-", "xla"]}
    assert lines[-1] == "4 problems; for 1 of them another implementation than the expected one was chosen."


def test_output_without_measurements() -> None:
    assert shown() == "0 problems; for 0 of them another implementation than the expected one was chosen.\n"
