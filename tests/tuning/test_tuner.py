"""Tests of measured implementations: all that support a problem are tried, the fastest is used and stored, and results are correct."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
import torch
from jax import Array
from torch import nn
from typer.testing import CliRunner

import dynaxla
from dynaxla import tuning
from dynaxla.cli import app
from dynaxla.lowering import registry
from dynaxla.lowering.implementations import IMPLEMENTATIONS, Implementations
from dynaxla.lowering.ops.matmul import CONTRACTION
from dynaxla.observe import metrics
from dynaxla.runtime.store import Store
from dynaxla.tuning import tuner
from support.forced_implementations import backend_with

registry.fill()  # fills IMPLEMENTATIONS


@pytest.fixture(autouse=True)
def without_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "_measurements", {})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, padding=1, groups=1)
        self.grouped = nn.Conv2d(8, 8, 3, groups=4)
        self.linear = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.grouped(self.convolution(x).relu())
        return torch.nn.functional.gelu(self.linear(x.mean((2, 3))))


def run(cache: Path, implementations: Mapping[str, str] | None = None, **options: Any) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    net, x = Net(), torch.randn(2, 3, 10, 12)
    with torch.no_grad():
        compiled = torch.compile(net, backend=backend_with(implementations or {}), options={"tune": True, "cache": str(cache), **options})
        torch.testing.assert_close(compiled(x), net(x), rtol=1e-4, atol=1e-4)


def test_measures_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path)
    measurements = tuning.measurements()
    assert {item.op for item in measurements} == {"convolution", "contraction"}
    assert len(measurements) == 3
    for item in measurements:
        assert set(item.seconds) <= set(IMPLEMENTATIONS[item.op].by_name)
        assert len(item.seconds) > 1
        assert all(value is not None and value > 0 for value in item.seconds.values())
        assert item.chosen in item.seconds
    measured = metrics.snapshot()["tune"]
    run(tmp_path)
    monkeypatch.setattr(tuner, "_measurements", {})
    run(tmp_path)
    assert metrics.snapshot()["tune"] == measured
    assert sorted(tuning.stored_measurements(Store(tmp_path / "tuning")), key=str) == sorted(measurements, key=str)


@pytest.mark.parametrize("package", [torch, jax, dynaxla], ids=lambda package: package.__name__)
def test_another_version_measures_again(package: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The times depend on all three packages: dynaxla has the implementations, which may call torch's kernels, and jax compiles them."""
    run(tmp_path)
    measured = metrics.snapshot()["tune"]
    monkeypatch.setattr(package, "__version__", "0.0.1")
    monkeypatch.setattr(tuner, "_measurements", {})
    run(tmp_path)
    assert metrics.snapshot()["tune"] == measured + 3


def test_forced_implementation_is_not_measured(tmp_path: Path) -> None:
    run(tmp_path, implementations={"convolution": "xla", "contraction": "xla"})
    assert tuning.measurements() == []


def test_fastest_implementation_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest one is not the expected one. An implementation that XLA refuses is excluded. The clock is simulated."""
    monkeypatch.setattr(CONTRACTION, "by_name", dict(CONTRACTION.by_name))
    now, compiled = [0.0], tuner.Tuner._compiled

    def compiled_with_cost(self: tuner.Tuner, implementation: Any, problem: Any, arrays: Any) -> Callable[[], object]:
        call = compiled(self, implementation, problem, arrays)

        def run() -> object:
            now[0] += {"quick": 0.001, "slow": 0.004}.get(implementation.name, 0.002)
            return call()

        return run

    monkeypatch.setattr(tuner, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(tuner.Tuner, "_compiled", compiled_with_cost)

    @CONTRACTION.implementation("quick", preferred=lambda _: False)
    def _quick(problem: Any, x: Array, y: Array) -> Array:
        return CONTRACTION.by_name["xla"].run(problem, x, y)

    @CONTRACTION.implementation("slow", preferred=lambda _: False)
    def _slow(problem: Any, x: Array, y: Array) -> Array:
        return CONTRACTION.by_name["xla"].run(problem, x, y)

    @CONTRACTION.implementation("refused", preferred=lambda _: False)
    def _refused(problem: Any, x: Array, y: Array) -> Array:
        result = CONTRACTION.by_name["xla"].run(problem, x, y)
        return jax.ffi.ffi_call("there is no such call", result)(result)

    run(tmp_path)
    (measurement,) = (item for item in tuning.measurements() if item.op == "contraction")
    assert measurement.seconds["refused"] is None
    assert {name: seconds for name, seconds in measurement.seconds.items() if name in ("quick", "slow", "xla")} == pytest.approx(
        {"quick": 0.001, "slow": 0.004, "xla": 0.002}
    )
    assert measurement.chosen == "quick" != measurement.expected


def test_unmeasurable_problem_keeps_the_expected_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The problem has no description of its operands."""
    monkeypatch.setattr("dynaxla.lowering.implementations.IMPLEMENTATIONS", {})
    implementations: Implementations[Any] = Implementations("test_unmeasured")
    for name, preferred in (("slow", False), ("preferred", True), ("any", True)):
        implementations.implementation(name, preferred=lambda _, preferred=preferred: preferred)(lambda problem: None)
    choice = tuner.Tuner(jax.devices("cpu")[0], {}, {}, None)
    assert choice.choose(implementations, SimpleNamespace(platform="cpu")).name == "preferred"
    assert tuning.measurements() == []


def test_expected_implementation_wins_a_draw() -> None:
    assert tuner._fastest({"a": 1.0, "b": 0.97, "c": None}, "a") == "a"
    assert tuner._fastest({"a": 1.0, "b": 0.9, "c": None}, "a") == "b"
    assert tuner._fastest({"a": None, "b": 0.9}, "a") == "b"


def test_unreadable_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path)
    measured = metrics.snapshot()["tune"]
    store = Store(tmp_path / "tuning")
    for key in store:
        store.put(key, b"{}")
    monkeypatch.setattr(tuner, "_measurements", {})
    run(tmp_path)
    assert metrics.snapshot()["tune"] == measured + 3


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAXLA_CACHE", str(tmp_path))
    run(tmp_path)
    shown = CliRunner().invoke(app, ["tune"])
    assert shown.exit_code == 0
    assert "3 problems" in shown.output
    assert "convolution" in shown.output
    assert "Nothing has been measured yet" in CliRunner().invoke(app, ["tune", "--clear"]).output
    refused = CliRunner().invoke(app, ["tune", "no such model"])
    assert refused.exit_code == 2
    assert "unknown model" in refused.output
