"""Tests of the table of engines and the choice of engines."""

from __future__ import annotations

import pytest
import torch
from benchmarks.engines import ENGINES
from torch import nn
from torch._dynamo.utils import counters

from dynaxla.bench import engines
from dynaxla.bench.benchmark_error import BenchmarkError
from dynaxla.bench.engines import BenchEngine
from support.fakes import tiny_benchmark


def test_unusable_engine_is_left_out_unless_named(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_benchmark.add_engine(monkeypatch, BenchEngine("inductor", lambda model, _: model, lambda: "no compiler"))
    chosen, notes = engines.choose([], engines.QUICK_ENGINES)
    assert [engine.name for engine in chosen] == ["eager", "dynaxla", "dynaxla_retrace"]
    assert notes == ["inductor left out: no compiler"]
    with pytest.raises(BenchmarkError, match="no compiler"):
        engines.choose(["inductor"], [])


def test_jax_engine_gives_eager_results() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.BatchNorm1d(3), nn.Linear(4, 2)).eval().requires_grad_(False)
    x = torch.tensor([[0, 4, 2]])
    torch.testing.assert_close(ENGINES["jax"].prepare(model, (x,))(x), model(x))


def test_frozen_inductor_sets_freezing_only_while_it_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """TorchDynamo does not reuse the compiled code of plain Inductor."""
    freezing = []

    def compile_nothing(module: torch.fx.GraphModule, inputs: object, **_: object) -> object:
        freezing.append(torch._inductor.config.freezing)
        return module.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_nothing)
    model, x = nn.Linear(2, 3).eval().requires_grad_(False), torch.randn(4, 2)
    for name in ("inductor", "inductor_frozen"):
        torch.testing.assert_close(ENGINES[name].prepare(model, (x,))(x), model(x))
    assert freezing == [False, True]
    assert not torch._inductor.config.freezing


@pytest.mark.slow
def test_frozen_inductor_freezes() -> None:
    """TorchDynamo does not reuse the compiled code of plain Inductor, and the setting is restored."""
    model = nn.Conv2d(3, 8, 3).eval().requires_grad_(False)  # needs only a oneDNN kernel, no C++ compiler
    x = torch.randn(1, 3, 8, 8)
    packed = {}
    with torch.no_grad():
        for name in ("inductor", "inductor_frozen"):
            counters.clear()
            torch.testing.assert_close(ENGINES[name].prepare(model, (x,))(x), model(x))
            packed[name] = counters["inductor"]["mkldnn_conv_weight_pack_matcher_count"]
    assert packed == {"inductor": 0, "inductor_frozen": 1}
    assert not torch._inductor.config.freezing
