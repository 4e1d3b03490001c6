"""Tests of passes/pipeline.py: the list of passes is complete and in order, and each pass reports the graph's size before and after."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dynaxla
from dynaxla.observe import events
from dynaxla.passes import pipeline
from dynaxla.passes.pipeline import PASSES, Pass, sizes
from support import internals

pytestmark = pytest.mark.quick
ROOT = Path(dynaxla.__file__).parent


def test_each_pass_has_a_name_and_an_invariant() -> None:
    assert len({each.name for each in PASSES}) == len(PASSES)
    assert all({*each.level.split(", ")} <= {"dynamo", "joint", "aten", "jaxpr"} for each in PASSES)
    assert all(each.invariant.endswith(".") for each in PASSES)
    listed = {value for value in vars(pipeline).values() if isinstance(value, Pass)}
    assert listed == {*PASSES}


def test_rewrites_are_called_through_the_list() -> None:
    """No other module of the library imports the function of a pass."""
    functions = {each.function.__name__: each.function.__module__ for each in PASSES if each.function.__module__.startswith("dynaxla")}
    for path in ROOT.rglob("*.py"):
        if path.name == "pipeline.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    module = functions.get(alias.name, "").rpartition(".")[2]
                    assert not module or not (node.module or "").endswith(module), (
                        f"{path.name} imports {alias.name} instead of a pass of passes/pipeline.py"
                    )


def rewritten(function: Callable[..., Any], *inputs: torch.Tensor, **options: Any) -> list[events.GraphRewritten]:
    rewrites: list[events.GraphRewritten] = []
    with events.listening(lambda event: rewrites.append(event) if isinstance(event, events.GraphRewritten) else None):
        result = torch.compile(function, backend="dynaxla", dynamic=options.pop("dynamic", False), options=options)(*inputs)
        if isinstance(result, torch.Tensor) and result.requires_grad:
            result.sum().backward()
    torch._dynamo.reset()
    return rewrites


def test_passes_run_in_the_order_of_the_list() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.5))
    cache, row = torch.zeros(64, 1024), torch.ones(1, 1024)

    def write(cache: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        cache[3:4] = row
        return cache.sum()

    runs = [
        rewritten(model, torch.randn(2, 2, 5, 5), exact_rng=True),
        rewritten(write, cache, row),
        rewritten(lambda x: x.softmax(1).sum(1), torch.randn(3, 5), sizes="buckets", dynamic=True),
    ]
    with torch.no_grad():
        runs.append(rewritten(model.eval().requires_grad_(False), torch.randn(2, 2, 5, 5), freeze=True))
    order = [each.name for each in PASSES]
    for run in runs:
        run_names = [event.name for event in run]
        names = list(dict.fromkeys(run_names))
        assert names == sorted(names, key=order.index), names
    ran = {event.name for run in runs for event in run}
    assert {"nested_regions", "min_cut", "late_writes", "freeze", "random_hoisting", "split", "padding", "transposes"} <= ran
    (late,) = [event for event in runs[1] if event.name == "late_writes"]
    assert len(late.after) == 2, "a graph for the program and a graph of the writes"
    (padding,) = [event for event in runs[2] if event.name == "padding"]
    assert padding.after[0] > padding.before, "operands are masked"


def test_sizes() -> None:
    graph = torch.fx.symbolic_trace(lambda x: x + 1)
    assert sizes(graph) == sizes(graph.graph) == [3]
    assert sizes((graph, None, "text", [graph])) == [3, 3]
    assert sizes(lambda: None) == []


def test_sizes_are_not_computed_without_listeners(monkeypatch: pytest.MonkeyPatch) -> None:
    internals.no_sizes_of_passes(monkeypatch)
    graph = torch.fx.symbolic_trace(lambda x: x + 1)
    pipeline.NESTED_REGIONS(graph)
