"""torch's attention kernels inside a program: values, gradients, and the choice between them and XLA."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from dynaxla.config import Options
from dynaxla.lowering.implementations import Operand
from dynaxla.lowering.ops import attention_implementations
from dynaxla.lowering.ops.attention_implementations import AttentionProblem
from support.comparisons.compare import assert_equal
from support.comparisons.single_op import Call, run_ops
from support.forced_implementations import backend_with
from support.releases import IS_OLDEST

ATTENTION = F.scaled_dot_product_attention
FORCED = {"attention": "torch", "attention_gradient": "torch"}


def projections(rows: int = 9, columns: int = 13, size: int = 8, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Query, key and value as linear layers return them: (batch, rows, heads, size)."""
    torch.manual_seed(0)
    return [torch.randn(2, count, 3, size, dtype=dtype, requires_grad=True) for count in (rows, columns, columns)]


def attention_of_projections(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **settings: Any) -> torch.Tensor:
    return ATTENTION(*(x.transpose(1, 2) for x in (q, k, v)), **settings)


def twice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **settings: Any) -> torch.Tensor:
    """A graph of more than one op."""
    return attention_of_projections(attention_of_projections(q, k, v, **settings).transpose(1, 2) + q, k, v, **settings)


def check(function: Any, tensors: list[torch.Tensor], tolerance: tuple[float, float] = (1e-4, 1e-5), **settings: Any) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend_with(FORCED), fullgraph=True)
    mine, theirs = compiled(*tensors, **settings), function(*tensors, **settings)
    assert_equal(mine, theirs, tolerance=tolerance)
    grad = torch.randn_like(theirs)
    for gradient, expected in zip(torch.autograd.grad(mine, tensors, grad), torch.autograd.grad(theirs, tensors, grad), strict=True):
        assert_equal(gradient, expected, tolerance=tolerance)


def mask_with_a_hidden_row(*shape: int) -> torch.Tensor:
    mask = torch.randn(shape)
    mask[..., 2, :] = -float("inf")
    mask[..., 1:4] = -float("inf")
    return mask


MASKS = {
    "rows and columns": lambda: mask_with_a_hidden_row(9, 13),
    "each head": lambda: mask_with_a_hidden_row(2, 3, 9, 13),
    "columns alone": lambda: torch.randn(2, 1, 1, 13),
    "expanded": lambda: torch.randn(2, 1, 1, 13).expand(2, 3, 9, 13),
    "transposed": lambda: torch.randn(13, 9).t(),
    "bool": lambda: torch.rand(2, 1, 9, 13) > 0.4,
}


@pytest.mark.sample(usual=4)
@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, kernels: list[int]) -> None:
    check(twice, projections(), attn_mask=MASKS[name]())
    assert len(kernels) == 4


@pytest.mark.sample(usual=3)
@pytest.mark.parametrize("rows", [1, 9, 13, 600])
@pytest.mark.parametrize("settings", [{}, {"is_causal": True}, {"scale": -0.7}], ids=str)
def test_settings(settings: dict[str, Any], rows: int, kernels: list[int]) -> None:
    check(twice, projections(rows), **settings)
    assert len(kernels) == 4


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, (1e-9, 1e-11)), (torch.bfloat16, (5e-2, 3e-2)), (torch.float16, (1e-2, 5e-3))], ids=str
)
def test_dtypes(dtype: torch.dtype, tolerance: tuple[float, float], kernels: list[int]) -> None:
    check(twice, projections(dtype=dtype), tolerance)
    # torch 2.11 saves log-sum-exps in float32. In float64, programs compute them again for the gradient.
    assert len(kernels) == (6 if IS_OLDEST and dtype == torch.float64 else 4)


def test_slices_of_one_tensor(kernels: list[int]) -> None:
    torch.manual_seed(0)

    def function(x: torch.Tensor) -> torch.Tensor:
        q, k, v = x.permute(2, 0, 3, 1, 4)
        return ATTENTION(q, k, v).transpose(1, 2).reshape(2, 9, 24)

    check(function, [torch.randn(2, 9, 3, 3, 8, requires_grad=True)])
    assert len(kernels) == 2


def test_rows_with_a_stride(kernels: list[int]) -> None:
    """torch's kernel assumes a stride of 1 within a row, so the reference gets contiguous operands."""
    torch.manual_seed(0)
    strided = [torch.randn(2, 8, 9, 3).permute(0, 3, 2, 1) for _ in range(3)]
    contiguous = [x.contiguous() for x in strided]
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    (mine,) = run_ops([Call(op.default, strided)], Options(implementations=FORCED, fallback="error"))
    results = op(*contiguous)
    for result, expected in zip(mine, results, strict=True):
        torch.testing.assert_close(result, expected)
    grad = torch.randn(2, 3, 9, 8)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    (mine,) = run_ops([Call(backward.default, (grad, *strided, *results, 0.0, False))], Options(implementations=FORCED, fallback="error"))
    for result, expected in zip(mine, backward(grad, *contiguous, *results, 0.0, False), strict=True):
        torch.testing.assert_close(result, expected)
    assert len(kernels) == 2


@pytest.mark.parametrize(
    ("change", "is_chosen"),
    [
        ({}, True),
        ({"rows": 6000, "columns": 159}, False),
        ({"rows": 1000, "columns": 200}, False),
        ({"dtype": torch.bfloat16}, False),
        ({"dtype": torch.float64}, False),
    ],
    ids=str,
)
def test_kernels_are_chosen_by_shape_and_dtype(change: dict[str, Any], is_chosen: bool, kernels: list[int]) -> None:
    """From 8 MB of scores, if rows are long enough."""
    shape = {"rows": 3000, "columns": 240, "dtype": torch.float32} | change
    q, k, v = projections(**shape)
    torch._dynamo.reset()
    compiled = torch.compile(twice, backend="dynaxla", fullgraph=True)
    out = compiled(q, k, v)
    assert bool(kernels) is is_chosen
    out.sum().backward()
    assert bool(kernels) is is_chosen


OPERAND = Operand((2, 8, 1024, 64), np.dtype(np.float32))
PROBLEM = AttentionProblem(OPERAND, OPERAND, OPERAND, None, False, 0.125, False, False, "cpu")


@pytest.mark.parametrize(
    "change",
    [
        {"has_dropout": True},
        {"wants_mask_gradient": True},
        {"key": replace(OPERAND, shape=(2, 2, 1024, 64)), "value": replace(OPERAND, shape=(2, 2, 1024, 64))},
        {"value": replace(OPERAND, shape=(2, 8, 1024, 32))},
        {"mask": Operand((1024, 1024), np.dtype(np.bool_))},
        {"mask": Operand((8, 1024, 1024), np.dtype(np.float32))},
    ],
    ids=str,
)
def test_unsupported_problems_are_xlas(change: dict[str, Any]) -> None:
    for implementations in (attention_implementations.ATTENTION, attention_implementations.ATTENTION_GRADIENT):
        assert implementations.choose(PROBLEM, FORCED).name == "torch"
        assert implementations.choose(replace(PROBLEM, **change), FORCED).name == "xla"
