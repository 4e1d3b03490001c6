"""A measurement takes turns, notices what is wrong, and makes a row of whatever happens."""

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
    # First calls: one checked, three more. Then rounds of one untimed and two timed calls, led by another engine each time. Then the check.
    first_calls, rounds, last_check = order[:8], order[8:-2], order[-2:]
    assert first_calls == ["a"] * 4 + ["b"] * 4
    assert rounds == (["a"] * 3 + ["b"] * 3 + ["b"] * 3 + ["a"] * 3) * 2
    assert last_check == ["a", "b"]


def test_rows_have_everything() -> None:
    rows = rows_of(engines.ENGINES["dynaxla"], engines.ENGINES["dynaxla_retrace"], engines.ENGINES["dynamo"], engines.ENGINES["dynamo_aot"])
    for row in rows.values():
        assert row.good, row
        assert row.wall is not None
        assert row.wall.lower <= row.wall.median <= row.wall.upper
        assert len(row.wall_samples) == len(row.cpu_samples) == 3
        assert row.speedup == rows["eager"].wall.median / row.wall.median
    once, again = rows["dynaxla"], rows["dynaxla_retrace"]
    assert {"capture", "trace", "lower", "compile"} <= once.first_phases.keys()
    assert sum(once.first_phases.values()) < once.first_call_seconds
    assert once.traces == 0
    assert once.call_phases.keys() == {"execute"}
    assert again.traces == 3
    assert {"trace", "lower", "lookup", "run"} <= again.call_phases.keys()
    assert sum(again.call_phases.values()) <= max(again.wall_samples)


def test_a_failure_is_a_row() -> None:
    def cannot_prepare(*_: Any) -> Any:
        raise RuntimeError("no compiler")

    rows = rows_of(BenchEngine("prepare", cannot_prepare), wrapped("first", fail), wrapped("later", fail, from_call=5))
    assert rows["prepare"].failure == "RuntimeError: no compiler"
    assert rows["first"].failure == "ValueError: out of luck"
    assert rows["later"].failure == "ValueError: out of luck"
    assert rows["later"].first_call_seconds is not None
    assert rows["eager"].good
    assert not any(rows[name].good or rows[name].speedup for name in ("prepare", "first", "later"))


def test_without_eager_nothing_is_right() -> None:
    class Broken(Tiny):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("never")

    rows = measure(suites.BenchCase("broken", Broken, tiny_inputs), [engines.ENGINES["eager"]], FAST).rows
    assert rows[0].failure == "eager itself fails: ValueError: never"


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
def test_a_wrong_result_is_noticed(change: Callable[[torch.Tensor], Any], detail: str) -> None:
    row = rows_of(wrapped("wrong", change))["wrong"]
    assert not row.good
    assert not row.failure
    assert row.agreement is not None
    assert detail in row.agreement.detail


def test_a_result_kept_from_the_first_input_is_noticed() -> None:
    def prepare(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Any:
        kept = model(*inputs)
        return lambda *_: kept

    assert not rows_of(BenchEngine("stale", prepare))["stale"].good


def test_random_inputs_are_fresh() -> None:
    seen: list[torch.Tensor] = []

    def prepare(model: nn.Module, _: Any) -> Any:
        def call(x: torch.Tensor) -> Any:
            seen.append(x)
            return model(x)

        return call

    measure(TINY, [BenchEngine("fresh", prepare)], BenchSettings(rounds=3, randomize_input=True))
    assert len({tuple(x.flatten().tolist()) for x in seen}) == len(seen)


def test_the_process_is_left_as_it_was() -> None:
    threads = torch.get_num_threads()
    with process_settings(2) as notes:
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == threads
    assert not notes, "nothing to say unless the environment sizes XLA's pools"
