"""Lowerings of the Cholesky factorization, and of linear systems with triangular matrices or Cholesky factors."""

from __future__ import annotations

import numpy as np
from jax import Array, lax
from jax import numpy as jnp

from ...torch_ops import aten
from ..context import Context
from ..promotion import expand_leading, full_like
from ..registry import lowers
from .comparison import is_nan
from .indexing import tril
from .linalg import adjoint, common_batch, diagonal, first_true, identity, linalg_check_errors, matmul


def _factor(x: Array) -> tuple[Array, Array]:
    """Returns the lower factor of each matrix and `info`: 0, or the order of the first leading minor that is not positive.

    The upper triangle of x is not read. If `info` is i > 0, the first i - 1 columns are those of the factor. The diagonal element of column
    i is the pivot that is not positive. All other elements are those of the lower triangle of x.
    """
    if x.size == 0:
        return x, lax.full(x.shape[:-2], 0, np.dtype(np.int32))
    factor = lax.linalg.cholesky(x, symmetrize_input=False)
    # XLA fills a factor that it could not complete with NaN.
    failed = lax.reduce_or(is_nan(diagonal(factor)), (x.ndim - 2,))
    zero_info = lax.full(failed.shape, 0, np.dtype(np.int32))

    def with_partial_factors() -> tuple[Array, Array]:
        columns, info = _factor_by_columns(x)
        expanded_failed = expand_leading(failed, x.shape)
        return lax.select(expanded_failed, columns, factor), lax.select(failed, info, zero_info)

    return lax.cond(lax.reduce_or(failed, tuple(range(failed.ndim))), with_partial_factors, lambda: (factor, zero_info))


def _factor_by_columns(x: Array) -> tuple[Array, Array]:
    """Like `_factor`, but slower: computes one column after the other, so that the columns before a failure are known."""
    size, last = x.shape[-1], x.ndim - 1
    positions = lax.iota(np.int32, size)

    def step(index: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        factor, info = state
        left_columns = jnp.where(positions < index, factor, 0)
        row = lax.dynamic_index_in_dim(left_columns, index, last - 1)
        original = lax.dynamic_index_in_dim(factor, index, last, keepdims=False)
        column = original - matmul(left_columns, adjoint(row))[..., 0]
        pivot = jnp.real(lax.dynamic_index_in_dim(column, index, last - 1))
        failing = jnp.expand_dims(info == 0, -1) & ~(pivot > 0)
        root = jnp.sqrt(jnp.where(failing, 1, pivot)).astype(x.dtype)
        finished = jnp.where(positions > index, column / root, jnp.where(positions == index, root, 0))
        stopped = jnp.where(failing & (positions == index), pivot.astype(x.dtype), original)
        finished = jnp.where(failing | jnp.expand_dims(info > 0, -1), stopped, finished)
        info = jnp.where(failing[..., 0], index + 1, info)
        return lax.dynamic_update_index_in_dim(factor, finished, index, last), info

    return lax.fori_loop(np.int32(0), np.int32(size), step, (tril(x), lax.full(x.shape[:-2], 0, np.dtype(np.int32))))


@lowers(aten.linalg_cholesky_ex.default)
def linalg_cholesky_ex(x: Array, *, upper: bool = False, check_errors: bool = False, ctx: Context) -> tuple[Array, Array]:
    """The lower (or upper) Cholesky factor of each matrix, and `info`: 0, or the order of the first leading minor that is not positive.

    Only the lower (or upper) triangle of x is read.

    Shape:  x (*batch, n, n) gives (*batch, n, n) and (*batch).
    Dtype:  that of x; int32.
    Raises: with `check_errors`, LinAlgError when the program runs.
    """
    factor, info = _factor(adjoint(x) if upper else x)
    if check_errors:
        linalg_check_errors(info, "linalg.cholesky_ex", is_matrix=x.ndim == 2, ctx=ctx)
    return adjoint(factor) if upper else factor, info


@lowers(aten.cholesky.default)
def cholesky(x: Array, upper: bool = False, *, ctx: Context) -> Array:
    """The lower (or upper) Cholesky factor of each matrix.

    Shape:  that of x.
    Dtype:  that of x.
    Raises: LinAlgError when the program runs, for a matrix that is not positive-definite.
    """
    factor, info = linalg_cholesky_ex(x, upper=upper, ctx=ctx)
    linalg_check_errors(info, "cholesky", is_matrix=x.ndim == 2, ctx=ctx)
    return factor


def solve_triangular(
    a: Array, b: Array, *, upper: bool, left: bool = True, transposed: bool = False, adjoint: bool = False, unitriangular: bool = False
) -> Array:
    """Returns the solution x of t x = b, or with `left` False of x t = b.

    t is the upper (or lower) triangle of a, with `transposed` the transpose of this triangle, with `adjoint` its adjoint. With
    `unitriangular`, the diagonal of a is not read and counts as ones. a and b must have the same batch dimensions.
    """
    return lax.linalg.triangular_solve(
        a, b, left_side=left, lower=not upper, transpose_a=transposed or adjoint, conjugate_a=adjoint, unit_diagonal=unitriangular
    )


@lowers(aten.linalg_solve_triangular.default)
def linalg_solve_triangular(a: Array, b: Array, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Array:
    """The solution x of t x = b, or with `left` False of x t = b, where t is the upper or lower triangle of a.

    Shape:  that of b, with the batch dimensions of a and b broadcast against each other.
    """
    a, b = common_batch(a, b)
    return solve_triangular(a, b, upper=upper, left=left, unitriangular=unitriangular)


@lowers(aten.triangular_solve.default)
def triangular_solve(b: Array, a: Array, upper: bool = True, transpose: bool = False, unitriangular: bool = False) -> tuple[Array, Array]:
    """The solution x of t x = b, and a. t is the upper or lower triangle of a, or with `transpose` the transpose of this triangle.

    Shape:  the shapes of b and a, with the batch dimensions broadcast against each other.
    """
    a, b = common_batch(a, b)
    return solve_triangular(a, b, upper=upper, transposed=transpose, unitriangular=unitriangular), a


@lowers(aten.cholesky_solve.default)
def cholesky_solve(b: Array, factor: Array, upper: bool = False) -> Array:
    """The solution x of a x = b, where `factor` is the lower (or upper) Cholesky factor of a.

    Shape:  that of b, with the batch dimensions of the factor and b broadcast against each other.
    """
    factor, b = common_batch(factor, b)
    return solve_triangular(factor, solve_triangular(factor, b, upper=upper, adjoint=upper), upper=upper, adjoint=not upper)


@lowers(aten.cholesky_inverse.default)
def cholesky_inverse(factor: Array, upper: bool = False, *, ctx: Context) -> Array:
    """The inverse of the matrix with the given lower (or upper) Cholesky factor.

    Shape:  that of the factor.
    Raises: LinAlgError when the program runs, for a zero on the diagonal.
    """
    singular = first_true(lax.eq(diagonal(factor), full_like(diagonal(factor), 0)))
    linalg_check_errors(singular, "cholesky_inverse", is_matrix=factor.ndim == 2, ctx=ctx)
    inverse_factor = solve_triangular(factor, identity(factor.shape[-1], factor.dtype, factor.shape[:-2]), upper=upper)
    return matmul(inverse_factor, adjoint(inverse_factor)) if upper else matmul(adjoint(inverse_factor), inverse_factor)
