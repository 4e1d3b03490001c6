"""Lowerings of the LU factorization with pivoting, and of linear systems, inverses and determinants, which are computed from it.

ATen's `pivots` are LAPACK's: the first row is exchanged with row pivots[0], then the second with row pivots[1], and so on, where rows are
counted from 1. XLA's `rows` are the resulting permutation: x[rows] = L U.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from jax import Array, lax
from jax import numpy as jnp
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from ...errors import UnsupportedOp
from ...torch_ops import aten
from .. import dtypes
from ..context import Context
from ..promotion import convert, expand, full_like
from ..registry import lowers
from .elementwise import sign
from .indexing import tril, triu
from .linalg import adjoint, common_batch, diagonal, first_true, identity, linalg_check_errors, pick_rows, transpose
from .linalg_cholesky import solve_triangular


def _factor(x: Array) -> tuple[Array, Array, Array, Array]:
    """Returns L and U in one matrix, pivots, rows, and `info`: 0, or the position of the first zero on U's diagonal, counted from 1."""
    lu, pivots, rows = lax.linalg.lu(x)
    info = first_true(lax.eq(diagonal(lu), full_like(diagonal(lu), 0)))
    return lu, lax.add(pivots, full_like(pivots, 1)), rows, info


def _row_permutation(pivots: Array, count: int) -> Array:
    return lax.linalg.lu_pivots_to_permutation(lax.sub(pivots, full_like(pivots, 1)), count)


def _permutation_matrix(rows: Array, dtype: dtypes.DType) -> Array:
    """Returns the matrix P with x = P L U, for x[rows] = L U."""
    columns = lax.expand_dims(rows, [rows.ndim - 1])
    shape = (*rows.shape, rows.shape[-1])
    return convert(lax.eq(lax.broadcasted_iota(np.int32, shape, rows.ndim - 1), expand(columns, shape)), dtype)


def _lower_factor(lu: Array) -> Array:
    size = min(lu.shape[-2:])
    return lax.add(tril(lu[..., :size], -1), expand(jnp.eye(lu.shape[-2], size, dtype=lu.dtype), (*lu.shape[:-1], size)))


def _upper_factor(lu: Array) -> Array:
    return triu(lu[..., : min(lu.shape[-2:]), :])


def _solve(lu: Array, rows: Array, b: Array, *, left: bool = True, use_adjoint: bool = False) -> Array:
    """Returns the solution y of x y = b, or with `left` False of y x = b. Batch dimensions are broadcast.

    x is the factored matrix, or with `use_adjoint` its adjoint.
    """
    if not left:
        return adjoint(_solve(lu, rows, adjoint(b), use_adjoint=not use_adjoint))
    lu, b = common_batch(lu, b)
    rows = expand(rows, lu.shape[:-1])
    if not use_adjoint:
        y = solve_triangular(lu, pick_rows(b, rows), upper=False, unitriangular=True)
        return solve_triangular(lu, y, upper=True)
    y = solve_triangular(lu, b, upper=True, adjoint=True)
    y = solve_triangular(lu, y, upper=False, unitriangular=True, adjoint=True)
    return pick_rows(y, jnp.argsort(rows, axis=-1))


def _require_pivot(pivot: bool) -> None:
    if not pivot:
        raise UnsupportedOp("LU without pivoting")


@lowers(aten.linalg_lu_factor_ex.default)
def linalg_lu_factor_ex(x: Array, *, pivot: bool = True, check_errors: bool = False, ctx: Context) -> tuple[Array, Array, Array]:
    """L and U in one matrix, pivots, and `info`: 0, or the position of the first zero on U's diagonal, counted from 1.

    Shape:  x (*batch, m, n) gives (*batch, m, n), (*batch, min(m, n)) and (*batch).
    Dtype:  that of x, int32 and int32.
    Raises: UnsupportedOp without `pivot`; with `check_errors`, RuntimeError when the program runs.
    """
    _require_pivot(pivot)
    lu, pivots, _, info = _factor(x)
    if check_errors:
        linalg_check_errors(info, "torch.linalg.lu_factor_ex", is_matrix=x.ndim == 2, ctx=ctx)
    return lu, pivots, info


@lowers(aten.linalg_lu.default)
def linalg_lu(x: Array, *, pivot: bool = True) -> tuple[Array, Array, Array]:
    """P, L and U with x = P L U.

    Shape:  x (*batch, m, n) gives (*batch, m, m), (*batch, m, k) and (*batch, k, n), where k = min(m, n).
    Dtype:  all: that of x.
    Raises: UnsupportedOp without `pivot`.
    """
    _require_pivot(pivot)
    lu, _, rows, _ = _factor(x)
    return _permutation_matrix(rows, x.dtype), _lower_factor(lu), _upper_factor(lu)


@lowers(aten.lu_unpack.default)
def lu_unpack(
    lu: Array, pivots: Array, unpack_data: bool = True, unpack_pivots: bool = True, *, ctx: Context
) -> tuple[Array, Array, Array]:
    """P, L and U from a factorization. Without `unpack_data`, L and U are empty vectors; without `unpack_pivots`, P is an empty vector.

    Shape:  as for `linalg_lu`.
    Dtype:  all: that of lu.
    """
    empty = lax.full((0,), 0, lu.dtype)
    rows = _row_permutation(pivots[..., : min(lu.shape[-2:])], lu.shape[-2])
    permutation = _permutation_matrix(rows, lu.dtype) if unpack_pivots else empty
    return (permutation, _lower_factor(lu), _upper_factor(lu)) if unpack_data else (permutation, empty, empty)


@lowers(aten.linalg_lu_solve.default)
def linalg_lu_solve(lu: Array, pivots: Array, b: Array, *, left: bool = True, adjoint: bool = False) -> Array:
    """The solution y of x y = b, or with `left` False of y x = b, where x is the factored matrix, or with `adjoint` its adjoint.

    Shape:  that of b, with the batch dimensions of lu and b broadcast against each other.
    """
    return _solve(lu, _row_permutation(pivots, lu.shape[-1]), b, left=left, use_adjoint=adjoint)


@functools.cache
def _prefers_transpose(op: OpOverload) -> bool:
    """True if torch's kernel of an op factors the transpose of a real contiguous matrix, instead of the matrix itself.

    Torch's gradient formulas expect the kernel's choice, which depends on the release of torch. So the kernel is tried on a small matrix.
    """
    with _disable_current_modes():
        x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device="cpu")
        factors = op(x, x)[1] if op is aten._linalg_solve_ex.default else op(x)[-2]
        return bool(factors[0, 0] == 2)


def _factor_as_kernel(x: Array, ctx: Context) -> tuple[Array, Array, Array, Array, bool]:
    """Factors x or the transpose of x, as torch's kernel of the current node would. x is the node's first argument.

    Returns the results of `_factor`, and True if the factored matrix is the transpose of x.
    """
    spec = ctx.input(0)
    contiguous = torch.empty_strided(spec.shape, spec.stride, device="meta").is_contiguous()
    transposed = contiguous and not dtypes.is_complex(x.dtype) and _prefers_transpose(ctx.node.target)
    return *_factor(transpose(x) if transposed else x), transposed


@lowers(aten._linalg_solve_ex.default)
def linalg_solve_ex(
    x: Array, b: Array, *, left: bool = True, check_errors: bool = False, ctx: Context
) -> tuple[Array, Array, Array, Array]:
    """The solution y of x y = b, or with `left` False of y x = b; and LU, pivots and `info` as for `linalg_lu_factor_ex`.

    LU and pivots are those of the transpose of x if torch's kernel factors the transpose (see `_factor_as_kernel`).

    Shape:  that of b, which may contain one vector for each matrix; (*batch, n, n), (*batch, n) and (*batch).
    Dtype:  that of x, that of x, int32 and int32.
    Raises: with `check_errors`, LinAlgError when the program runs.
    """
    lu, pivots, rows, info, transposed = _factor_as_kernel(x, ctx)
    if check_errors:
        linalg_check_errors(info, "torch.linalg.solve_ex", is_matrix=x.ndim == 2, ctx=ctx)
    if b.ndim == 1 or b.shape == x.shape[:-1]:
        columns = lax.expand_dims(b, [b.ndim])
        result = lax.squeeze(_solve(lu, rows, columns, left=left, use_adjoint=transposed), [-1])
    else:
        result = _solve(lu, rows, b, left=left, use_adjoint=transposed)
    return result, lu, pivots, info


@lowers(aten.linalg_inv_ex.default)
def linalg_inv_ex(x: Array, *, check_errors: bool = False, ctx: Context) -> tuple[Array, Array]:
    """The inverse, and `info`: 0, or the position of the first zero on U's diagonal, counted from 1.

    Shape:  x (*batch, n, n) gives (*batch, n, n) and (*batch).
    Dtype:  that of x; int32.
    Raises: with `check_errors`, LinAlgError when the program runs.
    """
    lu, _, rows, info = _factor(x)
    if check_errors:
        linalg_check_errors(info, "linalg.inv_ex", is_matrix=x.ndim == 2, ctx=ctx)
    return _solve(lu, rows, identity(x.shape[-1], x.dtype, x.shape[:-2])), info


def _parity(pivots: Array, dtype: dtypes.DType) -> Array:
    """Returns the sign of the permutation: -1 for an odd number of row exchanges, else 1."""
    identity_pivots = lax.add(lax.broadcasted_iota(np.int32, pivots.shape, pivots.ndim - 1), full_like(pivots, 1))
    exchanges = lax.reduce_sum(convert(lax.ne(pivots, identity_pivots), np.dtype(np.int32)), (pivots.ndim - 1,))
    odd = lax.rem(exchanges, full_like(exchanges, 2))
    return convert(lax.sub(full_like(odd, 1), lax.mul(odd, full_like(odd, 2))), dtype)


@lowers(aten._linalg_det.default)
def linalg_det(x: Array, *, ctx: Context) -> tuple[Array, Array, Array]:
    """The determinant, LU, and pivots. LU and pivots may be those of the transpose of x, as for `linalg_solve_ex`.

    Shape:  x (*batch, n, n) gives (*batch), (*batch, n, n) and (*batch, n).
    Dtype:  that of x, that of x, and int32.
    """
    lu, pivots, *_ = _factor_as_kernel(x, ctx)
    return lax.mul(lax.reduce_prod(diagonal(lu), (x.ndim - 2,)), _parity(pivots, x.dtype)), lu, pivots


@lowers(aten._linalg_slogdet.default)
def linalg_slogdet(x: Array, *, ctx: Context) -> tuple[Array, Array, Array, Array]:
    """The determinant's sign, the logarithm of its absolute value, LU, and pivots (those of `linalg_det`).

    Shape:  x (*batch, n, n) gives (*batch), (*batch), (*batch, n, n) and (*batch, n).
    Dtype:  that of x; for the logarithm, the real dtype of x; for the pivots, int32.
    """
    lu, pivots, *_ = _factor_as_kernel(x, ctx)
    pivot_values = diagonal(lu)
    signs = lax.reduce_prod(sign(pivot_values), (x.ndim - 2,))
    return lax.mul(signs, _parity(pivots, x.dtype)), lax.reduce_sum(lax.log(lax.abs(pivot_values)), (x.ndim - 2,)), lu, pivots
