"""Tests of the measurement of the overhead of calls."""

from __future__ import annotations

import pytest
import torch
from benchmarks.overhead import Overhead, measure
from typer.testing import CliRunner

from benchmarks import overhead
from dynaxla import cli


@pytest.mark.thorough
def test_all_ways_of_calling_are_measured() -> None:
    result = measure(layers=3, rounds=3, calls=10)
    assert set(result.median) == {"eager", "inductor", "dynaxla", "capture", "program", "executable"}
    assert result.inputs == 7, "three weights, three biases, the activation"
    assert all(0 < result.minimum[name] <= result.median[name] for name in result.median)
    assert result.allowed == 30 + 0.6 * 7


@pytest.mark.parametrize(("microseconds", "code"), [(31.2, 0), (31.3, 1)])
def test_overhead_above_the_limit_is_an_error(microseconds: float, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The median of each perceptron is compared with the limit."""

    def measured(layers: int, *_: int) -> Overhead:
        median = {"inductor": 5.0, "dynaxla": 5.0, "program": microseconds if layers == 3 else 0.0, "executable": 0.0}
        return Overhead(layers, 2, dict.fromkeys(median, 1.0), median)

    monkeypatch.setattr(overhead, "measure", measured)
    threads = torch.get_num_threads()
    try:
        result = CliRunner().invoke(cli.app, ["overhead", "--layers", "3", "--layers", "4"])
    finally:
        torch.set_num_threads(threads)
    assert result.exit_code == code
    assert "31, allowed 31" in result.output
