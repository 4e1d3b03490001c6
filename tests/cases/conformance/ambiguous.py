"""Ops whose results are not unique, and the unique properties of the results.

Each function takes a call's result, its first argument and the other arguments, and returns tensors that are equal for all correct results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Unique = Callable[[Any, Tensor, Sequence[Any], Mapping[str, Any]], list[Tensor]]


def _singular(u: Tensor, s: Tensor, vh: Tensor) -> list[Tensor]:
    """Returns the singular values, the product, and products that show that the vectors are orthonormal."""
    rank = s.shape[-1]
    return [s, (u[..., :rank] * s.unsqueeze(-2)) @ vh[..., :rank, :], u.mH @ u, vh @ vh.mH]


def _svd(result: Any, _: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """For torch.svd: its last result is not transposed, and without compute_uv the vectors are zeros."""
    u, s, v = result
    return _singular(u, s, v.mH) if _argument(args, kwargs, 1, "compute_uv", True) else [u, s, v]


def _lowrank(result: Any, *_: Any) -> list[Tensor]:
    u, s, v = result
    return _singular(u, s, v.mH)


def _eigh(result: Any, *_: Any) -> list[Tensor]:
    values, vectors = result
    return [values, (vectors * values.unsqueeze(-2)) @ vectors.mH, vectors.mH @ vectors]


def _eig(result: Any, matrix: Tensor, *_: Any) -> list[Tensor]:
    """Returns the eigenvalues, the residuals of the eigenvectors, and the lengths of the eigenvectors."""
    values, vectors = result
    return [values, matrix.to(vectors.dtype) @ vectors - vectors * values.unsqueeze(-2), vectors.norm(dim=-2)]


def _qr(result: Any, *_: Any) -> list[Tensor]:
    """Returns the product, Q's product with itself, and R's lower triangle; without Q, R's product with itself."""
    q, r = result
    return [q @ r, q.mH @ q, r.tril(-1)] if q.numel() else [r.mH @ r, r.tril(-1)]


def _geqrf(result: Any, *_: Any) -> list[Tensor]:
    packed, tau = result
    rank = tau.shape[-1]
    q = torch.linalg.householder_product(packed[..., :rank], tau)
    return [q @ packed.triu()[..., :rank, :], q.mH @ q]


def _lu(result: Any, *_: Any) -> list[Tensor]:
    """Returns the product, the other triangles of the factors, and whether each multiplier is at most one."""
    permutation, lower, upper = result
    product = lower @ upper
    return [permutation.to(product.dtype) @ product, lower.abs() <= 1 + 1e-5, lower.triu(1), upper.tril(-1)]


def _lu_factor(result: Any, *_: Any) -> list[Tensor]:
    return [*_lu(torch.lu_unpack(result[0], result[1])), *result[2:]]


def _picked(position: int) -> Unique:
    """For (values, indices) along a dimension: any of equal values may be picked.

    Args:
        position: The index of the argument that is the dimension.
    """

    def unique(result: Any, source: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        if isinstance(result, Tensor):
            return [result]
        values, indices = result
        return [values, _at(source, indices, _argument(args, kwargs, position, "dim", -1))]

    return unique


def _sort(result: Any, source: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Returns the sorted values, the values at the indices, and the sorted indices, which show that they are a permutation."""
    values, indices = result
    return [values, *_argsort(indices, source, args, kwargs)]


def _argsort(indices: Tensor, source: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    if kwargs.get("stable"):
        return [indices]
    dim = _argument(args, kwargs, 0, "dim", -1)
    return [_at(source, indices, dim), indices.sort(dim)[0] if indices.dim() else indices]


def _at(source: Tensor, indices: Tensor, dim: int) -> Tensor:
    """Returns the values at indices along a dimension. The indices may lack the dimension."""
    if source.dim() == 0:
        return source.expand(indices.shape)
    if indices.dim() < source.dim():
        return source.gather(dim, indices.unsqueeze(dim)).squeeze(dim)
    return source.gather(dim, indices)


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], position: int, name: str, default: Any) -> Any:
    return kwargs.get(name, args[position] if position < len(args) else default)


# The keys are names of entries, without "_refs.".
UNIQUE: dict[str, Unique] = {
    "argsort": _argsort,
    "cummax": _picked(0),
    "cummin": _picked(0),
    "geqrf": _geqrf,
    "kthvalue": _picked(1),
    "linalg.eig": _eig,
    "linalg.eigh": _eigh,
    "linalg.lu": _lu,
    "linalg.lu_factor": _lu_factor,
    "linalg.lu_factor_ex": _lu_factor,
    "linalg.qr": _qr,
    "linalg.svd": lambda result, *_: _singular(*result),
    "lu": _lu_factor,
    "max.reduction_with_dim": _picked(0),
    "median": _picked(0),
    "min.reduction_with_dim": _picked(0),
    "mode": _picked(0),
    "nanmedian": _picked(0),
    "pca_lowrank": _lowrank,
    "qr": _qr,
    "sort": _sort,
    "svd": _svd,
    "svd_lowrank": _lowrank,
    "topk": _picked(1),
}
