"""Compares compiled functions with eager mode: values, dtypes, shapes, strides, aliases, mutations."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

# Relative and absolute tolerance by dtype; integers and bools are exact.
TOLERANCE: dict[torch.dtype, tuple[float, float]] = {
    torch.float16: (2e-3, 1e-3),
    torch.bfloat16: (1.6e-2, 1e-2),
    torch.float32: (2e-5, 2e-5),
    torch.float64: (1e-10, 1e-10),
    torch.complex64: (2e-5, 2e-5),
    torch.complex128: (1e-10, 1e-10),
}


def assert_equal(actual: Any, expected: Any, *, tolerance: tuple[float, float] | None = None, values: bool = True) -> None:
    """Compares structures, and of tensors dtype, device, shape, strides, requires_grad, conjugate and negative bits, and values.

    NaN equals NaN.
    """
    flat_actual, spec_actual = pytree.tree_flatten(actual)
    flat_expected, spec_expected = pytree.tree_flatten(expected)
    assert spec_actual == spec_expected, f"structure {spec_actual}, eager gives {spec_expected}"
    for index, (mine, theirs) in enumerate(zip(flat_actual, flat_expected, strict=True)):
        if not isinstance(theirs, torch.Tensor):
            assert type(mine) is type(theirs), f"output {index}: {mine!r}, eager gives {theirs!r}"
            assert mine == theirs, f"output {index}: {mine!r}, eager gives {theirs!r}"
            continue
        for name in ("dtype", "device", "shape", "requires_grad", "layout"):
            assert getattr(mine, name) == getattr(theirs, name), (
                f"output {index}: {name} {getattr(mine, name)}, eager gives {getattr(theirs, name)}"
            )
        assert strides(mine) == strides(theirs), f"output {index}: strides {mine.stride()}, eager gives {theirs.stride()}"
        assert mine.is_conj() == theirs.is_conj(), f"output {index}: conjugate bit"
        assert mine.is_neg() == theirs.is_neg(), f"output {index}: negative bit"
        if values:
            rtol, atol = tolerance or TOLERANCE.get(theirs.dtype, (0.0, 0.0))
            torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=rtol, atol=atol, equal_nan=True)


def strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the strides of the dimensions with more than one element."""
    return tuple(step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1) if tensor.numel() else ()


def aliases(inputs: Sequence[Any], outputs: Any) -> list[tuple[int, int]]:
    """Returns the pairs of tensors that share a storage, as indices: first the inputs, then the outputs."""
    tensors = [leaf for leaf in pytree.tree_leaves((list(inputs), outputs)) if isinstance(leaf, torch.Tensor)]
    keys = [tensor.untyped_storage().data_ptr() if tensor.numel() else -index - 1 for index, tensor in enumerate(tensors)]
    return [(i, j) for i in range(len(keys)) for j in range(i + 1, len(keys)) if keys[i] == keys[j]]


def check(
    function: Callable[..., Any],
    *args: Any,
    backend: str = "dynaxla",
    calls: int = 2,
    tolerance: tuple[float, float] | None = None,
    dynamic: bool | None = None,
    values: bool = True,
    fallback: str = "error",
) -> None:
    """Compiles a function with fullgraph=True, calls it with copies of its arguments, and compares all effects with eager mode.

    Args:
        function: the function.
        args: its arguments.
        backend: the backend of torch.compile.
        calls: the number of calls.
        tolerance: the relative and absolute tolerance; by default that of the dtype.
        dynamic: see torch.compile.
        values: False to compare all but values.
        fallback: the option `fallback`. With "error", ops without a lowering are errors.
    """
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic, options={"fallback": fallback})
    for _ in range(calls):
        mine, theirs = copy.deepcopy(args), copy.deepcopy(args)
        expected = function(*theirs)
        actual = compiled(*mine)
        assert_equal(actual, expected, tolerance=tolerance, values=values)
        assert_equal(list(mine), list(theirs), tolerance=tolerance, values=values)
        assert aliases(mine, actual) == aliases(theirs, expected), "aliasing differs from eager mode"
