"""Tests of engine/records.py and engine/stored.py: a graph that an earlier process has lowered is not traced again."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from dynaxla.capture.graph import AtenGraph
from dynaxla.config import Options
from dynaxla.engine import stored
from dynaxla.engine.xla import CompiledGraph, Xla
from dynaxla.lowering.implementations import IMPLEMENTATIONS, Implementation
from dynaxla.observe import coverage, dump, metrics
from support import internals

x = torch.randn(4, 4)


@pytest.fixture
def options(tmp_path: Path) -> Iterator[Options]:
    metrics.reset()
    yield Options(cache=str(tmp_path))
    metrics.reset()


def program(function: Callable[..., Any], *inputs: torch.Tensor, options: Options, phase: Any = "inference") -> CompiledGraph:
    """Returns the runner of a graph as in another process that has captured the same graph."""
    stored._live_programs.clear()
    return program_in_this_process(function, *inputs, options=options, phase=phase)


def program_in_this_process(
    function: Callable[..., Any], *inputs: torch.Tensor, options: Options, phase: Any = "inference"
) -> CompiledGraph:
    metrics.reset()
    runner = Xla(options).runner(AtenGraph("graph", make_fx(function, tracing_mode="fake")(*inputs), (), phase))
    assert isinstance(runner, CompiledGraph)
    return runner


def recalled() -> tuple[int, int]:
    """Returns the numbers of programs that were built from records, and from traces."""
    counters = metrics.snapshot()
    return counters.get("recalls", 0), counters.get("trace", 0)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: [x.sin() @ x, x.t(), None, 3],
        lambda x: [torch.nn.functional.conv2d(x.reshape(1, 1, 4, 4), x[:3, :3].reshape(1, 1, 3, 3)).relu(), x.sum(0)],
        lambda x: [torch.rand_like(x) + x],
    ],
    ids=["stored", "onednn", "random"],
)
@pytest.mark.parametrize("phase", ["inference", "forward"])
def test_second_program_equals_the_first(function: Callable[..., Any], phase: str, options: Options) -> None:
    """Results, strides, optimized code and op counts are equal."""
    results, texts, counts = [], [], []
    for expected in ((0, 1), (1, 0)):
        runner = program(function, x, options=options, phase=phase)
        coverage.reset()
        torch.manual_seed(1)
        results.append(runner([x]))
        counts.append(coverage.snapshot())
        assert recalled() == expected
        (executable,) = runner.executables()
        assert executable.program is not None
        texts.append(dump.readable(executable.program.text()))
    torch.testing.assert_close(*results, rtol=0, atol=0)
    first_strides, second_strides = ([item.stride() if isinstance(item, torch.Tensor) else item for item in items] for items in results)
    assert first_strides == second_strides
    assert texts[0] == texts[1]
    assert counts[0] == counts[1] != {}


@pytest.mark.parametrize("function", [lambda x: [x.sin() @ x], lambda x: [x @ x + torch.ones(4, 1000).sum()]], ids=["small", "folded"])
def test_equal_graphs_share_a_program(function: Callable[..., Any], options: Options) -> None:
    """The program lives as long as one of the graphs."""
    runners = [program_in_this_process(function, x, options=options) for _ in range(3)]
    for index, runner in enumerate(runners):
        metrics.reset()
        torch.testing.assert_close(runner([x]), function(x))
        assert recalled() == ((0, 1) if index == 0 else (1, 0))
        assert metrics.snapshot().get("loads", 0) == 0
    programs = {id(executable.program) for runner in runners for executable in runner.executables()}
    assert len(programs) == 1
    assert len(stored._live_programs) == 1
    del runners, runner
    gc.collect()
    assert len(stored._live_programs) == 0


def test_checks_of_stored_programs_raise_the_same(options: Options) -> None:
    messages = []
    for expected in ((0, 1), (1, 0)):
        runner = program(lambda x, index: [x[index] + 1], x, torch.tensor([1]), options=options)
        with pytest.raises(IndexError) as raised:
            runner([x, torch.tensor([4])])
        messages.append(str(raised.value))
        assert recalled() == expected
        torch.testing.assert_close(runner([x, torch.tensor([-1])])[0], x[[-1]] + 1)
    assert messages[0] == messages[1]


def lapack_call(x: torch.Tensor) -> list[Any]:
    return list(torch.linalg.qr(x))


@pytest.mark.parametrize("function", [lapack_call, lambda x: [x.sinh()]], ids=["LAPACK", "kernel"])
def test_programs_with_calls_of_kernels_are_traced(function: Callable[..., Any], options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    internals.without_lowering(monkeypatch, torch.ops.aten.sinh.default)
    for _ in range(2):
        torch.testing.assert_close(program(function, x, options=options)([x]), function(x))
        assert recalled() == (0, 1)
        assert bool(metrics.snapshot().get("kernels")) == (function is not lapack_call)


def test_lost_or_damaged_files_are_written_again(options: Options, tmp_path: Path) -> None:
    def run() -> tuple[int, int]:
        torch.testing.assert_close(program(lambda x: [x.cos() * 2], x, options=options)([x])[0], x.cos() * 2)
        return recalled()

    assert run() == (0, 1)
    (stored_program,) = (tmp_path / "programs").iterdir()
    stored_program.unlink()
    assert run() == (0, 1)
    assert run() == (1, 0)
    for file in (stored_program, *(tmp_path / "records").iterdir()):
        file.write_bytes(file.read_bytes()[:-1])
        assert run() == (0, 1)
        assert run() == (1, 0)


def key(
    options: Options, function: Callable[..., Any] = torch.sin, input_tensor: torch.Tensor = x, phase: Any = "inference", **changes: Any
) -> str | None:
    runner = program(lambda x: [function(x)], x, options=dataclasses.replace(options, **changes), phase=phase)
    specialised = runner.unit.specialise([input_tensor])
    assert specialised.function is not None
    return stored.graph_key(runner.unit, specialised, specialised.function)


def test_key_depends_on_the_search_for_blocks(options: Options) -> None:
    """With and without blocks, a graph can become different numbers of programs."""
    names = []
    for blocks in (True, False):
        module = make_fx(lambda x: [x.sin()], tracing_mode="fake")(x)
        runner = Xla(options, blocks=blocks).runner(AtenGraph("graph", module))
        specialised = runner.unit.specialise([x])
        assert specialised.function is not None
        names.append(stored.graph_key(runner.unit, specialised, specialised.function))
    assert None not in names
    assert names[0] != names[1]


def test_key_depends_on_the_default_dtype(options: Options) -> None:
    """Lowerings read the default dtype, and the graph's text does not have it."""
    graph, before = key(options), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert key(options, input_tensor=x.float()) not in (graph, None)
    finally:
        torch.set_default_dtype(before)


def test_key_depends_on_graph_and_options(options: Options) -> None:
    """Includes strides of inputs, which in a backward graph may differ from those at capture."""
    plain = key(options)
    assert plain == key(options, executables=2) is not None
    keys = [
        plain,
        key(options, torch.cos),
        key(options, implementations={"contraction": "xla"}),
        key(options, fallback="error"),
        key(options, xla={"a": 1}),
        key(options, phase="backward"),
        key(options, input_tensor=x.t(), phase="backward"),
        key(options, phase="forward"),
    ]
    assert None not in keys
    assert len(set(keys)) == len(keys)
    assert key(options, dump="somewhere") is None
    assert key(options, tune=True) is None
    assert key(options, cache="") is None


@pytest.mark.parametrize(
    "change",
    [
        internals.other("versions"),
        internals.other("sources"),
        internals.other("processor"),
        internals.other("kernels"),
        lambda: patch.dict("os.environ", {"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"}),
        lambda: jax.default_matmul_precision("bfloat16"),
        lambda: jax.numpy_rank_promotion("raise"),
    ],
    ids=["version", "source", "processor", "kernels", "flags", "precision", "promotion"],
)
def test_key_depends_on_the_environment(change: Callable[[], contextlib.AbstractContextManager[Any]], options: Options) -> None:
    plain = key(options)
    with change():
        assert key(options) not in (plain, None)
    assert key(options) == plain


def test_key_depends_on_threads_and_users_lowerings(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, threads = key(options), torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert key(options) not in (plain, None)
    finally:
        torch.set_num_threads(threads)
    with monkeypatch.context() as patched:
        internals.lowerings_of_users(patched)
        assert key(options) is None
    registered = IMPLEMENTATIONS["contraction"].by_name
    implementation = Implementation("mine", lambda: None, (), lambda problem: True, lambda problem: False)
    internals.implementations_of(monkeypatch, IMPLEMENTATIONS["contraction"], {**registered, "mine": implementation})
    assert key(options) is None, "the user has registered an implementation"
    last = list(registered.values())[-1]
    in_front = {"mine": dataclasses.replace(last, registered_by="theirs"), **registered}
    internals.implementations_of(monkeypatch, IMPLEMENTATIONS["contraction"], in_front)
    assert key(options) not in (plain, None), "the user prefers another implementation of dynaxla"
