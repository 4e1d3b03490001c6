"""Tests of engine/retrace.py, the baseline engine: it traces and lowers at every call, and compiles each program once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from dynaxla.capture.graph import AtenGraph
from dynaxla.config import Options
from dynaxla.engine.retrace import Retrace, RetracedProgram
from dynaxla.observe import metrics


def retraced(function: Callable[..., Any], *inputs: Any, **options: Any) -> RetracedProgram:
    graph = AtenGraph("again", make_fx(function, tracing_mode="symbolic")(*inputs))
    return Retrace(Options(**options)).runner(graph)


def counts() -> tuple[int, ...]:
    counters = metrics.snapshot()
    return tuple(counters.get(name, 0) for name in ("trace", "lower", "lookup", "compile"))


def test_each_call_is_traced_and_each_program_compiled_once() -> None:
    program = retraced(lambda x: [x.sin() * 2], torch.ones(4, 3))
    metrics.reset()
    for number, (size, compiled) in enumerate([(4, 1), (4, 1), (5, 2), (4, 2), (5, 2)], start=1):
        x = torch.randn(size, 3)
        (result,) = program([x])
        torch.testing.assert_close(result, x.sin() * 2)
        assert counts() == (number, number, number, compiled)
    assert len(program.executables()) == 2


def test_evicted_program_is_compiled_again() -> None:
    program = retraced(lambda x: [x + 1], torch.ones(4), executables=1)
    metrics.reset()
    for size in (2, 3, 2):
        assert torch.equal(program([torch.zeros(size)])[0], torch.ones(size))
    assert metrics.snapshot()["compile"] == 3


def test_graph_without_computation_is_not_traced() -> None:
    program = retraced(lambda x: [x.t(), x.shape[0]], torch.ones(4, 3))
    metrics.reset()
    x = torch.randn(5, 2)
    transposed, size = program([x])
    assert transposed.data_ptr() == x.data_ptr()
    assert (transposed.shape, size) == ((2, 5), 5)
    assert counts() == (0, 0, 0, 0)
