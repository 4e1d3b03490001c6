"""Tests that results have eager mode's strides, also if torch's fake implementation or decomposition of an op has other strides."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dynaxla.capture import eager_strides
from support import internals
from support.comparisons.compare import check, strides
from support.comparisons.gradients import check_gradients

F = torch.nn.functional


def channels_last(*shape: int) -> torch.Tensor:
    return torch.randn(shape).contiguous(memory_format=torch.channels_last if len(shape) == 4 else torch.channels_last_3d)


def transposed(*shape: int) -> torch.Tensor:
    return torch.randn(shape[::-1]).t()


X = channels_last(2, 3, 4, 5)
RESULTS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "roll": (lambda x: x.roll((1, 2), (0, 2)), (X,)),
    "copysign": (torch.copysign, (X, torch.randn(()))),
    "floor_divide": (torch.floor_divide, (X, torch.rand(5) + 1)),
    "div": (lambda x, y: torch.div(x, y, rounding_mode="trunc"), (X, torch.rand(5) + 1)),
    "xlogy": (torch.xlogy, (X, torch.rand(5) + 1)),
    "logsigmoid": (F.logsigmoid, (X,)),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 1), (X,)),
    "reflection padding": (lambda x: F.pad(x, [1] * 6, mode="reflect"), (channels_last(2, 3, 4, 5, 6),)),
    "addr": (lambda x, y, z: torch.addr(x, y, z, beta=0), (transposed(4, 3), torch.randn(4), torch.randn(3))),
    "several results": (lambda x: torch.ops.aten.log_sigmoid_forward(x), (transposed(4, 3),)),
}  # fmt: skip


@pytest.mark.sample(usual=4)
@pytest.mark.usefixtures("quick_xla")
@pytest.mark.parametrize("name", RESULTS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_strides_of_results(name: str, dynamic: bool) -> None:
    function, args = RESULTS[name]
    check(function, *args, dynamic=dynamic)


@pytest.mark.usefixtures("quick_xla")
@pytest.mark.parametrize("function", [F.logsigmoid, lambda x: F.pad(x, [1] * 4, mode="reflect"), F.glu], ids=["logsigmoid", "pad", "glu"])
def test_strides_of_gradients(function: Callable[..., Any]) -> None:
    check_gradients(function, channels_last(2, 4, 6, 6))


@pytest.mark.usefixtures("quick_xla")
@pytest.mark.parametrize("dynamic", [False, True])
def test_as_strided_reads_memory_in_eager_modes_order(dynamic: bool) -> None:
    """With the strides of the fake tensor, the values would differ."""
    check(lambda x: torch.as_strided(x.roll(-1, 0), (5, 10), (4, 1), 0), X, dynamic=dynamic)
    check(lambda x: torch.as_strided(torch.floor_divide(x, torch.ones(5) * 0.1), (6, 10), (1, 6)), X, dynamic=dynamic)


@pytest.mark.usefixtures("quick_xla")
@pytest.mark.parametrize("pool", [F.adaptive_avg_pool2d, F.adaptive_max_pool2d])
def test_strides_of_dimensions_of_one_element(pool: Callable[..., Any]) -> None:
    compiled = torch.compile(lambda x: pool(x, 1), backend="dynaxla", fullgraph=True)
    assert compiled(X).stride() == pool(X, 1).stride() == (3, 1, 3, 3)


@pytest.mark.parametrize("name", RESULTS)
def test_strides_of_large_operands_come_from_smaller_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of large operands would take time and memory, so kernels run with fewer elements."""
    function, args = RESULTS[name]
    sizes: list[int] = []
    internals.all_operands_are_large(monkeypatch, sizes)
    check(function, *args)
    assert sizes
    assert all(sizes)


def test_strides_of_the_fake_implementation_are_kept_if_the_kernel_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel may choose another algorithm for small operands; this must not change the strides for large ones."""
    x, weight = channels_last(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    internals.all_operands_are_large(monkeypatch)
    check(lambda x, weight: F.conv2d(x, weight, stride=2), x, weight, tolerance=(1e-4, 1e-4))


def test_random_generator_is_not_advanced_by_the_trace() -> None:
    x = transposed(4, 3).abs()
    compiled = torch.compile(torch.poisson, backend="dynaxla", fullgraph=True)
    torch.manual_seed(0)
    first = compiled(x)  # traced in this call
    torch.manual_seed(0)
    assert torch.equal(compiled(x), first)
    assert strides(first) == strides(torch.poisson(x))


def test_shortened_sizes_and_strides() -> None:
    shortened = eager_strides._shortened
    assert shortened(((9, 9), (9, 1)), 4) == ((4, 4), (4, 1))
    assert shortened(((9, 9), (1, 9)), 4) == ((4, 4), (1, 4))
    assert shortened(((9, 9), (18, 2)), 4) == ((4, 4), (8, 2))
    assert shortened(((9, 9), (0, 1)), 4) == ((4, 4), (0, 1))
    assert shortened(((9, 1, 9), (9, 1, 1)), 4) == ((4, 1, 4), (4, 1, 1))
    assert shortened(((9, 9), (1, 1)), 4) is None, "windows that overlap"


def test_strides_are_found_if_warnings_are_errors() -> None:
    """torch gives this warning once in a process, and these tests make warnings errors."""
    x = transposed(4, 3)
    args = (x, 0, torch.tensor([0, 1, 2, 3]), x, "mean")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = eager_strides._run_trial(torch.ops.aten.index_reduce.default, args, {}, None, False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert expected == [((4, 3), torch.ops.aten.index_reduce.default(*args).stride())]
