"""Changes in place that functionalization has made copies of, and which torch's kernels make in place again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import functionalize
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from dynaxla import metrics
from dynaxla.engine.eager_executable import EagerGraph
from dynaxla.lowering.cpu.measurements import LARGE

SIDE = 300
assert SIDE * SIDE > LARGE
aten = torch.ops.aten


def kernels_of(module: GraphModule) -> EagerGraph:
    output: Any = module.graph.output_node().args[0]
    return EagerGraph(module, output if isinstance(output, (tuple, list)) else [output])


def writes(kernels: EagerGraph) -> list[str]:
    """The ops in place."""
    targets = [node.target for node in kernels._module.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    return [target._schema.name.removeprefix("aten::") for target in targets if target._schema.is_mutable]


def agrees(function: Callable[..., Any], kernels: EagerGraph) -> None:
    """Twice: nothing is left behind. So does the compiled function."""
    x = torch.randn(SIDE, SIDE)
    expected, before = function(x), x.clone()
    run = torch.compile(function, backend="dynaxla", fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(tuple(kernels.values([x])), tuple(expected) if isinstance(expected, tuple) else (expected,))
        torch.testing.assert_close(run(x), expected)
    assert torch.equal(x, before)


PLACES = torch.arange(0, SIDE, 7)


@pytest.mark.parametrize(
    ("function", "in_place"),
    [
        (lambda x: x.new_zeros(SIDE, SIDE).index_fill(0, PLACES, x[0, 0]), True),
        (lambda x: x.new_zeros(SIDE * SIDE).index_fill(0, PLACES, x.sum()).view(SIDE, SIDE).t(), True),
        (lambda x: torch.ones_like(x).index_add(1, PLACES, x[:, PLACES]), True),
        (lambda x: ((zeros := x.new_zeros(SIDE, SIDE)), zeros.index_fill(0, PLACES, 1.0)), False),  # who asked for zeros gets them
        (lambda x: ((zeros := x.new_zeros(SIDE, SIDE)).index_fill(0, PLACES, 1.0), zeros.t().cumsum(0)), False),
        (lambda x: x.index_fill(0, PLACES, 1.0), False),
        (lambda x: x.new_zeros(SIDE, 1).expand(SIDE, SIDE).index_fill(0, PLACES, 1.0), False),  # several numbers in one place
        (lambda x: torch.full((SIDE, SIDE), 2).add(x), False),  # of another dtype
    ],
)
def test_what_changes_new_tensors_writes_to_them(function: Callable[..., Any], in_place: bool) -> None:
    x = torch.randn(SIDE, SIDE)
    kernels = kernels_of(make_fx(function)(x))
    assert bool(writes(kernels)) is in_place
    agrees(function, kernels)


def part(change: Callable[[torch.Tensor, torch.Tensor], Any], base: Callable[..., torch.Tensor] = torch.zeros_like) -> Callable[..., Any]:
    """What changes a new tensor, which base makes of x. It gives that, or the tuple that change gives."""

    def function(x: torch.Tensor) -> Any:
        whole = base(x)
        found = change(whole, x)
        return found if isinstance(found, tuple) else whole

    return function


@pytest.mark.parametrize(
    ("function", "in_place"),
    [
        (part(lambda whole, x: whole[:, :9].copy_(x[:, :9])), ["copy_"]),
        (part(lambda whole, x: whole[7].copy_(x[3])), ["copy_"]),
        (part(lambda whole, x: whole[7].copy_(x[3, 0])), ["copy_"]),  # one number for all of a row
        (part(lambda whole, x: whole[::2].mul_(3), torch.clone), ["mul_"]),
        (part(lambda whole, x: whole[::2].add_(x[::2], alpha=2), torch.clone), ["add_"]),
        (part(lambda whole, x: whole[:, :9].copy_(x[:, :9].double())), ["copy_"]),  # rounded on the way
        (part(lambda whole, x: (whole[-1].copy_(x[0]), whole.sum(0))[1:]), ["copy_"]),
        # Somebody sees the whole as it was, the part alone, or what lies behind both.
        (part(lambda whole, x: (whole.sum(0), whole[:9].copy_(x[:9]), whole)[::2]), []),
        (part(lambda whole, x: (whole[:9].sum(0), whole[:9].mul_(3).sum(1), whole)), []),
        (part(lambda whole, x: whole[:9].mul_(whole[20]), torch.clone), []),
        # An input, and what a kernel may give back as it is.
        (lambda x: aten.slice_scatter(x, aten.mul(aten.slice(x, 0, 0, 9), 3), 0, 0, 9), []),
        (part(lambda whole, x: whole[:9].mul_(3), lambda x: x.repeat(1, 1)), []),
        # Put back elsewhere.
        (lambda x: aten.slice_scatter(zeros := x.new_zeros(SIDE, SIDE), aten.copy(aten.slice(zeros, 0, 0, 9), x[:9]), 0, 1, 10), []),
        (lambda x: aten.select_scatter(zeros := x.new_zeros(SIDE, SIDE), aten.copy(aten.select(zeros, 1, 0), x[0]), 0, 0), []),
    ],
)
def test_what_changes_a_part_writes_to_it(function: Callable[..., Any], in_place: list[str]) -> None:
    kernels = kernels_of(make_fx(functionalize(function, remove="mutations"))(torch.randn(SIDE, SIDE)))
    assert writes(kernels) == in_place
    agrees(function, kernels)


@pytest.mark.parametrize("length", [512, 513])
@pytest.mark.parametrize("name", ["rfft", "irfft", "rfft2", "irfft2", "hfft", "ihfft"])
def test_gradients_of_transforms(name: str, length: int) -> None:
    is_of_complex = name in ("irfft", "irfft2", "hfft")
    x = torch.randn(512, length // 2 + 1, dtype=torch.complex64) if is_of_complex else torch.randn(512, length)
    x.requires_grad_()

    def function(x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = getattr(torch.fft, name)(x, length, dim=1) if name == "hfft" else getattr(torch.fft, name)(x)
        return made

    torch._dynamo.reset()
    run = torch.compile(function, backend="dynaxla", fullgraph=True)
    grad = torch.randn_like(function(x))
    (expected,) = torch.autograd.grad(function(x), x, grad)
    metrics.reset()
    for _ in range(2):
        (found,) = torch.autograd.grad(run(x), x, grad)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)  # sums of up to 512 x 512 numbers
        assert found.stride() == expected.stride()
    if name in ("rfft", "irfft") and length == 512:
        assert metrics.snapshot().get("calls", 0) == 0, "torch runs both passes"
