"""Tests of the models that break graphs."""

from __future__ import annotations

import pytest
import torch

from benchmarks import suites
from dynaxla.bench import engines
from dynaxla.bench.measure import BenchSettings, measure
from dynaxla.bench.suites import make_model
from support.fakes.tiny_benchmark import check_case


@pytest.mark.sample(usual=1)
@pytest.mark.parametrize("name", [case.name for case in suites.BREAKS if case.name != "generate"])
def test_models_break_graphs_and_agree_with_eager_mode(name: str) -> None:
    result = measure(suites.choose("breaks", [name])[0], [engines.ENGINES["dynaxla"]], BenchSettings(rounds=1, randomize_input=True))
    assert result.rows[0].agrees, result.rows[0]
    assert result.captured is not None
    assert result.captured.breaks


def test_generation_stops_at_the_end_token() -> None:
    model = make_model(suites.choose("breaks", ["generate"])[0], 0, torch.float32, torch.device("cpu"))
    text = torch.ones(1, 8, dtype=torch.int64)
    assert model(text).shape == (1, 28)
    model.head.bias[0] = 1e4
    assert model(text).shape == (1, 9)


@pytest.mark.parametrize("case", suites.BREAKS, ids=lambda case: case.name)
def test_models_that_break_graphs_can_be_compared(case: suites.BenchCase) -> None:
    check_case(case)
