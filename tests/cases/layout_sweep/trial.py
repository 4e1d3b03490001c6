"""Runs cases of the sweep through a backend of torch.compile, and compares with eager mode."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils import _pytree as pytree

import dynaxla.backend
from dynaxla.capture.graph import AtenGraph
from support.comparisons.compare import assert_equal
from support.comparisons.gradients import differentiable
from support.timing import quick_compilation

from .cases import REFUSALS, LayoutCase, apply

Samples = list[tuple[Any, ...]]


class _StridesOnlyEngine:
    """An engine whose runners compute a graph with torch's kernels, and give the results the strides that the graph promises."""

    @staticmethod
    def runner(graph: AtenGraph) -> Any:
        (outputs,) = graph.module.graph.output_node().args
        promised = [node.meta.get("val") if isinstance(node, torch.fx.Node) else None for node in outputs]

        def run(args: list[Any]) -> list[Any]:
            inputs = list(args)
            args.clear()
            with torch.no_grad():
                results = graph.module(*inputs)
            return [_with_promised_strides(result, value) for result, value in zip(results, promised, strict=True)]

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


def _with_promised_strides(result: Any, promised: Any) -> Any:
    if not isinstance(result, torch.Tensor) or result.stride() == promised.stride() or result.is_conj() or result.is_neg():
        return result
    return torch.empty_strided(result.shape, promised.stride(), dtype=result.dtype).copy_(result)


@contextlib.contextmanager
def promised_strides() -> Iterator[None]:
    """In this context, nothing is compiled: torch's kernels compute the values. The strides of results are those of the backend."""
    with mock.patch.object(dynaxla.backend, "engine_for", return_value=_StridesOnlyEngine()):
        yield


@contextlib.contextmanager
def quickly_compiled() -> Iterator[None]:
    """In this context, XLA compiles in a sixth of the time, to less optimized code."""
    with pytest.MonkeyPatch.context() as patch:
        quick_compilation.apply(patch)
        yield


def differences(cases: Sequence[LayoutCase], backend: str = "dynaxla") -> dict[str, str]:
    """Returns the differences from eager mode by case. Compiles the cases together, then the cases that differ or fail alone."""
    found: dict[str, str] = {}
    _divide([(case, samples) for case in cases if (samples := _drawn(case))], backend, found)
    return found


def depends_on_layouts(case: LayoutCase) -> bool:
    """True if eager mode returns other values for contiguous copies of the operands.

    In that case, eager mode's kernel reads every operand as if it were contiguous.
    """
    samples = _drawn(case)
    results = []
    for contiguous in (False, True):
        leaves = [case.leaves(sample) for sample in samples]
        operands = pytree.tree_map_only(torch.Tensor, torch.Tensor.contiguous, leaves) if contiguous else leaves
        torch.manual_seed(0)
        outputs = [apply(case.row, sample) for sample in operands]
        gradients: list[Any] = []
        if case.has_gradients:
            torch.autograd.backward(differentiable(outputs), [torch.randn_like(out) for out in differentiable(outputs)])
            gradients = _gradients([leaves])
        results.append(
            [pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().contiguous(), values) for values in (outputs, gradients)]
        )
    try:
        assert_equal(*results, tolerance=case.row.tolerance.get(case.dtype))
    except AssertionError:
        return True
    return False


def _drawn(case: LayoutCase) -> Samples:
    """Draws the same operands for every backend, because some results are not defined: the index of a median of equal elements."""
    torch.manual_seed(0)
    return case.samples()


def _divide(group: list[tuple[LayoutCase, Samples]], backend: str, found: dict[str, str]) -> None:
    if not group or not (difference := _compare(group, backend)):
        return
    if len(group) == 1:
        found[str(group[0][0])] = difference
        return
    for part in (group[: len(group) // 2], group[len(group) // 2 :]):
        _divide(part, backend, found)


def _compare(group: list[tuple[LayoutCase, Samples]], backend: str) -> str:
    """Returns the first difference from eager mode, or "" if there is none."""
    torch._dynamo.reset()

    def function(samples: list[Samples]) -> list[Any]:
        return [[apply(case.row, sample) for sample in case_samples] for (case, _), case_samples in zip(group, samples, strict=True)]

    compiled = torch.compile(function, backend=backend, dynamic=False)
    try:
        with torch.no_grad():
            actual, expected = (run(_leaves(group)) for run in (compiled, function))
        if error := _difference(group, actual, expected, "result"):
            return error
        if not any(case.has_gradients for case, _ in group):
            return ""
        mine, theirs = _leaves(group), _leaves(group)
        actual, expected = compiled(mine), function(theirs)
        if error := _difference(group, actual, expected, "result with gradients"):
            return error
        torch.manual_seed(0)
        cotangents = [torch.randn_like(out) for out in differentiable(expected)]
        for results in (actual, expected):
            torch.autograd.backward(differentiable(results), cotangents)
        return _difference(group, _gradients(mine), _gradients(theirs), "gradient")
    except REFUSALS as error:
        return f"{type(error).__name__}: {str(error)[:300]}"


def _leaves(group: list[tuple[LayoutCase, Samples]]) -> list[Samples]:
    return [[case.leaves(sample) for sample in samples] for case, samples in group]


def _gradients(samples: list[Samples]) -> list[Any]:
    return [[value.grad for value in pytree.tree_leaves(case_samples) if isinstance(value, torch.Tensor)] for case_samples in samples]


def _assert_exact_strides(actual: Any, expected: Any) -> None:
    """Compares all strides, including those of dimensions of size one."""
    for mine, theirs in zip(pytree.tree_leaves(actual), pytree.tree_leaves(expected), strict=True):
        if isinstance(theirs, torch.Tensor) and theirs.numel():
            assert mine.stride() == theirs.stride(), f"strides {mine.stride()}, eager gives {theirs.stride()}"


def _difference(group: list[tuple[LayoutCase, Samples]], actual: list[Any], expected: list[Any], what: str) -> str:
    for (case, _), mine, theirs in zip(group, actual, expected, strict=True):
        try:
            assert_equal(mine, theirs, tolerance=case.row.tolerance.get(case.dtype), values=case.has_values)
            _assert_exact_strides(mine, theirs)
        except AssertionError as error:
            return f"{what}: {str(error)[:300]}"
    return ""
