"""A graph in parts is, from outside, what it is as one program; equal blocks are compiled once."""

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
from dynaxla.engine import blocks
from dynaxla.engine.scheduler import engine_for
from dynaxla.observe import metrics
from support import internals
from support.timing import quick_compilation


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks are parts, too. XLA compiles in less time; values are compared with its own of the whole graph."""
    quick_compilation.apply(monkeypatch, {"xla_backend_optimization_level": 0})
    internals.repeated_blocks_of(monkeypatch, 1)


def compiled(model: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    metrics.reset()
    return torch.compile(model, backend="dynaxla", **options)


def in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    internals.no_compilation_of_blocks(monkeypatch)


def compilations() -> int:
    return metrics.snapshot().get("compile", 0)


class Block(nn.Module):
    """Draws, looks up (with a check), and has a weight that lies transposed."""

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


def test_as_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers, random ones too, strides and aliases are those of one program; of three blocks one is compiled."""
    model = Model().requires_grad_(False)

    def run() -> tuple[torch.Tensor, ...]:
        function = compiled(model)
        torch.manual_seed(3)
        function(X, TOKENS)
        return tuple(function(X, TOKENS))

    parts, count = run(), compilations()
    in_one(monkeypatch)
    whole = run()
    assert (count, compilations()) == (3, 1), "what comes before the blocks, a block, and the rest"
    for value, expected in zip(parts, whole, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)
        assert value.stride() == expected.stride()
    assert parts[3] is X
    assert not torch.equal(parts[0], model.eval()(X, TOKENS)[0]), "something is drawn"


def test_training_is_one_program_each_way() -> None:
    module = make_fx(lambda x: [x + 1], tracing_mode="fake")(torch.ones(2))

    def cuts(phase: Phase, **given: Any) -> bool:
        runner: Any = engine_for(Options(), **given).runner(AtenGraph("graph", module, phase=phase))
        return bool(runner.unit.has_blocks)

    assert cuts("inference")
    assert not any(map(cuts, ("forward", "backward")))
    assert not cuts("inference", collectives=False), "a step"


def test_each_block_draws_its_own_numbers() -> None:
    def function(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = []
        for weight in weights:
            x = x @ weight
            found.append(torch.rand(4) + x * 0)
        return tuple(found)

    with torch.no_grad():
        drawn = compiled(function)(torch.zeros(4), *[torch.randn(4, 4) for _ in range(4)])
    assert compilations() == 1
    assert len({tuple(numbers.tolist()) for numbers in drawn}) == 4


@pytest.mark.parametrize("failing", [0, 2, 3])
def test_the_first_check_that_fails(failing: int) -> None:
    """Which block's index is out of range, the caller does not see; that one is, it does, and nothing is written."""

    def function(x: torch.Tensor, state: torch.Tensor, places: list[torch.Tensor], weights: list[torch.Tensor]) -> torch.Tensor:
        for place, weight in zip(places, weights, strict=True):
            x = x + (x @ weight)[place]
        state.add_(x.sum())
        return x

    places = [torch.tensor([0, 3, 1, 2]) for _ in range(4)]
    x, state, weights = torch.randn(4, 4), torch.zeros(1), [torch.randn(4, 4) for _ in range(4)]
    with torch.no_grad():
        run = compiled(function)
        run(x, state, places, weights)
        assert compilations() == 2
        before = state.clone()
        places[failing][1] = 4
        with pytest.raises(IndexError, match="out of"):
            run(x, state, places, weights)
        assert torch.equal(state, before)
        places[failing][1] = 0
        torch.testing.assert_close(run(x, state, places, weights), function(x, torch.zeros(1), places, weights))


def test_checks_of_several_kinds_tell_which_failed() -> None:
    """The code of a later part counts on from that of an earlier one."""

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


def test_sizes_that_change() -> None:
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


def test_what_is_read_for_the_last_time_is_let_go() -> None:
    """A part gets what its turn takes; an array that no later part reads is dropped, but results and arguments are kept."""
    held: list[list[Any]] = []

    def part(arrays: Any) -> list[Any]:
        held.append(list(arrays))
        return [sum(arrays), -1]

    turns = [
        blocks._SegmentCall(part, lambda values: (values[0], values[1]), []),
        blocks._SegmentCall(part, lambda values: (values[2], values[1]), [2]),
        blocks._SegmentCall(part, lambda values: (values[4], values[2] is None), [4]),
    ]
    assert blocks._call_in_order([10], turns, [6, 3])([1]) == [22, -1]
    assert held == [[1, 10], [11, 10], [21, True]]


def test_a_region_that_is_compiled_once() -> None:
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


def test_a_region_that_writes_to_a_cache() -> None:
    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("cache", torch.zeros(64, 8))

        @torch.compiler.nested_compile_region
        def forward(self, x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
            self.cache.index_copy_(0, place, x[:1])
            return x + self.linear(x + self.cache.sum(0)).relu()

    model = nn.Sequential(*[Region() for _ in range(4)])
    eager = copy.deepcopy(model)
    for block in (*model, *eager):
        block.forward = functools.partial(block.forward, place=torch.tensor([3]))
    with torch.no_grad():
        torch.testing.assert_close(compiled(model)(X), eager(X), rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(model.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert compilations() == 1


def kept(model: Callable[..., Any], cache: Path) -> Callable[..., Any]:
    return compiled(model, options={"cache": str(cache)})


def test_parts_that_an_earlier_process_has_compiled(tmp_path: Path) -> None:
    """Numbers, random ones and checks of each block are what they were; nothing is traced."""
    model = Model(4).requires_grad_(False)
    found, messages = [], []
    for expected in ((0, 3), (3, 0)):
        function = kept(model, tmp_path)
        torch.manual_seed(3)
        found.append([value for _ in range(2) for value in function(X, TOKENS)])
        counts = metrics.snapshot()
        assert (counts.get("recalls", 0), counts.get("lower", 0)) == expected
        with pytest.raises(IndexError) as raised:
            function(X, TOKENS + 1)
        messages.append(str(raised.value))
    for value, other in zip(*found, strict=True):
        torch.testing.assert_close(value, other, rtol=0, atol=0)
        assert value.stride() == other.stride()
    assert messages[0] == messages[1]


def test_which_check_of_parts_of_an_earlier_process_failed(tmp_path: Path) -> None:
    def function(x: torch.Tensor, weights: list[torch.Tensor], places: list[torch.Tensor], last: torch.Tensor) -> torch.Tensor:
        for weight, place in zip(weights, places, strict=True):
            x = x.index_select(0, place) @ weight
        return x.gather(0, last)

    weights, places, last = [torch.eye(4)] * 4, [torch.arange(4) for _ in range(4)], torch.zeros(1, 4, dtype=torch.int64)
    found = []
    with torch.no_grad():
        for _ in range(2):
            run = kept(function, tmp_path)
            torch.testing.assert_close(run(torch.eye(4), weights, places, last), torch.eye(4)[:1])
            told = []
            for index in (*places, last):
                index[-1, ...] = 7
                with pytest.raises((IndexError, RuntimeError)) as raised:
                    run(torch.eye(4), weights, places, last)
                told.append((raised.type, str(raised.value)))
                index[-1, ...] = 0
            found.append(told)
    assert metrics.snapshot()["recalls"] == 2
    assert found[0] == found[1]
    assert len(set(found[0])) == 2, "an index of a block, and the last one"


class Scaled(nn.Module):
    """What a block does, and in which order a part takes and gives what it hands on."""

    def __init__(self, scale: float = 2.0, transposed: bool = False, gives_all: bool = False, table: float = 1.0) -> None:
        super().__init__()
        self.scale, self.transposed, self.gives_all, self.table = scale, transposed, gives_all, table

    def forward(self, x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = []
        for weight in weights:
            x = (x @ weight).sin() * self.scale + torch.tensor([1.0, 2.0, 3.0, self.table])
            x = x.t().contiguous().t() if self.transposed else x
            values.append(x)
        return tuple(values) if self.gives_all else (x,)


def test_no_part_is_taken_for_another(tmp_path: Path) -> None:
    """All in one directory: each gives what it would give alone."""
    weights = [torch.randn(4, 4) for _ in range(4)]
    others = [weight.t().contiguous().t() for weight in weights]
    variants = [Scaled(), Scaled(scale=3.0), Scaled(transposed=True), Scaled(gives_all=True), Scaled(table=7.0)]
    with torch.no_grad():
        for model, given in [*((model, weights) for model in variants), (variants[0], others), (variants[0], [*weights, *weights])]:
            for value, expected in zip(kept(model, tmp_path)(torch.ones(4, 4), *given), model(torch.ones(4, 4), *given), strict=True):
                torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-4)
                assert value.stride() == expected.stride()
        assert metrics.snapshot()["recalls"] == 1, "of twice as many blocks of the first kind"


def test_parts_that_call_kernels_are_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    internals.without_lowering(monkeypatch, torch.ops.aten.sinh.default)

    def function(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = (x @ weight).sinh()
        return x

    weights = [torch.eye(4) for _ in range(3)]
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(kept(function, tmp_path)(torch.eye(4) / 4, *weights), function(torch.eye(4) / 4, *weights))
            assert metrics.snapshot().get("recalls", 0) == 0
