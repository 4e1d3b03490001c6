"""Tests of passes/aten/python_counters.py: numbers on which only numbers depend are split off; numbers on which a tensor depends stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from dynaxla.observe import metrics
from dynaxla.passes.aten.python_counters import Counters, split_counters

aten = torch.ops.aten


def traced(function: Callable[..., Any], *inputs: Any) -> GraphModule:
    return make_fx(function, tracing_mode="symbolic")(*inputs)


def run(counters: Counters, *args: Any) -> list[Any]:
    """Runs both parts of a graph. Returns the outputs of the whole graph."""
    rest = iter(counters.rest(*[args[index] for index in counters.rest_inputs]))
    counted = iter(counters.counter_graph(*[args[index] for index in counters.counter_inputs]))
    count = len(counters.rest_outputs) + len(counters.counter_graph.graph.output_node().args[0])
    return [next(rest) if index in counters.rest_outputs else next(counted) for index in range(count)]


def test_counters_are_split_off() -> None:
    def function(x: torch.Tensor, n: int, size: int) -> tuple[Any, ...]:
        return n + 1, x.reshape(size, -1) * 2, (n + 1) * size, x + size, n

    module = traced(function, torch.randn(6, 2), 5, 3)
    counters = split_counters(module)
    assert counters is not None
    assert (counters.rest_inputs, counters.rest_outputs, counters.counter_inputs) == ([0, 2], [1, 3], [1, 2])
    assert not any(node.target in (aten.mul.Tensor, aten.add.Tensor) for node in counters.counter_graph.graph.nodes)
    x = torch.randn(6, 2)
    for n in (5, 8):
        torch.testing.assert_close(run(counters, x, n, 4), list(function(x, n, 4)))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, n: (x * n, n + 1),
        lambda x, n: (x + (2 * n + 1), n),
        lambda x, n: (x[:, :n], n + 1),
        lambda x, n: (x.sum() * torch.ones(n), n + 1),
        lambda x, n: (x.sum() + torch.full((2,), n * 2.5), n + 1),
    ],
)
def test_numbers_that_tensors_depend_on_stay(function: Callable[..., Any]) -> None:
    assert split_counters(traced(function, torch.randn(6, 9), 5)) is None


def test_size_of_tensor_is_not_a_counter() -> None:
    # TorchDynamo has one symbol for the size and the number.
    module = traced(lambda x, n: (x * 2, n + 1), torch.randn(7), 5)
    x, n = module.graph.find_nodes(op="placeholder")[:2]
    assert split_counters(module) is not None
    n.meta["val"] = x.meta["val"].shape[0]
    assert split_counters(module) is None


def test_counter_needs_no_compilation() -> None:
    class Counter:
        total = 0

    @torch.compile(backend="dynaxla")
    def step(x: torch.Tensor, counter: Any) -> torch.Tensor:
        counter.total += x.shape[0]
        return x * 2

    counter = Counter()
    for _ in range(3):
        step(torch.ones(4, requires_grad=True), counter)
    before = metrics.snapshot()["compile"]
    for times in range(4, 9):
        x = torch.ones(4, requires_grad=True)
        step(x, counter).sum().backward()
        assert counter.total == 4 * times
        assert torch.equal(x.grad, torch.full((4,), 2.0))
        before = before + 1 if times == 4 else before  # the backward program
    assert metrics.snapshot()["compile"] == before


def test_mutated_input_and_counter() -> None:
    class Cache:
        length = 0
        memory = torch.zeros(5)

    @torch.compile(backend="dynaxla", dynamic=True)
    def write(x: torch.Tensor, cache: Any) -> torch.Tensor:
        cache.length += 1
        cache.memory.add_(x)
        return cache.memory.sum()

    cache = Cache()
    assert [write(torch.ones(5), cache).item() for _ in range(3)] == [5, 10, 15]
    assert cache.length == 3
    assert torch.equal(cache.memory, torch.full((5,), 3.0))


def test_retrace_backend_supports_counters() -> None:
    compiled = torch.compile(lambda x, n: (x + 1, n + 1), backend="dynaxla_retrace", dynamic=True)
    assert [compiled(torch.zeros(2), n)[1] for n in (3, 9, 4)] == [4, 10, 5]
