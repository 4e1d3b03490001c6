"""Branches and loops inside a program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._higher_order_ops.associative_scan import associative_scan_op
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from dynaxla.capture.graph import AtenGraph
from dynaxla.config import Options
from dynaxla.engine.unit import CompilationUnit
from dynaxla.engine.xla import CompiledGraph
from dynaxla.errors import UnsupportedOp
from dynaxla.observe import coverage
from support.comparisons.compare import assert_equal, check
from support.comparisons.gradients import check_gradients
from support.releases import IS_OLDEST

aten = torch.ops.aten
POSITIVE, NEGATIVE = torch.rand(3, 4), -torch.rand(3, 4)


@torch.library.custom_op("dynaxla_test::numpy_sine", mutates_args=())
def numpy_sine(x: torch.Tensor) -> torch.Tensor:
    if bool((x > 100).any()):
        raise OverflowError("too large for numpy_sine")
    return torch.from_numpy(x.numpy().copy()).sin()


numpy_sine.register_fake(torch.empty_like)


def branch(x: torch.Tensor, y: torch.Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda x, y: (x.sin() + y, y * 2), lambda x, y: (x.cos() * y.sum(1, True), y + 1), (x, y))


@pytest.mark.parametrize("x", [POSITIVE, NEGATIVE], ids=["true", "false"])
def test_cond(x: torch.Tensor) -> None:
    check_gradients(branch, x, torch.randn(3, 4))

    def nested(x, y):
        def inner(x, y):
            return torch.cond(y.sum() > 0, lambda x, y: x - y, lambda x, y: x * y, (x, y))

        return torch.cond(x.max() > 0.5, inner, lambda x, y: x.exp(), (x, y)).sum(0)

    check(nested, x, torch.randn(3, 4))


def test_one_program_computes_both_branches() -> None:
    compiled = torch.compile(branch, backend="dynaxla", fullgraph=True, dynamic=True, options={"fallback": "error"})
    for x in (POSITIVE, NEGATIVE, NEGATIVE[:2], POSITIVE[:2]):
        assert_equal(compiled(x, x + 1), branch(x, x + 1))


def test_cond_over_modules_in_a_loop_of_layers() -> None:
    class Gate(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                branches = (layer, lambda x: x.relu() + 1)
                x = torch.cond(x.mean() > 0, *branches, (x,)) if torch.compiler.is_compiling() else branches[int(x.mean() <= 0)](x)
            return x

    net = Gate()
    compiled = torch.compile(net, backend="dynaxla", fullgraph=True, options={"fallback": "error"})
    for x in (POSITIVE, NEGATIVE):
        expected = torch.autograd.grad(net(x).sum(), list(net.parameters()), allow_unused=True, materialize_grads=True)
        assert_equal(torch.autograd.grad(compiled(x).sum(), list(net.parameters())), expected)


def test_while_loop() -> None:
    def function(x, limit):
        def more(count, x):
            return (x.norm() < limit) & (count < 50)

        return while_loop(more, lambda count, x: (count + 1, x * 1.5 + 1), (torch.zeros((), dtype=torch.int64), x))

    check(function, torch.randn(3), torch.tensor(100.0))
    check(function, torch.full((3,), 1e3), torch.tensor(100.0))


def scan_or_loop(function: Callable[..., Any], start: torch.Tensor, x: torch.Tensor, dim: int = 0, reverse: bool = False) -> Any:
    """torch's scan in a graph; a loop in eager mode, where torch's scan would compile."""
    if torch.compiler.is_compiling():
        return scan(function, start, x, dim=dim, reverse=reverse)
    carry, results = start, []
    for piece in reversed(x.unbind(dim)) if reverse else x.unbind(dim):
        carry, result = function(carry, piece)
        results.append(result)
    results = results[::-1] if reverse else results
    return carry, pytree.tree_map(lambda *pieces: torch.stack(pieces).movedim(0, dim), *results)


def test_scan() -> None:
    def function(x, w, start, column):
        def step(carry, x):
            carry = torch.tanh(carry @ w + x)
            return carry, (carry * 2, x.sum())

        def backwards(carry, x):
            return carry + x, carry * x

        results = [scan_or_loop(step, start, x), scan_or_loop(backwards, start, x, reverse=True)]
        # torch 2.11 stacks the results along dim 0.
        return results if IS_OLDEST else [*results, scan_or_loop(backwards, column, x, dim=1)]

    check_gradients(function, torch.randn(5, 2, 2), torch.randn(2, 2), torch.randn(2, 2), torch.randn(5, 2))


def test_map() -> None:
    def function(x, y):
        return torch_map(lambda row, y: (row.sin() * y, row.sum()), x, y)

    check_gradients(function, torch.randn(3, 4), torch.randn(4))


def test_associative_scan() -> None:
    """torch keeps the op only in graphs for GPUs, so the test builds the graph."""

    def combine(a, b, c, d):
        return a * c, b * c + d

    def function(x, y):
        return associative_scan_op(combine, (x, y), ())

    x, y = torch.rand(6, 3) + 0.5, torch.randn(6, 3)
    graph = make_fx(function, tracing_mode="fake")(x, y)
    graph.graph.output_node().args = (tuple(graph.graph.output_node().args[0]),)
    results = CompiledGraph(CompilationUnit(AtenGraph("scan", graph), Options(fallback="error")))([x, y])
    expected = [(x[0], y[0])]
    for row in range(1, 6):
        expected.append(combine(*expected[-1], x[row], y[row]))
    assert_equal(results, [torch.stack(rows) for rows in zip(*expected, strict=True)])


def test_nested_compile_region() -> None:
    @torch.compiler.nested_compile_region
    def layer(x, w):
        return torch.tanh(x @ w)

    check_gradients(lambda x, w: layer(x, w) + layer(x + 1, w), torch.randn(3, 4), torch.randn(4, 4))


def test_random_numbers_differ_between_iterations() -> None:
    def function(x):
        drawn = scan(lambda carry, x: (carry + 1, torch.rand_like(x)), x[0], x)[1]
        chosen = torch.cond(x.sum() > 0, lambda x: torch.rand_like(x), lambda x: torch.rand_like(x) + 5, (x,))
        return drawn, chosen, torch.rand_like(x)

    compiled = torch.compile(function, backend="dynaxla", fullgraph=True, options={"fallback": "error"})
    values = torch.cat([part.flatten() for x in (POSITIVE, NEGATIVE) for part in compiled(x)])
    assert len(values.unique()) == len(values)
    torch.manual_seed(3)
    first = compiled(POSITIVE)
    torch.manual_seed(3)
    assert_equal(compiled(POSITIVE), first)


def jagged(dense: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return aten._padded_dense_to_jagged_forward(dense, [offsets], 4)


def test_checks_in_branches_and_loops() -> None:
    dense, good, bad = torch.randn(2, 3), torch.tensor([1, 3]), torch.tensor([4, 0])

    def branches(x, lengths):
        return torch.cond(lengths[0] > 2, lambda x, n: jagged(x, n) + 1, lambda x, n: jagged(x * 2, n), (x, lengths))

    def guarded(x, lengths):
        return torch.cond(lengths[0] > 2, lambda x, n: x.flatten()[:4] * 3, lambda x, n: jagged(x, n), (x, lengths))

    def loop(x, lengths):
        return scan(lambda carry, n: (carry + 1, jagged(x, n)), x.sum(), torch.stack([lengths, lengths.flip(0)]))[1]

    def endless(x, lengths):
        def body(count, total):
            return count + 1, total + jagged(x, torch.stack([count, 4 - count]))

        return while_loop(lambda count, total: count >= 0, body, (lengths[0].clone(), x.flatten()[:4].clone()))[1]

    for function in (branches, loop):
        check(function, dense, good)
        with pytest.raises(RuntimeError, match="longer than the padded input"):
            torch.compile(function, backend="dynaxla", fullgraph=True)(dense, bad)
    check(guarded, dense, bad)
    with pytest.raises(RuntimeError, match="longer than the padded input"):
        torch.compile(endless, backend="dynaxla", fullgraph=True)(dense, good)


def test_kernels_inside_branches_and_loops() -> None:
    def function(x):
        chosen = torch.cond(x.sum() > 0, lambda x: numpy_sine(x) + 1, lambda x: x * 2, (x,))
        return chosen, scan(lambda carry, x: (carry + numpy_sine(x), carry * 2), x[0], x)

    coverage.reset()
    compiled = torch.compile(function, backend="dynaxla", fullgraph=True)
    for x in (POSITIVE, NEGATIVE):
        assert_equal(compiled(x), function(x))
    assert coverage.snapshot()["cond"] == {"lowered": 1, "fallback": 0}
    with pytest.raises(OverflowError, match="too large"):
        compiled(POSITIVE * 1000)
    with pytest.raises(UnsupportedOp, match="numpy_sine"):
        torch.compile(function, backend="dynaxla", fullgraph=True, options={"fallback": "error"})(POSITIVE)


def test_torch_runs_branches_with_sizes_that_depend_on_values() -> None:
    def function(x):
        return torch.cond(x.sum() > 0, lambda x: x[x > 0.5].sum(), lambda x: x.sum(), (x,)) * 2

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(function, backend="dynaxla", fullgraph=True)
        for x in (POSITIVE, NEGATIVE):
            assert_equal(compiled(x), function(x))
        with pytest.raises(UnsupportedOp, match="depends on the values"):
            torch.compile(function, backend="dynaxla", fullgraph=True, options={"fallback": "error"})(POSITIVE)
