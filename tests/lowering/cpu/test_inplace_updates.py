"""Updates that functionalization has turned into copies, and that torch's kernels make in place again."""

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


def inplace_ops(kernels: EagerGraph) -> list[str]:
    """The names of the ops that write to an operand."""
    targets = [node.target for node in kernels._module.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    return [target._schema.name.removeprefix("aten::") for target in targets if target._schema.is_mutable]


def check_results(function: Callable[..., Any], kernels: EagerGraph) -> None:
    """Compares the kernels' and the compiled function's results with eager mode's, twice: a call leaves no state behind."""
    x = torch.randn(SIDE, SIDE)
    expected, before = function(x), x.clone()
    run = torch.compile(function, backend="dynaxla", fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(tuple(kernels.values([x])), tuple(expected) if isinstance(expected, tuple) else (expected,))
        torch.testing.assert_close(run(x), expected)
    assert torch.equal(x, before)


INDICES = torch.arange(0, SIDE, 7)


@pytest.mark.parametrize(
    ("function", "in_place"),
    [
        (lambda x: x.new_zeros(SIDE, SIDE).index_fill(0, INDICES, x[0, 0]), True),
        (lambda x: x.new_zeros(SIDE * SIDE).index_fill(0, INDICES, x.sum()).view(SIDE, SIDE).t(), True),
        (lambda x: torch.ones_like(x).index_add(1, INDICES, x[:, INDICES]), True),
        (lambda x: ((zeros := x.new_zeros(SIDE, SIDE)), zeros.index_fill(0, INDICES, 1.0)), False),  # the zeros are returned
        (lambda x: ((zeros := x.new_zeros(SIDE, SIDE)).index_fill(0, INDICES, 1.0), zeros.t().cumsum(0)), False),
        (lambda x: x.index_fill(0, INDICES, 1.0), False),
        (lambda x: x.new_zeros(SIDE, 1).expand(SIDE, SIDE).index_fill(0, INDICES, 1.0), False),  # elements share memory
        (lambda x: torch.full((SIDE, SIDE), 2).add(x), False),  # of another dtype
    ],
)
def test_updates_of_new_tensors(function: Callable[..., Any], in_place: bool) -> None:
    x = torch.randn(SIDE, SIDE)
    kernels = kernels_of(make_fx(function)(x))
    assert bool(inplace_ops(kernels)) is in_place
    check_results(function, kernels)


def update_of_new_tensor(
    update: Callable[[torch.Tensor, torch.Tensor], Any], base: Callable[..., torch.Tensor] = torch.zeros_like
) -> Callable[..., Any]:
    """Returns a function of x that updates a new tensor. The function returns the tensor, or a tuple that the update returns.

    Args:
        update: Called with the new tensor and x.
        base: Makes the new tensor from x.
    """

    def function(x: torch.Tensor) -> Any:
        whole = base(x)
        result = update(whole, x)
        return result if isinstance(result, tuple) else whole

    return function


@pytest.mark.parametrize(
    ("function", "in_place"),
    [
        (update_of_new_tensor(lambda whole, x: whole[:, :9].copy_(x[:, :9])), ["copy_"]),
        (update_of_new_tensor(lambda whole, x: whole[7].copy_(x[3])), ["copy_"]),
        (update_of_new_tensor(lambda whole, x: whole[7].copy_(x[3, 0])), ["copy_"]),  # one number for a whole row
        (update_of_new_tensor(lambda whole, x: whole[::2].mul_(3), torch.clone), ["mul_"]),
        (update_of_new_tensor(lambda whole, x: whole[::2].add_(x[::2], alpha=2), torch.clone), ["add_"]),
        (update_of_new_tensor(lambda whole, x: whole[:, :9].copy_(x[:, :9].double())), ["copy_"]),  # converted to x's dtype
        (update_of_new_tensor(lambda whole, x: (whole[-1].copy_(x[0]), whole.sum(0))[1:]), ["copy_"]),
        # Another node reads the tensor before the update, reads the slice alone, or the update itself reads another slice.
        (update_of_new_tensor(lambda whole, x: (whole.sum(0), whole[:9].copy_(x[:9]), whole)[::2]), []),
        (update_of_new_tensor(lambda whole, x: (whole[:9].sum(0), whole[:9].mul_(3).sum(1), whole)), []),
        (update_of_new_tensor(lambda whole, x: whole[:9].mul_(whole[20]), torch.clone), []),
        # The tensor is an input, or the result of a kernel that may return its operand.
        (lambda x: aten.slice_scatter(x, aten.mul(aten.slice(x, 0, 0, 9), 3), 0, 0, 9), []),
        (update_of_new_tensor(lambda whole, x: whole[:9].mul_(3), lambda x: x.repeat(1, 1)), []),
        # The slice is written to another place.
        (lambda x: aten.slice_scatter(zeros := x.new_zeros(SIDE, SIDE), aten.copy(aten.slice(zeros, 0, 0, 9), x[:9]), 0, 1, 10), []),
        (lambda x: aten.select_scatter(zeros := x.new_zeros(SIDE, SIDE), aten.copy(aten.select(zeros, 1, 0), x[0]), 0, 0), []),
    ],
)
def test_updates_of_slices(function: Callable[..., Any], in_place: list[str]) -> None:
    kernels = kernels_of(make_fx(functionalize(function, remove="mutations"))(torch.randn(SIDE, SIDE)))
    assert inplace_ops(kernels) == in_place
    check_results(function, kernels)


@pytest.mark.parametrize("length", [512, 513])
@pytest.mark.parametrize("name", ["rfft", "irfft", "rfft2", "irfft2", "hfft", "ihfft"])
def test_gradients_of_transforms(name: str, length: int) -> None:
    is_of_complex = name in ("irfft", "irfft2", "hfft")
    x = torch.randn(512, length // 2 + 1, dtype=torch.complex64) if is_of_complex else torch.randn(512, length)
    x.requires_grad_()

    def function(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = getattr(torch.fft, name)(x, length, dim=1) if name == "hfft" else getattr(torch.fft, name)(x)
        return result

    torch._dynamo.reset()
    run = torch.compile(function, backend="dynaxla", fullgraph=True)
    grad = torch.randn_like(function(x))
    (expected,) = torch.autograd.grad(function(x), x, grad)
    metrics.reset()
    for _ in range(2):
        (gradient,) = torch.autograd.grad(run(x), x, grad)
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-3)  # sums of up to 512 x 512 numbers
        assert gradient.stride() == expected.stride()
    if name in ("rfft", "irfft") and length == 512:
        assert metrics.snapshot().get("calls", 0) == 0, "torch runs both passes"
