"""What the lowerings of linear algebra share, their errors, and the matrix exponential.

Matrices are the last two dimensions; all before are batches. Products are exact to the dtype, whatever precision dots have elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from jax import Array, lax
from jax import numpy as jnp

from ...torch_ops import aten
from ..context import Context
from ..dimensions import wrap
from ..dtypes import DType
from ..promotion import broadcast_shapes, convert, expand, full_like
from ..registry import lowers
from .comparison import is_finite, is_nan
from .creation import conjugate
from .indexing import gather

LinAlgError = torch.linalg.LinAlgError


def transpose(x: Array) -> Array:
    return lax.transpose(x, [*range(x.ndim - 2), x.ndim - 1, x.ndim - 2])


def adjoint(x: Array) -> Array:
    return conjugate(transpose(x))


def matmul(x: Array, y: Array) -> Array:
    """The products of matrices. Both operands have the same batch dimensions."""
    batch = tuple(range(x.ndim - 2))
    return lax.dot_general(x, y, (((x.ndim - 1,), (y.ndim - 2,)), (batch, batch)), precision=lax.Precision.HIGHEST)


def identity(size: int, dtype: DType, batch: Sequence[int] = ()) -> Array:
    """Identity matrices, one for each element of the batch.

    Shape:  (*batch, size, size).
    """
    return expand(jnp.eye(size, dtype=dtype), (*batch, size, size))


def common_batch(*matrices: Array) -> list[Array]:
    """Matrices of any shapes, with their batch dimensions broadcast against each other."""
    batch = broadcast_shapes([matrix.shape[:-2] for matrix in matrices])
    return [expand(matrix, (*batch, *matrix.shape[-2:])) for matrix in matrices]


def diagonal(x: Array) -> Array:
    return jnp.diagonal(x, axis1=-2, axis2=-1)


def pick_rows(x: Array, rows: Array) -> Array:
    """The rows of each matrix in the order that its row numbers give."""
    return gather(x, -2, expand(lax.expand_dims(rows, [rows.ndim]), x.shape))


def first_true(hits: Array) -> Array:
    """The place of a vector's first true element, counted from 1; 0 if there is none.

    Shape:  hits (*batch, n) gives (*batch).
    Dtype:  int32.
    """
    size = hits.shape[-1]
    places = lax.broadcasted_iota(np.int32, hits.shape, hits.ndim - 1)
    first = lax.reduce_min(lax.select(hits, places, full_like(places, size)), (hits.ndim - 1,))
    return lax.select(lax.lt(first, full_like(first, size)), lax.add(first, full_like(first, 1)), full_like(first, 0))


def finite_only(x: Array) -> tuple[Array, Array]:
    """The matrices, all zero where an element is not finite, since LAPACK's iterations may not end with these; and which matrices are
    finite.

    Shape:  x (*batch, m, n) gives that of x, and (*batch).
    Dtype:  that of x; bool.
    """
    finite = lax.reduce_and(is_finite(x), (x.ndim - 2, x.ndim - 1))
    return lax.select(_per_batch(finite, x.shape), x, full_like(x, 0)), finite


def nan_unless(good: Array, results: Array) -> Array:
    """The results, NaN for those elements of the batch that are not good."""
    return lax.select(_per_batch(good, results.shape), results, full_like(results, math.nan))


def _per_batch(values: Array, shape: Sequence[int]) -> Array:
    return lax.broadcast_in_dim(values, tuple(shape), range(values.ndim))


def require_convergence(values: Array, ctx: Context, name: str) -> None:
    """The program's call raises LinAlgError where an iteration failed. values: its results, NaN where it did."""
    kind = "singular values" if "svd" in name else "eigenvalues"
    message = f"The algorithm failed to converge because the input matrix is ill-conditioned or has too many repeated {kind}."
    ctx.require(lax.bitwise_not(is_nan(values)), LinAlgError, f"{name}: {message}")


# By words in the caller's name, the first that it holds. Source: ATen native/BatchLinearAlgebra.cpp, _linalg_check_errors
_ERRORS: dict[str, tuple[type[Exception], str]] = {
    "inv": (LinAlgError, "A diagonal element is zero, the inversion could not be completed because the input matrix is singular."),
    "solve": (LinAlgError, "The solver failed because the input matrix is singular."),
    "cholesky": (LinAlgError, "The factorization could not be completed because the input is not positive-definite."),
    "lu_factor": (
        RuntimeError,
        "a diagonal element of U is zero and using it on lu_solve would result in a division by zero. If you still want to perform the "
        "factorization, consider calling linalg.lu(A, pivot) or linalg.lu_factor_ex(A, pivot)",
    ),
}
_OTHER_ERROR = (RuntimeError, "The factorization failed.")


@lowers(aten._linalg_check_errors.default)
def linalg_check_errors(info: Array, api_name: str, *, is_matrix: bool, ctx: Context) -> None:
    """The program's call raises what eager's `api_name` raises, if a matrix could not be factored. info: 0 for each matrix that could."""
    error, message = next((found for word, found in _ERRORS.items() if word in api_name), _OTHER_ERROR)
    ctx.require(lax.eq(info, full_like(info, 0)), error, f"{api_name}: {message}")


@lowers(aten.linalg_matrix_exp.default)
def linalg_matrix_exp(x: Array) -> Array:
    """exp(x) = exp(x / 2**s) ** (2**s), and the first factor by Taylor's series. Each squaring doubles the relative error, so all is
    done in double precision.

    Shape:  that of x; every matrix of a batch has its own s.
    Dtype:  that of x. A matrix with an element that is not finite gives nan.
    """
    # jax.scipy.linalg.expm gives nan for norms above 7e5, also for [[0, 1e30], [0, 0]], and in float32 it is off by 20% for
    # [[0, 1000], [-1000, 0]], where ATen is off by 0.04%.
    if x.size == 0 or x.shape[-1] == 1:
        return lax.exp(x)
    wide = x.astype(np.result_type(x.dtype, np.float64))
    norm = lax.reduce_max(lax.reduce_sum(lax.abs(wide), (x.ndim - 2,)), (x.ndim - 2,))
    finite = is_finite(norm)
    # Up to the 20th power, what is left out is below the rounding error for a norm up to 1.
    _, exponent = jnp.frexp(norm)
    halvings = jnp.where(finite, jnp.maximum(exponent, 0), 0)
    # In two steps, as 2**s may overflow.
    half = halvings // 2
    for part in (half, halvings - half):
        wide = wide * _per_batch(jnp.ldexp(jnp.ones_like(norm), -part), x.shape)

    def square(step: Array, total: Array) -> Array:
        return lax.select(_per_batch(step < halvings, x.shape), matmul(total, total), total)

    total = lax.fori_loop(np.int32(0), jnp.max(halvings), square, _taylor(wide))
    return nan_unless(finite, convert(total, x.dtype))


def _taylor(x: Array) -> Array:
    """The powers up to the 20th, by Paterson and Stockmeyer: the fourth power is taken out of each four terms."""
    square = matmul(x, x)
    cube, fourth = matmul(square, x), matmul(square, square)
    total = lax.mul(fourth, full_like(x, 1 / math.factorial(20)))
    for first in range(16, -1, -4):
        if first < 16:
            total = matmul(fourth, total)
        for offset, power in enumerate((identity(x.shape[-1], x.dtype, x.shape[:-2]), x, square, cube)):
            total = lax.add(total, lax.mul(power, full_like(power, 1 / math.factorial(first + offset))))
    return total


@lowers(aten.linalg_cross.default)
def linalg_cross(x: Array, y: Array, *, dim: int = -1) -> Array:
    """The cross products of vectors along one dimension.

    Shape:  both, broadcast against each other; `dim` has size 3.
    Dtype:  that of x and y.
    """
    shape = broadcast_shapes([x.shape, y.shape])
    dim = wrap(dim, len(shape))
    a, b = ([lax.slice_in_dim(expand(z, shape), place, place + 1, axis=dim) for place in range(3)] for z in (x, y))
    pairs = ((1, 2), (2, 0), (0, 1))
    return lax.concatenate([lax.sub(lax.mul(a[i], b[j]), lax.mul(a[j], b[i])) for i, j in pairs], dim)
