"""A benchmark suite of one tiny model, and engines that fail, for tests of `dynaxla bench`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from typer import Typer
from typer.testing import CliRunner, Result

from benchmarks import choices as all_choices
from benchmarks import engines as all_engines
from benchmarks import suites as all_suites
from dynaxla import tuning
from dynaxla.bench import choices, engines, session, suites
from dynaxla.bench.engines import BenchEngine
from dynaxla.bench.measure import BenchSettings, EngineResult, measure
from dynaxla.cli.bench import bench


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def tiny_inputs(batch: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    return (torch.randn(batch, 16, generator=generator),)


TINY = suites.BenchCase("tiny", Tiny, tiny_inputs)
FAST = BenchSettings(rounds=3)

app = Typer()
app.command()(bench)


def invoke(*args: str) -> Result:
    return CliRunner().invoke(app, list(args))


def wrapped(name: str, change: Callable[[torch.Tensor], Any], from_call: int = 0, native: bool = False) -> BenchEngine:
    """Returns an engine that runs eager mode, and changes its results after `from_call` calls."""

    def prepare(model: nn.Module, _: Any) -> Any:
        calls = 0

        def call(x: torch.Tensor) -> Any:
            nonlocal calls
            calls += 1
            return change(model(x)) if calls > from_call else model(x)

        return call

    return BenchEngine(name, prepare, native=native)


def fail(_: torch.Tensor) -> torch.Tensor:
    raise ValueError("out of luck\nsecond line")


def rows_of(*chosen: BenchEngine, settings: BenchSettings = FAST) -> dict[str, EngineResult]:
    return {row.engine: row for row in measure(TINY, [engines.ENGINES["eager"], *chosen], settings).rows}


def check_case(case: suites.BenchCase) -> None:
    """Inputs depend only on the generator and grow with the batch; the result is finite and depends on them."""

    def inputs(batch: int, seed: int) -> tuple[torch.Tensor, ...]:
        return case.inputs(batch, torch.Generator().manual_seed(seed))

    model = suites.make_model(case, 0, torch.float32, torch.device("cpu"))
    once, twice, other = inputs(1, 0), inputs(2, 0), inputs(1, 1)
    assert all(map(torch.equal, once, inputs(1, 0)))
    assert [2 * tensor.numel() for tensor in once] == [tensor.numel() for tensor in twice]
    result = model(*once)
    assert result.isfinite().all()
    assert not torch.allclose(result, model(*other))
    assert torch.equal(result, model(*once)), "the result differs between two calls, so it cannot be compared"


def add_engine(patch: pytest.MonkeyPatch, engine: BenchEngine) -> None:
    """Adds an engine to the command, or replaces the engine with its name."""
    for table, names in ((engines, choices), (all_engines, all_choices)):
        patch.setitem(table.ENGINES, engine.name, engine)
        patch.setattr(names, "ENGINES", tuple(dict.fromkeys((*names.ENGINES, engine.name))))


def add_suite(patch: pytest.MonkeyPatch) -> None:
    """Adds the suite "tiny" to the commands."""
    for table, names in ((suites, choices), (all_suites, all_choices)):
        patch.setitem(table.SUITES, "tiny", [TINY])
        patch.setattr(names, "SUITES", (*names.SUITES, "tiny"))


def add_model(patch: pytest.MonkeyPatch) -> None:
    """Adds the model "tiny" to the commands."""
    patch.setitem(suites.SUITES, "models", [*suites.SUITES["models"], TINY])
    patch.setattr(choices, "MODELS", (*choices.MODELS, "tiny"))


def measure_with(patch: pytest.MonkeyPatch, run: Callable[..., Any] | None) -> None:
    """Replaces the function that measures a suite for the command. None: it must not be called."""
    patch.setattr(session, "run", run)


def measured_implementations(patch: pytest.MonkeyPatch, found: list[Any]) -> None:
    """Replaces the measurements of `dynaxla tune` in this process."""
    patch.setattr(tuning, "measurements", lambda: found)
