"""Products of matrices and vectors."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from support import internals
from support.comparisons.compare import assert_equal, check
from support.comparisons.gradients import check_gradients
from support.comparisons.single_op import run_op

aten = torch.ops.aten

NUMERIC = [
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]


def make(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=torch.complex128 if dtype.is_complex else torch.float64).to(dtype)
    return torch.randint(-100 if dtype.is_signed else 0, 100, shape).to(dtype)


@pytest.mark.sample(usual=3)
@pytest.mark.parametrize("dtype", NUMERIC, ids=str)
def test_products(dtype: torch.dtype) -> None:
    def function(x, y, b, c, v):
        return (
            x @ y,
            x.t() @ y.t()[:, :3].t(),
            torch.bmm(b, c),
            torch.bmm(b.transpose(1, 2), b),
            torch.mv(x, v),
            torch.mv(x.t(), v[:3]),
            torch.dot(v, y[:, 1]),
            torch.vdot(v, y[:, 1]),
            torch.addmv(v[:3], x, v),
            torch.addmv(v, x.t(), v[:3]),
            torch.outer(v, v),
            torch.einsum("ij,bjk->bik", x, c),
        )

    check(function, make(dtype, 3, 5), make(dtype, 5, 4), make(dtype, 2, 3, 5), make(dtype, 2, 5, 4), make(dtype, 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
@pytest.mark.parametrize(("alpha", "beta"), [(0.0, 0.5), (0, 0)])
def test_nans_with_a_factor_of_zero(dtype: torch.dtype, alpha: float, beta: float) -> None:
    def function(x, y, b, c, v):
        factors = {"alpha": alpha, "beta": beta}
        return (
            torch.addmm(x[:, :4], x, y, **factors),
            torch.addmm(v[:4], x[:1], y, **factors),
            torch.addbmm(x[:, :4], b[:, :3], c[..., :4], **factors),
            torch.baddbmm(v[0], b, c, **factors),
            torch.baddbmm(v[0], b[:, :3], c[..., :4], **factors),  # in ATen, a loop that multiplies
            torch.addmv(v[:3], x, v, **factors),
            torch.addr(y, v, v[:4], **factors),
        )

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="dynaxla", fullgraph=True)
    operands = [make(dtype, *shape) for shape in [(3, 5), (5, 4), (2, 9, 5), (2, 5, 9), (5,)]]
    for nan_operand in range(5):
        inputs = [operand.clone() for operand in operands]
        inputs[nan_operand].view(-1)[1] = torch.nan
        assert_equal(compiled(*inputs), function(*inputs))


@pytest.mark.parametrize("function", [lambda x, v: torch.mv(x.t(), v), lambda x, v: torch.addmv(v[:1], x.t(), v)])
def test_transposed_matrix_times_a_vector_is_not_transposed(function: Callable[..., torch.Tensor], tmp_path: Path) -> None:
    """XLA would read the matrix column by column."""
    x, v = torch.randn(300, 200), torch.randn(300)
    result = torch.compile(function, backend="dynaxla", options={"dump": str(tmp_path)})(x, v)
    torch.testing.assert_close(result, function(x, v), rtol=1e-4, atol=1e-4)
    (program,) = tmp_path.glob("*.hlo.txt")
    assert " dot(" in program.read_text()
    assert " transpose(" not in program.read_text()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_matrix_repeated_by_a_batch_is_not_copied(dtype: torch.dtype, tmp_path: Path) -> None:
    """A linear layer without gradients, whose input is not contiguous, passes such a weight to bmm."""
    weight, x = make(dtype, 96, 48), make(dtype, 5, 33, 48).transpose(0, 1)
    check(lambda x: F.linear(x, weight), x)
    torch.compile(lambda x: F.linear(x, weight), backend="dynaxla", options={"dump": str(tmp_path)})(x)
    (program,) = tmp_path.glob("*.hlo.txt")
    assert "bmm" in next(tmp_path.glob("*.aten.txt")).read_text()
    assert not re.search(r"\[33,(96,48|48,96)\]", program.read_text())


@pytest.mark.quick
def test_other_expanded_operands() -> None:
    """An expanded matrix, and a batch of matrices with expanded rows or columns."""
    x, batch = torch.randn(3, 5), torch.randn(4, 3, 5)
    for v in (torch.randn(1, 6), torch.randn(5, 1)):
        check(lambda x, v: torch.mm(x, v.expand(5, 6)), x, v)
        check(lambda x, v: torch.bmm(x, v.expand(4, 5, 6)), batch, v)
        check(lambda y, x, v: torch.baddbmm(y, x, v.expand(4, 5, 6)), torch.randn(4, 3, 6), batch, v)


@pytest.mark.sample(usual=2)
@pytest.mark.parametrize("dtype", NUMERIC, ids=str)
def test_many_tiny_products(dtype: torch.dtype) -> None:
    """The program computes them term by term. XLA would make a call for each matrix."""

    def function(x, y, v):
        return (
            x @ y,
            x.mT @ x,
            y.mT @ x.mT,
            (x @ v.unsqueeze(-1)).squeeze(-1),
            torch.einsum("bij,bj->bi", x, v),
            torch.einsum("abij,abjk->abik", x.unflatten(0, (5, 4)), y.unflatten(0, (5, 4)).mT.contiguous().mT),
        )

    tolerance = {torch.bfloat16: (1e-2, 1e-2), torch.float16: (1e-3, 1e-2)}.get(dtype)
    check(function, make(dtype, 20, 3, 4), make(dtype, 20, 4, 5), make(dtype, 20, 4), tolerance=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str)
def test_many_small_products(dtype: torch.dtype, kernels: list[int]) -> None:
    """One call of torch's kernel for the whole batch, in the dtypes that MKL has."""

    def function(x, y):
        x, y = x * 2, y + 1
        return x @ y, x.mT @ x, y.mT @ x.mT, torch.einsum("abij,abkj->abik", x.unflatten(0, (6, 7)), y.mT.unflatten(0, (6, 7))).sum()

    # The sum adds 32,256 numbers, which bfloat16 has rounded, in another order.
    tolerance = {torch.bfloat16: (2e-2, 0.3), torch.float32: (1e-4, 1e-4), torch.complex64: (1e-4, 1e-4)}.get(dtype)
    check(function, make(dtype, 42, 24, 20), make(dtype, 42, 20, 32), tolerance=tolerance)
    assert len(kernels) == (4 if dtype in (torch.float32, torch.float64) else 0)


def test_gradients_of_many_tiny_products(tmp_path: Path) -> None:
    check_gradients(lambda x, y: x.exp() @ y, torch.randn(30, 3, 4), torch.randn(30, 4, 2), tolerance=(1e-5, 1e-5))
    torch.compile(torch.matmul, backend="dynaxla", options={"dump": tmp_path})(torch.ones(30, 3, 4), torch.ones(30, 4, 2))
    (program,) = tmp_path.glob("*.stablehlo.mlir")
    assert "dot_general" not in program.read_text()


@pytest.mark.parametrize("dtype", NUMERIC, ids=str)
def test_products_with_an_added_tensor(dtype: torch.dtype) -> None:
    beta, alpha = (2, 3) if not (dtype.is_floating_point or dtype.is_complex) else (0.5, -2)

    def function(bias, x, y, b, c, v):
        return (
            torch.addmm(bias, x, y),
            torch.addmm(bias, x, y, beta=beta, alpha=alpha),
            torch.addmm(bias, x, y, beta=0),
            torch.baddbmm(bias, b, c, beta=beta, alpha=alpha),
            torch.addbmm(bias, b, c, beta=beta, alpha=alpha),
            torch.addmv(v[:1], x, v, beta=beta, alpha=alpha),
            torch.addr(bias[None], v[:3], v[:4], beta=beta, alpha=alpha),
            torch.nn.functional.linear(b, y.t(), bias),
        )

    args = make(dtype, 4), make(dtype, 3, 5), make(dtype, 5, 4), make(dtype, 2, 3, 5), make(dtype, 2, 5, 4), make(dtype, 5)
    # ATen rounds half types between the product and the sum; we compute both in float32.
    tolerance = {torch.float16: (1e-2, 1e-2), torch.bfloat16: (5e-2, 0.1)}.get(dtype)
    check(function, *args, tolerance=tolerance)


def test_beta_zero_ignores_nans() -> None:
    def function(nan, x, b):
        return (
            torch.addmm(nan, x, x, beta=0),
            torch.baddbmm(nan, b, b, beta=0),
            torch.addmv(nan[0], x, x[0], beta=0),
            torch.addbmm(nan, b, b, beta=0),
            torch.addr(nan, x[0], x[1], beta=0),
        )

    check(function, torch.full((3, 3), float("nan")), torch.randn(3, 3), torch.randn(2, 3, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(24, 3, 24), (24, 24, 5)], ids=str)
def test_transposes_before_elementwise_ops(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    """XLA moves the transpose through these ops, into the product."""
    inner, rows, columns = shape

    def function(x: torch.Tensor, y: torch.Tensor, is_kept: torch.Tensor) -> torch.Tensor:
        return torch.where(is_kept, x.t(), 0) @ y

    check(function, make(dtype, inner, rows), make(dtype, inner, columns), torch.arange(inner) < inner - 1)


def test_empty_contracted_dimension() -> None:
    def function(x, y, bias, v):
        return x @ y, torch.addmm(bias, x, y), torch.mv(x, v), torch.dot(v, v), torch.bmm(x[None], y[None]), y.t() @ x.t(), x[:0] @ y

    check(function, torch.randn(3, 0), torch.randn(0, 4), torch.randn(4), torch.randn(0))


def test_integer_products_wrap_around() -> None:
    def function(x, wide):
        return x @ x, torch._int_mm(wide, wide)

    check(function, torch.full((4, 4), 100, dtype=torch.int8), torch.full((32, 32), -128, dtype=torch.int8))


def test_larger_products_of_int8() -> None:
    """torch's kernel computes them, with and without transposes. -128 times -128 does not wrap."""

    def function(x, y):
        return torch._int_mm(x, y.t()), torch._int_mm(y.t(), x[:64].t()), torch._int_mm(x, y[:, :64])

    check(function, torch.randint(-128, 128, (96, 64), dtype=torch.int8), torch.full((64, 64), -128, dtype=torch.int8))


def test_bilinear_and_gradients() -> None:
    def function(x, y, w, bilinear):
        return torch.nn.functional.bilinear(x, y, bilinear), torch.nn.functional.linear(x, w).relu(), x @ w.t()[:, :2]

    check_gradients(function, torch.randn(2, 3), torch.randn(2, 4), torch.randn(6, 3), torch.randn(5, 3, 4))


def test_products_of_another_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """mm.dtype, bmm.dtype, addmm.dtype and baddbmm.dtype have kernels for GPUs alone, so torch would refuse them on the CPU."""
    internals.no_refusals(monkeypatch)
    x, y, wide = torch.randn(2, 3, 5).bfloat16(), torch.randn(2, 5, 4).bfloat16(), torch.randn(2, 3, 4)
    product = x.float() @ y.float()
    assert_equal(run_op(aten.mm.dtype, x[0], y[0], torch.float32, expected=product[0]), product[0])
    assert_equal(run_op(aten.bmm.dtype, x, y, torch.float32, expected=product), product)
    added = 2 * wide + 3 * product
    assert_equal(run_op(aten.addmm.dtype, wide[0], x[0], y[0], torch.float32, beta=2, alpha=3, expected=added[0]), added[0])
    assert_equal(run_op(aten.baddbmm.dtype, wide, x, y, torch.float32, beta=2, alpha=3, expected=added), added)
