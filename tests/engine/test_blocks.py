"""Tests of engine/blocks.py: a graph compiled in parts behaves like one program, and equal blocks are compiled once."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from dynaxla.capture.graph import AtenGraph, Phase
from dynaxla.config import Options
from dynaxla.engine.scheduler import engine_for
from dynaxla.observe import metrics
from support import internals
from support.timing import quick_compilation


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allows small blocks. XLA compiles quickly: values are compared with the same compiler's values for the whole graph."""
    quick_compilation.apply(monkeypatch, {"xla_backend_optimization_level": 0})
    internals.repeated_blocks_of(monkeypatch, 1)


def compiled(model: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    metrics.reset()
    return torch.compile(model, backend="dynaxla", **options)


def disable_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    internals.no_compilation_of_blocks(monkeypatch)


def compilations() -> int:
    return metrics.snapshot().get("compile", 0)


class Block(nn.Module):
    """A block with dropout, an embedding (which checks indices), and a transposed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, 8))
        self.weight = nn.Parameter(torch.randn(8, 8).t())
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        x = x + torch.nn.functional.embedding(tokens, self.table)
        return self.drop((x @ self.weight).tanh()) + x


class Model(nn.Module):
    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = [x.exp()]
        for block in self.blocks:
            values.append(block(values[-1], tokens))
        return self.head(values[-1]), values[2].t(), values[3][:, :2], x


X, TOKENS = torch.randn(6, 8), torch.tensor([0, 1, 2, 3, 4, 0])


def test_parts_equal_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values, random numbers, strides and aliases equal those of one program. One of three equal blocks is compiled."""
    model = Model().requires_grad_(False)

    def run() -> tuple[torch.Tensor, ...]:
        function = compiled(model)
        torch.manual_seed(3)
        function(X, TOKENS)
        return tuple(function(X, TOKENS))

    results, count = run(), compilations()
    disable_blocks(monkeypatch)
    expected_results = run()
    assert (count, compilations()) == (3, 1), "the part before the blocks, one block, and the rest"
    for value, expected in zip(results, expected_results, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)
        assert value.stride() == expected.stride()
    assert results[3] is X
    assert not torch.equal(results[0], model.eval()(X, TOKENS)[0]), "dropout has an effect"


def test_training_graphs_have_no_blocks() -> None:
    module = make_fx(lambda x: [x + 1], tracing_mode="fake")(torch.ones(2))

    def has_blocks(phase: Phase, **settings: Any) -> bool:
        runner: Any = engine_for(Options(), **settings).runner(AtenGraph("graph", module, phase=phase))
        return bool(runner.unit.has_blocks)

    assert has_blocks("inference")
    assert not any(map(has_blocks, ("forward", "backward")))
    assert not has_blocks("inference", collectives=False), "a compiled step"


def test_each_block_draws_its_own_numbers() -> None:
    def function(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = []
        for weight in weights:
            x = x @ weight
            results.append(torch.rand(4) + x * 0)
        return tuple(results)

    with torch.no_grad():
        drawn = compiled(function)(torch.zeros(4), *[torch.randn(4, 4) for _ in range(4)])
    assert compilations() == 1
    assert len({tuple(numbers.tolist()) for numbers in drawn}) == 4


@pytest.mark.parametrize("failing", [0, 2, 3])
def test_failed_check_in_a_block(failing: int) -> None:
    """The error does not say which block's index is out of range. Nothing is written."""

    def function(x: torch.Tensor, state: torch.Tensor, indices: list[torch.Tensor], weights: list[torch.Tensor]) -> torch.Tensor:
        for index, weight in zip(indices, weights, strict=True):
            x = x + (x @ weight)[index]
        state.add_(x.sum())
        return x

    indices = [torch.tensor([0, 3, 1, 2]) for _ in range(4)]
    x, state, weights = torch.randn(4, 4), torch.zeros(1), [torch.randn(4, 4) for _ in range(4)]
    with torch.no_grad():
        run = compiled(function)
        run(x, state, indices, weights)
        assert compilations() == 2
        before = state.clone()
        indices[failing][1] = 4
        with pytest.raises(IndexError, match="out of"):
            run(x, state, indices, weights)
        assert torch.equal(state, before)
        indices[failing][1] = 0
        torch.testing.assert_close(run(x, state, indices, weights), function(x, torch.zeros(1), indices, weights))


def test_checks_of_several_kinds() -> None:
    """The codes of a later part's checks follow those of the earlier parts."""

    def function(x: torch.Tensor, weights: list[torch.Tensor], first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        x = torch.linalg.cholesky(x @ first)
        for weight in weights:
            x = (x @ weight).relu() + x
        return x[last]

    eye, weights = torch.eye(4), [torch.randn(4, 4) for _ in range(4)]
    with torch.no_grad():
        run = compiled(function)
        good, bad = torch.tensor([0, 3]), torch.tensor([0, 4])
        torch.testing.assert_close(run(eye, weights, eye, good), function(eye, weights, eye, good))
        assert compilations() == 3
        with pytest.raises(IndexError):
            run(eye, weights, eye, bad)
        with pytest.raises(torch.linalg.LinAlgError):
            run(eye, weights, -eye, bad)
        with pytest.raises(torch.linalg.LinAlgError):
            run(eye, weights, -eye, good)


def test_dynamic_sizes() -> None:
    def function(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = torch.cat([x @ weight, x.new_ones(1, 4) * x.shape[0]])[1:] / x.shape[0]
        return x

    weights = [torch.randn(4, 4) for _ in range(3)]
    with torch.no_grad():
        run = compiled(function, dynamic=True)
        for size in (5, 6, 5):
            x = torch.randn(size, 4)
            torch.testing.assert_close(run(x, *weights), function(x, *weights))
    assert compilations() == 2


def test_nested_region_is_compiled_once() -> None:
    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

        @torch.compiler.nested_compile_region
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.linear(self.norm(x)).relu()

    model = nn.Sequential(*[Region() for _ in range(4)])
    with torch.no_grad():
        torch.testing.assert_close(compiled(model)(X), model(X), rtol=1e-5, atol=1e-5)
    assert compilations() == 1


def test_nested_region_that_writes_to_a_cache() -> None:
    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("cache", torch.zeros(64, 8))

        @torch.compiler.nested_compile_region
        def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            self.cache.index_copy_(0, index, x[:1])
            return x + self.linear(x + self.cache.sum(0)).relu()

    model = nn.Sequential(*[Region() for _ in range(4)])
    eager = copy.deepcopy(model)
    for block in (*model, *eager):
        block.forward = functools.partial(block.forward, index=torch.tensor([3]))
    with torch.no_grad():
        torch.testing.assert_close(compiled(model)(X), eager(X), rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(model.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert compilations() == 1


def compiled_with_cache(model: Callable[..., Any], cache: Path) -> Callable[..., Any]:
    return compiled(model, options={"cache": str(cache)})


def test_cached_parts_equal_compiled_parts(tmp_path: Path) -> None:
    """Values, random numbers and the checks of each block are the same. Nothing is traced."""
    model = Model(4).requires_grad_(False)
    runs, messages = [], []
    for expected in ((0, 3), (3, 0)):
        function = compiled_with_cache(model, tmp_path)
        torch.manual_seed(3)
        runs.append([value for _ in range(2) for value in function(X, TOKENS)])
        counts = metrics.snapshot()
        assert (counts.get("recalls", 0), counts.get("lower", 0)) == expected
        with pytest.raises(IndexError) as raised:
            function(X, TOKENS + 1)
        messages.append(str(raised.value))
    for value, other in zip(*runs, strict=True):
        torch.testing.assert_close(value, other, rtol=0, atol=0)
        assert value.stride() == other.stride()
    assert messages[0] == messages[1]


def test_failed_checks_of_cached_parts(tmp_path: Path) -> None:
    def function(x: torch.Tensor, weights: list[torch.Tensor], indices: list[torch.Tensor], last: torch.Tensor) -> torch.Tensor:
        for weight, index in zip(weights, indices, strict=True):
            x = x.index_select(0, index) @ weight
        return x.gather(0, last)

    weights, indices, last = [torch.eye(4)] * 4, [torch.arange(4) for _ in range(4)], torch.zeros(1, 4, dtype=torch.int64)
    runs = []
    with torch.no_grad():
        for _ in range(2):
            run = compiled_with_cache(function, tmp_path)
            torch.testing.assert_close(run(torch.eye(4), weights, indices, last), torch.eye(4)[:1])
            errors = []
            for index in (*indices, last):
                index[-1, ...] = 7
                with pytest.raises((IndexError, RuntimeError)) as raised:
                    run(torch.eye(4), weights, indices, last)
                errors.append((raised.type, str(raised.value)))
                index[-1, ...] = 0
            runs.append(errors)
    assert metrics.snapshot()["recalls"] == 2
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 2, "one message for the blocks' indices, and one for the last index"


class Scaled(nn.Module):
    """A model whose settings change a block's ops, or the order of a part's inputs and outputs."""

    def __init__(self, scale: float = 2.0, transposed: bool = False, returns_all: bool = False, table: float = 1.0) -> None:
        super().__init__()
        self.scale, self.transposed, self.returns_all, self.table = scale, transposed, returns_all, table

    def forward(self, x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = []
        for weight in weights:
            x = (x @ weight).sin() * self.scale + torch.tensor([1.0, 2.0, 3.0, self.table])
            x = x.t().contiguous().t() if self.transposed else x
            values.append(x)
        return tuple(values) if self.returns_all else (x,)


def test_different_parts_are_not_confused_in_the_cache(tmp_path: Path) -> None:
    """All models share a cache directory, and each gives its own results."""
    weights = [torch.randn(4, 4) for _ in range(4)]
    others = [weight.t().contiguous().t() for weight in weights]
    variants = [Scaled(), Scaled(scale=3.0), Scaled(transposed=True), Scaled(returns_all=True), Scaled(table=7.0)]
    with torch.no_grad():
        for model, model_weights in [*((model, weights) for model in variants), (variants[0], others), (variants[0], [*weights, *weights])]:
            for value, expected in zip(
                compiled_with_cache(model, tmp_path)(torch.ones(4, 4), *model_weights), model(torch.ones(4, 4), *model_weights), strict=True
            ):
                torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-4)
                assert value.stride() == expected.stride()
        assert metrics.snapshot()["recalls"] == 1, "the last model has twice as many blocks of the first kind"


def test_parts_that_call_kernels_are_not_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    internals.without_lowering(monkeypatch, torch.ops.aten.sinh.default)

    def function(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = (x @ weight).sinh()
        return x

    weights = [torch.eye(4) for _ in range(3)]
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(
                compiled_with_cache(function, tmp_path)(torch.eye(4) / 4, *weights), function(torch.eye(4) / 4, *weights)
            )
            assert metrics.snapshot().get("recalls", 0) == 0
