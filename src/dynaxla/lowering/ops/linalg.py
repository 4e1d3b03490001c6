"""Functions and errors shared by the lowerings of linear algebra, and the lowerings of the matrix exponential and the cross product.

The last two dimensions are the matrices; all dimensions before them are batch dimensions. Matrix products always have the full precision of
the dtype, even if torch.set_float32_matmul_precision asks for less.
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
from ..promotion import broadcast_shapes, convert, expand, expand_leading, full_like
from ..registry import lowers
from .comparison import is_finite, is_nan
from .float_bits import frexp, power_of_two
from .indexing import gather

LinAlgError = torch.linalg.LinAlgError


def transpose(x: Array) -> Array:
    return lax.transpose(x, [*range(x.ndim - 2), x.ndim - 1, x.ndim - 2])


def adjoint(x: Array) -> Array:
    return jnp.conj(transpose(x))


def matmul(x: Array, y: Array) -> Array:
    """Returns the products of matrices at the highest precision. Both operands must have the same batch dimensions."""
    batch = tuple(range(x.ndim - 2))
    return lax.dot_general(x, y, (((x.ndim - 1,), (y.ndim - 2,)), (batch, batch)), precision=lax.Precision.HIGHEST)


def identity(size: int, dtype: DType, batch: Sequence[int] = ()) -> Array:
    """Returns identity matrices, one for each element of the batch.

    Shape:  (*batch, size, size).
    """
    return expand(jnp.eye(size, dtype=dtype), (*batch, size, size))


def common_batch(*matrices: Array) -> list[Array]:
    """Returns the matrices with their batch dimensions broadcast against each other. The matrix shapes may differ."""
    batch = broadcast_shapes([matrix.shape[:-2] for matrix in matrices])
    return [expand(matrix, (*batch, *matrix.shape[-2:])) for matrix in matrices]


def diagonal(x: Array) -> Array:
    return jnp.diagonal(x, axis1=-2, axis2=-1)


def pick_rows(x: Array, rows: Array) -> Array:
    """Returns each matrix with its rows in the order given by `rows`.

    Shape:  x (*batch, m, n) and rows (*batch, m) give (*batch, m, n).
    """
    return gather(x, -2, expand(lax.expand_dims(rows, [rows.ndim]), x.shape))


def first_true(mask: Array) -> Array:
    """Returns the position of the first True element of each vector, counted from 1; 0 if no element is True.

    Shape:  mask (*batch, n) gives (*batch).
    Dtype:  int32.
    """
    size = mask.shape[-1]
    positions = lax.broadcasted_iota(np.int32, mask.shape, mask.ndim - 1)
    first = lax.reduce_min(lax.select(mask, positions, full_like(positions, size)), (mask.ndim - 1,))
    return lax.select(lax.lt(first, full_like(first, size)), lax.add(first, full_like(first, 1)), full_like(first, 0))


def zero_nonfinite(x: Array) -> tuple[Array, Array]:
    """Replaces each matrix that has a non-finite element by zeros: LAPACK's iterations may not terminate for non-finite elements.

    Returns: The matrices, and a mask that is True for the finite ones.

    Shape:  x (*batch, m, n) gives (*batch, m, n) and (*batch).
    Dtype:  that of x; bool.
    """
    finite = lax.reduce_and(is_finite(x), (x.ndim - 2, x.ndim - 1))
    return lax.select(expand_leading(finite, x.shape), x, full_like(x, 0)), finite


def nan_unless(valid: Array, results: Array) -> Array:
    """Returns the results, with NaN for the batch elements where `valid` is False."""
    return lax.select(expand_leading(valid, results.shape), results, full_like(results, math.nan))


def require_convergence(values: Array, ctx: Context, name: str) -> None:
    """Makes the call raise LinAlgError if an iteration did not converge.

    Args:
        values: The results, NaN where the iteration did not converge.
        ctx: The context of the current node.
        name: Eager mode's name of the op, for the message.
    """
    quantity = "singular values" if "svd" in name else "eigenvalues"
    message = f"The algorithm failed to converge because the input matrix is ill-conditioned or has too many repeated {quantity}."
    ctx.require(lax.bitwise_not(is_nan(values)), LinAlgError, f"{name}: {message}")


# Errors by a word in `api_name`; the first match counts. Source: ATen native/BatchLinearAlgebra.cpp, _linalg_check_errors
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
    """Makes the call raise eager mode's error for the function `api_name` if a matrix could not be factored: its `info` is not 0."""
    error, message = next((entry for word, entry in _ERRORS.items() if word in api_name), _OTHER_ERROR)
    ctx.require(lax.eq(info, full_like(info, 0)), error, f"{api_name}: {message}")


@lowers(aten.linalg_matrix_exp.default)
def linalg_matrix_exp(x: Array) -> Array:
    """The matrix exponential: exp(x) = exp(x / 2**s) ** (2**s), where exp(x / 2**s) is computed by a Taylor series.

    Each of the s squarings doubles the relative error, so the computation is in double precision. Each matrix of a batch has its own s. A
    matrix with a non-finite element gives NaN, unless it is 1 x 1, where the result is exp(x).

    Shape:  that of x.
    Dtype:  that of x.
    """
    # jax.scipy.linalg.expm gives nan for norms above 7e5, also for [[0, 1e30], [0, 0]], and in float32 it is off by 20% for
    # [[0, 1000], [-1000, 0]], where ATen is off by 0.04%.
    if x.size == 0 or x.shape[-1] == 1:
        return lax.exp(x)
    wide = x.astype(np.result_type(x.dtype, np.float64))
    norm = lax.reduce_max(lax.reduce_sum(lax.abs(wide), (x.ndim - 2,)), (x.ndim - 2,))
    finite = is_finite(norm)
    # s (`halvings`) makes the norm of x / 2**s at most 1. Then the terms after the 20th power are below the rounding error.
    _, exponent = frexp(norm)
    halvings = jnp.where(finite, jnp.maximum(exponent, 0), 0)
    # x is scaled in two steps, as 2**s may overflow.
    first_halvings = halvings // 2
    for shift in (first_halvings, halvings - first_halvings):
        wide = wide * expand_leading(power_of_two(lax.neg(shift), np.dtype(norm.dtype)), x.shape)

    def square(step: Array, result: Array) -> Array:
        return lax.select(expand_leading(step < halvings, x.shape), matmul(result, result), result)

    result = lax.fori_loop(np.int32(0), jnp.max(halvings), square, _taylor(wide))
    return nan_unless(finite, convert(result, x.dtype))


def _taylor(x: Array) -> Array:
    """Returns the Taylor polynomial of exp(x) of degree 20, by the Paterson-Stockmeyer method: Horner's rule in the fourth power of x."""
    square = matmul(x, x)
    cube, fourth = matmul(square, x), matmul(square, square)
    total = lax.mul(fourth, full_like(x, 1 / math.factorial(20)))
    for lowest_degree in range(16, -1, -4):
        if lowest_degree < 16:
            total = matmul(fourth, total)
        for offset, power in enumerate((identity(x.shape[-1], x.dtype, x.shape[:-2]), x, square, cube)):
            total = lax.add(total, lax.mul(power, full_like(power, 1 / math.factorial(lowest_degree + offset))))
    return total


@lowers(aten.linalg_cross.default)
def linalg_cross(x: Array, y: Array, *, dim: int = -1) -> Array:
    """The cross products of vectors along one dimension.

    Shape:  x and y, broadcast against each other; `dim` has size 3.
    Dtype:  that of x and y.
    """
    shape = broadcast_shapes([x.shape, y.shape])
    dim = wrap(dim, len(shape))
    a, b = ([lax.slice_in_dim(expand(z, shape), index, index + 1, axis=dim) for index in range(3)] for z in (x, y))
    pairs = ((1, 2), (2, 0), (0, 1))
    return lax.concatenate([lax.sub(lax.mul(a[i], b[j]), lax.mul(a[j], b[i])) for i, j in pairs], dim)
