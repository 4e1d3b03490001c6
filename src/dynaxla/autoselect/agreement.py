"""Decides if a result is right: close to eager mode's result, or about as close to the float64 result as eager mode's result is."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

# The largest difference from eager mode's result, relative to the largest magnitude of that result, that counts as rounding.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 2e-2}
# Gradients are compared by their norms. If rounding moves an activation over the edge of a ReLU, or one maximum over another, single
# numbers change by much more than rounding. This happens in random layers. So the error of an eager gradient against float64 counts as at
# least the error of all gradients together. Some gradients, as of the bias of attention's keys, are pure rounding noise. So the norm of a
# gradient counts as at least this part of the norm of all gradients.
GRADIENT_FACTOR = 10
GRADIENT_PART = 0.01
# A result beyond the tolerance is still right if its distance from the float64 result is at most this multiple of eager mode's distance, or
# if its distance from eager mode is at most this multiple of the distance that eager mode's result moves when inputs and parameters are
# perturbed by their own rounding.
MULTIPLE = 3.0


@dataclass(frozen=True)
class NumericalAgreement:
    """The result of a comparison.

    An error is the largest difference divided by the largest magnitude of the reference, for the worst of all outputs.

    Attributes:
        agrees: True if the result is right.
        error: the error of the result, with eager mode's result as the reference.
        own_error: the error of the result, with the float64 result as the reference; None without a float64 result.
        eager_error: the error of eager mode's result, with the float64 result as the reference; None without a float64 result.
        spread: the change of eager mode's result if inputs and parameters change by their rounding; 0 if not measured.
        detail: a difference in structure, metadata or non-floating values; "" if there is none.
    """

    agrees: bool
    error: float = 0.0
    own_error: float | None = None
    eager_error: float | None = None
    spread: float = 0.0
    detail: str = ""


def compare(mine: Any, eager: Any, reference: Any = None, *, gradients: bool = False, perturbed: Sequence[Any] = ()) -> NumericalAgreement:
    """Compares an engine's result with eager mode's.

    Args:
        mine: the engine's result.
        eager: eager mode's result.
        reference: the result in float64, or None.
        gradients: True if the values are gradients, which are compared by their norms (see `GRADIENT_FACTOR`).
        perturbed: eager mode's results for inputs and parameters that differ by rounding.
    """
    flat_mine, structure_mine = pytree.tree_flatten(mine)
    flat_eager, structure_eager = pytree.tree_flatten(eager)
    if structure_mine != structure_eager:
        return NumericalAgreement(False, detail=f"structure {structure_mine}, eager gives {structure_eager}")
    flat_reference = pytree.tree_leaves(reference) if reference is not None else [None] * len(flat_eager)
    if len(flat_reference) != len(flat_eager):
        flat_reference = [None] * len(flat_eager)
    norms = _GradientNorms.of(flat_eager, flat_reference) if gradients else None
    flat_perturbed = list(zip(*map(pytree.tree_leaves, perturbed), strict=True)) if perturbed else [()] * len(flat_eager)
    leaves = zip(flat_mine, flat_eager, flat_reference, flat_perturbed, strict=True)
    return worst([_compare_leaf(*items, norms) for items in leaves])


@dataclass(frozen=True)
class _GradientNorms:
    """Norm and error of all gradients of eager mode together.

    Attributes:
        norm: the norm of all gradients.
        error: the norm of their difference from the float64 gradients, divided by the norm of the float64 gradients; 0 without them.
    """

    norm: float
    error: float

    @staticmethod
    def of(eager: list[Any], reference: list[Any]) -> _GradientNorms:
        pairs = [(mine, other) for mine, other in zip(eager, reference, strict=True) if isinstance(mine, torch.Tensor)]
        norm = _norm([mine for mine, _ in pairs])
        if not all(isinstance(other, torch.Tensor) and other.shape == mine.shape for mine, other in pairs):
            return _GradientNorms(norm, 0.0)
        return _GradientNorms(norm, _norm([mine.double() - other for mine, other in pairs]) / (_norm([other for _, other in pairs]) or 1.0))


def _norm(tensors: list[torch.Tensor]) -> float:
    """Returns the Euclidean norm of all elements of the tensors together."""
    return math.hypot(*(torch.linalg.vector_norm(tensor.detach().double()).item() for tensor in tensors))


def worst(agreements: list[NumericalAgreement]) -> NumericalAgreement:
    """Returns the agreement with the largest error, among those that do not agree if there are any."""
    return min(agreements, key=lambda item: (item.agrees, -item.error), default=NumericalAgreement(True))


def _compare_leaf(mine: Any, eager: Any, reference: Any, perturbed: Sequence[Any], norms: _GradientNorms | None) -> NumericalAgreement:
    if not isinstance(eager, torch.Tensor):
        return NumericalAgreement(
            type(mine) is type(eager) and mine == eager, detail="" if mine == eager else f"{mine!r}, eager gives {eager!r}"
        )
    if not isinstance(mine, torch.Tensor):
        return NumericalAgreement(False, detail=f"{type(mine).__name__}, eager gives a tensor")
    for fact in ("shape", "dtype", "device"):
        if getattr(mine, fact) != getattr(eager, fact):
            return NumericalAgreement(False, detail=f"{fact} {getattr(mine, fact)}, eager gives {getattr(eager, fact)}")
    if eager.is_complex():
        parts = [
            torch.view_as_real(item) if isinstance(item, torch.Tensor) and item.is_complex() else item for item in (mine, eager, reference)
        ]
        return _compare_leaf(parts[0], parts[1], parts[2], [torch.view_as_real(item) for item in perturbed], norms)
    if not eager.is_floating_point():
        differing = int((mine != eager).sum())
        return NumericalAgreement(
            not differing, float(differing > 0), detail=f"{differing} of {eager.numel()} elements differ" if differing else ""
        )
    min_norm = None if norms is None else GRADIENT_PART * norms.norm
    error = distance(mine, eager, min_norm)
    spread = max((distance(other, eager, min_norm) for other in perturbed), default=0.0)
    tolerance = TOLERANCE.get(eager.dtype, 0.0) * (1 if norms is None else GRADIENT_FACTOR)
    agrees = error <= max(tolerance, MULTIPLE * spread) < float("inf")
    if not isinstance(reference, torch.Tensor) or reference.shape != eager.shape:
        return NumericalAgreement(agrees, error, spread=spread)
    own_error, eager_error = distance(mine, reference, min_norm), distance(eager, reference, min_norm)
    agrees = agrees or own_error <= MULTIPLE * max(eager_error, norms.error if norms else 0.0) < float("inf")
    return NumericalAgreement(agrees, error, own_error, eager_error, spread)


def distance(tensor: torch.Tensor, reference: torch.Tensor, min_norm: float | None = None) -> float:
    """Returns the largest difference divided by the largest magnitude of the reference; infinite if the non-finite values differ.

    Args:
        tensor: the tensor.
        reference: the reference, of the same shape.
        min_norm: if given, the norm of the difference is divided by the norm of the reference instead, or by `min_norm` if that is larger.
    """
    if not reference.numel():
        return 0.0
    mine, theirs = tensor.detach().double(), reference.detach().double()
    finite = theirs.isfinite()
    same = (mine == theirs) | (mine.isnan() & theirs.isnan())
    if not bool(torch.where(finite, mine.isfinite(), same).all()):
        return float("inf")
    size = (lambda x: x.abs().max()) if min_norm is None else torch.linalg.vector_norm
    difference = size(torch.where(finite, mine - theirs, 0.0)).item()
    magnitude = max(size(torch.where(finite, theirs, 0.0)).item(), min_norm or 0.0)
    return difference / magnitude if magnitude else (float("inf") if difference else 0.0)


# The number of results that `perturbed_results` returns.
_PERTURBED_RUNS = 3


def perturbed_results(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> list[Any]:
    """Returns the model's results for inputs and parameters that are perturbed up or down, at random, by the rounding of their dtype.

    The results show how much another order of summation may change the model's result. The model is not changed.
    """
    generator = torch.Generator().manual_seed(0)

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        signs = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor.device, tensor.dtype) * 2 - 1
        return tensor * (1 + signs * torch.finfo(tensor.dtype).eps)

    results = []
    for _ in range(_PERTURBED_RUNS):
        mine = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in mine.parameters():
                parameter.copy_(move(parameter))
        results.append(pytree.tree_map_only(torch.Tensor, torch.clone, mine(*map(move, inputs))))
    return results


def in_float64(model: nn.Module, inputs: list[tuple[torch.Tensor, ...]]) -> list[Any] | None:
    """Returns the model's result for each input in float64; None if an exception is raised, e.g. for lack of memory."""
    try:
        wide = copy.deepcopy(model).double()
        return [wide(*[tensor.double() if tensor.is_floating_point() else tensor for tensor in args]) for args in inputs]
    except Exception:
        return None
