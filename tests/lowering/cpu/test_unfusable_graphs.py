"""Graphs that torch's kernels run, because XLA has nothing to fuse in them: the choice, and unchanged results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from dynaxla import metrics
from dynaxla.lowering.cpu.measurements import LARGE
from support.forced_implementations import backend_with

SIDE = 300
assert SIDE * SIDE > LARGE


def compiled(function: Callable[..., Any], implementations: Mapping[str, str] | None = None, **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    metrics.reset()
    return torch.compile(function, backend=backend_with(implementations or {}), options=options)


def counts() -> tuple[int, int]:
    """The number of program calls, and of graph calls that torch's kernels ran."""
    snapshot = metrics.snapshot()
    return snapshot.get("calls", 0), snapshot.get("by_torch", 0)


def ran_by_torch() -> bool:
    assert counts() in ((1, 0), (0, 1))
    return counts() == (0, 1)


@pytest.mark.sample(usual=6)
@pytest.mark.parametrize(
    ("function", "by_torch"),
    [
        (lambda x: x.sum(1), True),
        (lambda x: x.t().sum(0), True),  # a view costs nothing
        (lambda x: (x.roll(3), x.sum()), True),  # two independent ops
        (lambda x: x.chunk(2)[1] @ x, True),
        (lambda x: x.new_zeros(SIDE, SIDE).scatter(0, torch.zeros(1, SIDE, dtype=torch.int64), x), True),
        (lambda x: x.sort(0).values, True),
        (lambda x: torch.matrix_exp(x[:200, :200] / 200), True),  # a small op in front of a kernel
        (lambda x: F.glu(x), True),
        (lambda x: x[:, 5:].clone(), True),  # contiguous rows with gaps between them
        (lambda x: x.unfold(1, 9, 3).contiguous(), True),
        (lambda x: x[0].expand(SIDE, SIDE).contiguous(), True),
        (lambda x: x @ x @ x.t(), True),  # products are not fused with each other
        (lambda x: (x @ x[0], x[0].cos(), x[1].sum()), False),  # more small ops than large ones
        (lambda x: (x @ x[0], x[0].sum()), True),
        (lambda x: torch.addr(x, x[0], x[1], beta=0.5), True),
        (lambda x: x.view(-1, 20, 20) @ x.view(-1, 20, 20).mT, True),  # many small matrices
        (lambda x: x.view(-1, 6, 6) @ x.view(-1, 6, 6).mT, False),  # XLA computes it term by term
        (lambda x: F.max_pool2d(x[None], 2, return_indices=True), True),
        (lambda x: F.max_pool2d(x[None], 2), False),  # without indices XLA is faster
        (lambda x: (x @ x).relu(), False),  # XLA fuses the activation
        (lambda x: x.relu() @ x, False),
        (lambda x: x.unfold(0, 9, 3).contiguous(), False),  # rows of one element
        (lambda x: x[:, 5:].neg(), True),
        (lambda x: x[:, 1:] - x[:, :-1], True),
        (lambda x: x[:, 5:].sum(0), True),
        (lambda x: x[:, ::2].neg(), False),  # single elements with gaps between them
        (lambda x: x.view(-1, 60)[:, 5:].neg(), False),  # short rows
        (lambda x: x.as_strided((SIDE, 250), (1, 1)).neg(), False),  # overlapping rows
        (lambda x: torch.linalg.svdvals(x[:100, :100].clone()), False),  # without singular vectors
        (lambda x: torch.linalg.eigh(x[:100, :100].clone()).eigenvalues, False),  # without eigenvectors
        (lambda x: torch.linalg.cholesky_ex(x), False),  # OpenBLAS, which XLA calls, is as fast
        (lambda x: x.exp(), False),  # XLA is faster
        (lambda x: x.neg().abs(), False),  # there is something to fuse
        (lambda x: x[:10].sum(1), False),  # small
        (lambda x: torch.rand_like(x), False),  # torch and XLA draw different random numbers
        (lambda x: x.add_(1), False),  # writes to an input
    ],
)
def test_choice_for_float32(function: Callable[..., Any], by_torch: bool) -> None:
    x = torch.randn(SIDE, SIDE)
    expected, run = function(x.clone()), compiled(function)
    result = run(x.clone())
    if "rand_like" not in function.__code__.co_names:
        torch.testing.assert_close(result, expected)
    assert ran_by_torch() is by_torch


@pytest.mark.parametrize(
    ("function", "by_torch"),
    [(torch.linalg.svd, True), (lambda x: x[:, 5:].norm(), False)],  # torch's norm is slow for rows with gaps
)
def test_choice_for_float64(function: Callable[..., Any], by_torch: bool) -> None:
    """In float32, singular vectors depend on the matrix's address, and such a norm on the order of its sum."""
    x = torch.randn(SIDE, SIDE, dtype=torch.float64)
    run = compiled(function)
    torch.testing.assert_close(run(x), function(x))
    assert ran_by_torch() is by_torch


@pytest.mark.parametrize(("function", "by_torch"), [(torch.exp, True), (torch.tanh, False)])
def test_choice_for_bfloat16(function: Callable[..., Any], by_torch: bool) -> None:
    x = torch.randn(SIDE, SIDE, dtype=torch.bfloat16)
    run = compiled(function)
    torch.testing.assert_close(run(x), function(x))
    assert ran_by_torch() is by_torch


def test_encoder_layer_in_one_op_is_run_by_xla() -> None:
    """PyTorch's fast path for an encoder layer is a single op, which has large weights here."""
    layer = torch.nn.TransformerEncoderLayer(64, 2, 2 * LARGE // 64, batch_first=True).eval()
    x = torch.randn(2, 5, 64)
    with torch.no_grad():
        expected, run = layer(x), compiled(layer)
        torch.testing.assert_close(run(x), expected, rtol=1e-4, atol=1e-5)
    assert not ran_by_torch()


def test_option_implementations_overrides_the_choice() -> None:
    x = torch.randn(SIDE, SIDE)
    for implementations, by_torch in (({"graph": "xla"}, False), ({"graph": "torch"}, True)):
        run = compiled(torch.exp, implementations=implementations)
        torch.testing.assert_close(run(x), x.exp())
        assert ran_by_torch() is by_torch


def test_xla_runs_the_graph_without_fallback() -> None:
    run = compiled(lambda x: x.sum(1), fallback="error")
    run(torch.randn(SIDE, SIDE))
    assert not ran_by_torch()


def test_strides_and_memory_match_eager_mode() -> None:
    x = torch.randn(SIDE, SIDE).t()

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rolled = x.roll(1)
        return rolled, rolled[1:], x, x[2:], x.sum(0)

    expected, result = function(x), compiled(function)(x)
    assert ran_by_torch()
    torch.testing.assert_close(result, expected)
    assert [tensor.stride() for tensor in result] == [tensor.stride() for tensor in expected]
    assert result[0].untyped_storage().data_ptr() == result[1].untyped_storage().data_ptr()
    assert result[2] is x
    assert result[3].data_ptr() == x[2:].data_ptr()
    result[0].zero_()
    assert x.abs().sum() > 0


def test_result_does_not_alias_an_operand() -> None:
    """Some of torch's kernels return their operand if they have nothing to do."""
    x = torch.randn(SIDE, SIDE)
    result = compiled(lambda x: x.repeat(1, 1))(x)
    result.zero_()
    assert x.abs().sum() > 0


def test_gradients_do_not_depend_on_the_engine() -> None:
    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, (SIDE,), weight)

    gradients = []
    for run in (function, compiled(function), compiled(function, implementations={"graph": "xla"})):
        x = torch.linspace(-2, 2, SIDE * SIDE, dtype=torch.float64).view(SIDE, SIDE).requires_grad_()
        weight = torch.ones(SIDE, dtype=torch.float64, requires_grad=True)
        run(x, weight).pow(3).sum().backward()
        gradients.append((x.grad, weight.grad))
    for result in gradients[1:]:
        torch.testing.assert_close(result, gradients[0])


def test_choice_depends_on_each_calls_sizes() -> None:
    run = compiled(lambda x: x.sum(1))
    small, large = torch.randn(8, 8), torch.randn(SIDE, SIDE + 1)
    torch._dynamo.mark_dynamic(small, 0)
    torch._dynamo.mark_dynamic(small, 1)
    torch.testing.assert_close(run(small), small.sum(1))
    assert counts() == (1, 0)
    torch.testing.assert_close(run(large), large.sum(1))
    assert counts() == (1, 1)
    torch.testing.assert_close(run(small), small.sum(1))
    assert counts() == (2, 1)


def test_error_of_a_kernel_is_raised() -> None:
    index = torch.full((1, SIDE), SIDE)
    run = compiled(lambda x, index: x.gather(0, index))
    with pytest.raises(RuntimeError, match="out of bounds"):
        run(torch.randn(SIDE, SIDE), index)


INDICES = torch.arange(0, SIDE, 7)


def test_sparse_gradients() -> None:
    x = torch.randn(SIDE, SIDE, requires_grad=True)
    for function in (torch.trace, lambda x: x.gather(1, torch.zeros(SIDE, 2, dtype=torch.int64)), lambda x: x.index_select(0, INDICES)):
        (expected,) = torch.autograd.grad(function(x).sum(), x)
        run = compiled(function)
        for _ in range(2):
            (result,) = torch.autograd.grad(run(x).sum(), x)
            torch.testing.assert_close(result, expected)
