"""Tests of measurements: the order of calls, failures, wrong results, and the rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dynaxla.bench import engines, suites
from dynaxla.bench.engines import BenchEngine
from dynaxla.bench.measure import BenchSettings, measure, process_settings
from support.fakes.tiny_benchmark import FAST, TINY, Tiny, fail, rows_of, tiny_inputs, wrapped


def test_engines_take_turns() -> None:
    order: list[str] = []

    def recorder(name: str) -> BenchEngine:
        def prepare(model: nn.Module, _: Any) -> Any:
            def call(x: torch.Tensor) -> Any:
                order.append(name)
                return model(x)

            return call

        return BenchEngine(name, prepare)

    measure(TINY, [recorder("a"), recorder("b")], BenchSettings(rounds=4, iterations_per_run=2))
    # First calls: one with a check, three without. Then rounds of one untimed and two timed calls, begun by alternating engines; a check.
    first_calls, rounds, last_check = order[:8], order[8:-2], order[-2:]
    assert first_calls == ["a"] * 4 + ["b"] * 4
    assert rounds == (["a"] * 3 + ["b"] * 3 + ["b"] * 3 + ["a"] * 3) * 2
    assert last_check == ["a", "b"]


def test_rows_have_times_phases_and_counts() -> None:
    rows = rows_of(engines.ENGINES["dynaxla"], engines.ENGINES["dynaxla_retrace"], engines.ENGINES["dynamo"], engines.ENGINES["dynamo_aot"])
    for row in rows.values():
        assert row.agrees, row
        assert row.wall is not None
        assert row.wall.lower <= row.wall.median <= row.wall.upper
        assert len(row.wall_samples) == len(row.cpu_samples) == 3
        assert row.speedup == rows["eager"].wall.median / row.wall.median
    dynaxla, retrace = rows["dynaxla"], rows["dynaxla_retrace"]
    assert {"capture", "trace", "lower", "compile"} <= dynaxla.first_phases.keys()
    assert sum(dynaxla.first_phases.values()) < dynaxla.first_call_seconds
    assert dynaxla.traces == 0
    assert dynaxla.call_phases.keys() == {"execute"}
    assert retrace.traces == 3
    assert {"trace", "lower", "lookup", "run"} <= retrace.call_phases.keys()
    assert sum(retrace.call_phases.values()) <= max(retrace.wall_samples)


def test_failing_engine_gives_a_row_with_its_failure() -> None:
    def cannot_prepare(*_: Any) -> Any:
        raise RuntimeError("no compiler")

    rows = rows_of(BenchEngine("prepare", cannot_prepare), wrapped("first", fail), wrapped("later", fail, from_call=5))
    assert rows["prepare"].failure == "RuntimeError: no compiler"
    assert rows["first"].failure == "ValueError: out of luck"
    assert rows["later"].failure == "ValueError: out of luck"
    assert rows["later"].first_call_seconds is not None
    assert rows["eager"].agrees
    assert not any(rows[name].agrees or rows[name].speedup for name in ("prepare", "first", "later"))


def test_failure_of_eager_mode_is_reported() -> None:
    class Broken(Tiny):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("never")

    rows = measure(suites.BenchCase("broken", Broken, tiny_inputs), [engines.ENGINES["eager"]], FAST).rows
    assert rows[0].failure == "eager mode itself fails: ValueError: never"


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        (lambda y: y + 1e-3, ""),
        (lambda y: y * float("nan"), ""),
        (lambda y: y.double(), "dtype torch.float64, eager gives torch.float32"),
        (lambda y: y[:, :2], "shape"),
        (lambda y: (y,), "structure"),
        (lambda y: None, "NoneType, eager gives a tensor"),
    ],
)
def test_wrong_result_is_detected(change: Callable[[torch.Tensor], Any], detail: str) -> None:
    row = rows_of(wrapped("wrong", change))["wrong"]
    assert not row.agrees
    assert not row.failure
    assert row.agreement is not None
    assert detail in row.agreement.detail


def test_stale_result_is_detected() -> None:
    def prepare(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Any:
        result = model(*inputs)
        return lambda *_: result

    assert not rows_of(BenchEngine("stale", prepare))["stale"].agrees


def test_randomize_input_gives_each_call_new_values() -> None:
    inputs: list[torch.Tensor] = []

    def prepare(model: nn.Module, _: Any) -> Any:
        def call(x: torch.Tensor) -> Any:
            inputs.append(x)
            return model(x)

        return call

    measure(TINY, [BenchEngine("fresh", prepare)], BenchSettings(rounds=3, randomize_input=True))
    assert len({tuple(x.flatten().tolist()) for x in inputs}) == len(inputs)


def test_process_settings_restores_the_number_of_threads() -> None:
    threads = torch.get_num_threads()
    with process_settings(2) as notes:
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == threads
    assert not notes, "notes exist only if the environment sets the sizes of XLA's thread pools"
