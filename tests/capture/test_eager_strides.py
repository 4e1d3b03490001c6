"""Results lie in memory as eager mode's do, also where torch's fake implementation of an op, or its decomposition, lies otherwise."""

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
def test_results(name: str, dynamic: bool) -> None:
    function, args = RESULTS[name]
    check(function, *args, dynamic=dynamic)


@pytest.mark.usefixtures("quick_xla")
@pytest.mark.parametrize("function", [F.logsigmoid, lambda x: F.pad(x, [1] * 4, mode="reflect"), F.glu], ids=["logsigmoid", "pad", "glu"])
def test_gradients(function: Callable[..., Any]) -> None:
    check_gradients(function, channels_last(2, 4, 6, 6))


@pytest.mark.usefixtures("quick_xla")
@pytest.mark.parametrize("dynamic", [False, True])
def test_places_in_memory_that_an_op_reads(dynamic: bool) -> None:
    """They are those of eager mode's memory: with the fake tensor's strides the values would be others."""
    check(lambda x: torch.as_strided(x.roll(-1, 0), (5, 10), (4, 1), 0), X, dynamic=dynamic)
    check(lambda x: torch.as_strided(torch.floor_divide(x, torch.ones(5) * 0.1), (6, 10), (1, 6)), X, dynamic=dynamic)


@pytest.mark.usefixtures("quick_xla")
@pytest.mark.parametrize("pool", [F.adaptive_avg_pool2d, F.adaptive_max_pool2d])
def test_strides_of_dimensions_of_one_element(pool: Callable[..., Any]) -> None:
    compiled = torch.compile(lambda x: pool(x, 1), backend="dynaxla", fullgraph=True)
    assert compiled(X).stride() == pool(X, 1).stride() == (3, 1, 3, 3)


@pytest.mark.parametrize("name", RESULTS)
def test_kernels_are_asked_with_fewer_elements(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of large operands, of which a copy would take time and memory."""
    function, args = RESULTS[name]
    asked: list[int] = []
    internals.all_operands_are_large(monkeypatch, asked)
    check(function, *args)
    assert asked
    assert all(asked)


def test_the_fake_implementation_counts_where_the_kernel_does_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that takes another way for small operands is no reason to change what a large one gives."""
    x, weight = channels_last(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    internals.all_operands_are_large(monkeypatch)
    check(lambda x, weight: F.conv2d(x, weight, stride=2), x, weight, tolerance=(1e-4, 1e-4))


def test_generators_stay_as_they_are() -> None:
    x = transposed(4, 3).abs()
    compiled = torch.compile(torch.poisson, backend="dynaxla", fullgraph=True)
    torch.manual_seed(0)
    first = compiled(x)  # traced in this call
    torch.manual_seed(0)
    assert torch.equal(compiled(x), first)
    assert strides(first) == strides(torch.poisson(x))


def test_an_order_with_gaps_repetitions_and_short_dimensions() -> None:
    short = eager_strides._shortened
    assert short(((9, 9), (9, 1)), 4) == ((4, 4), (4, 1))
    assert short(((9, 9), (1, 9)), 4) == ((4, 4), (1, 4))
    assert short(((9, 9), (18, 2)), 4) == ((4, 4), (8, 2))
    assert short(((9, 9), (0, 1)), 4) == ((4, 4), (0, 1))
    assert short(((9, 1, 9), (9, 1, 1)), 4) == ((4, 1, 4), (4, 1, 1))
    assert short(((9, 9), (1, 1)), 4) is None, "windows that overlap"


def test_a_warning_that_is_an_error_hides_no_strides() -> None:
    """Here every warning is one; torch gives this one once in a process."""
    x = transposed(4, 3)
    args = (x, 0, torch.tensor([0, 1, 2, 3]), x, "mean")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = eager_strides._try_kernel(torch.ops.aten.index_reduce.default, args, {}, None, False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert expected == [((4, 3), torch.ops.aten.index_reduce.default(*args).stride())]
