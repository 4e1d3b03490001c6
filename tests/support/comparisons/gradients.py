"""Compares gradients of compiled functions with eager mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from support.comparisons.compare import assert_equal


def check_gradients(
    function: Callable[..., Any],
    *args: torch.Tensor,
    constants: Sequence[torch.Tensor] = (),
    tolerance: tuple[float, float] | None = None,
) -> None:
    """Compiles a function with fullgraph=True, and compares its results and gradients, for random cotangents, with eager mode.

    Args:
        function: the function.
        args: its arguments. Floating-point and complex ones get gradients.
        constants: further arguments without gradients, which the function may change.
        tolerance: the relative and absolute tolerance; by default that of the dtype.
    """
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="dynaxla", fullgraph=True, options={"fallback": "error"})
    theirs, their_constants = [leaf(arg) for arg in args], [constant.clone() for constant in constants]
    mine, my_constants = [leaf(arg) for arg in args], [constant.clone() for constant in constants]
    expected = function(*theirs, *their_constants)
    actual = compiled(*mine, *my_constants)
    assert_equal(actual, expected, tolerance=tolerance)
    assert_equal(my_constants, their_constants, tolerance=tolerance)
    cotangents = [torch.randn_like(out) for out in differentiable(expected)]
    torch.autograd.backward(differentiable(expected), cotangents)
    torch.autograd.backward(differentiable(actual), cotangents)
    assert_equal([arg.grad for arg in mine], [arg.grad for arg in theirs], tolerance=tolerance)


def leaf(arg: torch.Tensor) -> torch.Tensor:
    """Returns a new leaf with the argument's values and strides."""
    copied = arg.detach().clone(memory_format=torch.preserve_format)
    return copied.requires_grad_(copied.is_floating_point() or copied.is_complex())


def differentiable(results: Any) -> list[torch.Tensor]:
    return [out for out in pytree.tree_leaves(results) if isinstance(out, torch.Tensor) and out.requires_grad]
