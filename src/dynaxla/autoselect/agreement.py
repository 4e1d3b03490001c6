"""Decides if an engine's result is right: close to eager mode's result, or about as close to the float64 result as eager mode's is."""

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
# Gradients are compared by their norms, with a tolerance that is larger by this factor. If rounding moves an activation over the edge of a
# ReLU, or one maximum over another, single numbers change by much more than rounding. In which layers this happens is a matter of chance.
# So the error of an eager gradient against float64 is taken to be at least the error of all gradients together.
GRADIENT_FACTOR = 10
# Some gradients are pure rounding noise, for example of the bias of attention's keys. So the norm of a gradient is taken to be at least
# this fraction of the norm of all gradients.
GRADIENT_PART = 0.01
# A result beyond the tolerance is still right in two cases: its distance from the float64 result is at most this multiple of the distance
# of eager mode's result; or its distance from eager mode's result is at most this multiple of the change of eager mode's result when inputs
# and parameters are perturbed by the rounding of their dtypes.
MULTIPLE = 3.0


@dataclass(frozen=True)
class NumericalAgreement:
    """The result of a comparison.

    An error is the largest difference divided by the largest magnitude of the reference. For gradients it is the norm of the difference
    divided by the norm of the reference. The errors here are those of the worst output.

    Attributes:
        agrees: True if the result is right.
        error: the error of the result, with eager mode's result as the reference.
        own_error: the error of the result, with the float64 result as the reference; None without a float64 result.
        eager_error: the error of eager mode's result, with the float64 result as the reference; None without a float64 result.
        spread: the change of eager mode's result if inputs and parameters change by the rounding of their dtypes; 0 if not measured.
        detail: a difference in structure, metadata or non-floating values; "" if there is none.
    """

    agrees: bool
    error: float = 0.0
    own_error: float | None = None
    eager_error: float | None = None
    spread: float = 0.0
    detail: str = ""


def compare(
    result: Any, eager: Any, reference: Any = None, *, gradients: bool = False, perturbed: Sequence[Any] = ()
) -> NumericalAgreement:
    """Compares an engine's result with the result of eager mode.

    Args:
        result: the engine's result: a tensor, a plain value, or a pytree of these.
        eager: eager mode's result.
        reference: the result in float64, or None.
        gradients: True if the values are gradients, which are compared by their norms (see `GRADIENT_FACTOR`).
        perturbed: eager mode's results for inputs and parameters that differ by rounding (see `perturbed_results`).
    """
    flat_result, result_structure = pytree.tree_flatten(result)
    flat_eager, eager_structure = pytree.tree_flatten(eager)
    if result_structure != eager_structure:
        return NumericalAgreement(False, detail=f"structure {result_structure}, eager gives {eager_structure}")
    flat_reference = pytree.tree_leaves(reference) if reference is not None else [None] * len(flat_eager)
    if len(flat_reference) != len(flat_eager):
        flat_reference = [None] * len(flat_eager)
    norms = _GradientNorms.of(flat_eager, flat_reference) if gradients else None
    flat_perturbed = list(zip(*map(pytree.tree_leaves, perturbed), strict=True)) if perturbed else [()] * len(flat_eager)
    leaves = zip(flat_result, flat_eager, flat_reference, flat_perturbed, strict=True)
    return worst([_compare_leaf(*items, norms) for items in leaves])


@dataclass(frozen=True)
class _GradientNorms:
    """The norm and the error of all gradients of eager mode together.

    Attributes:
        norm: the norm of all gradients.
        error: the norm of their difference from the float64 gradients, divided by the norm of these; 0 without float64 gradients.
    """

    norm: float
    error: float

    @staticmethod
    def of(eager: list[Any], reference: list[Any]) -> _GradientNorms:
        pairs = [(gradient, exact) for gradient, exact in zip(eager, reference, strict=True) if isinstance(gradient, torch.Tensor)]
        norm = _norm([gradient for gradient, _ in pairs])
        if not all(isinstance(exact, torch.Tensor) and exact.shape == gradient.shape for gradient, exact in pairs):
            return _GradientNorms(norm, 0.0)
        error_norm = _norm([gradient.double() - exact for gradient, exact in pairs])
        return _GradientNorms(norm, error_norm / (_norm([exact for _, exact in pairs]) or 1.0))


def _norm(tensors: list[torch.Tensor]) -> float:
    """Returns the Euclidean norm of all elements of the tensors together."""
    return math.hypot(*(torch.linalg.vector_norm(tensor.detach().double()).item() for tensor in tensors))


def worst(agreements: list[NumericalAgreement]) -> NumericalAgreement:
    """Returns the comparison with the largest error. If some comparisons do not agree, returns one of these."""
    return min(agreements, key=lambda item: (item.agrees, -item.error), default=NumericalAgreement(True))


def _compare_leaf(result: Any, eager: Any, reference: Any, perturbed: Sequence[Any], norms: _GradientNorms | None) -> NumericalAgreement:
    if not isinstance(eager, torch.Tensor):
        return NumericalAgreement(
            type(result) is type(eager) and result == eager, detail="" if result == eager else f"{result!r}, eager gives {eager!r}"
        )
    if not isinstance(result, torch.Tensor):
        return NumericalAgreement(False, detail=f"{type(result).__name__}, eager gives a tensor")
    for fact in ("shape", "dtype", "device"):
        if getattr(result, fact) != getattr(eager, fact):
            return NumericalAgreement(False, detail=f"{fact} {getattr(result, fact)}, eager gives {getattr(eager, fact)}")
    if eager.is_complex():
        parts = [
            torch.view_as_real(item) if isinstance(item, torch.Tensor) and item.is_complex() else item
            for item in (result, eager, reference)
        ]
        return _compare_leaf(parts[0], parts[1], parts[2], [torch.view_as_real(item) for item in perturbed], norms)
    if not eager.is_floating_point():
        differing = int((result != eager).sum())
        return NumericalAgreement(
            not differing, float(differing > 0), detail=f"{differing} of {eager.numel()} elements differ" if differing else ""
        )
    min_norm = None if norms is None else GRADIENT_PART * norms.norm
    error = distance(result, eager, min_norm)
    spread = max((distance(variant, eager, min_norm) for variant in perturbed), default=0.0)
    tolerance = TOLERANCE.get(eager.dtype, 0.0) * (1 if norms is None else GRADIENT_FACTOR)
    agrees = error <= max(tolerance, MULTIPLE * spread) < float("inf")
    if not isinstance(reference, torch.Tensor) or reference.shape != eager.shape:
        return NumericalAgreement(agrees, error, spread=spread)
    own_error, eager_error = distance(result, reference, min_norm), distance(eager, reference, min_norm)
    agrees = agrees or own_error <= MULTIPLE * max(eager_error, norms.error if norms else 0.0) < float("inf")
    return NumericalAgreement(agrees, error, own_error, eager_error, spread)


def distance(tensor: torch.Tensor, reference: torch.Tensor, min_norm: float | None = None) -> float:
    """Returns the largest difference divided by the largest magnitude of the reference; infinity if the non-finite values differ.

    Args:
        tensor: the tensor.
        reference: the reference, of the same shape.
        min_norm: if given, the norm of the difference is divided by the norm of the reference instead, or by `min_norm` if that is larger.
    """
    if not reference.numel():
        return 0.0
    actual, expected = tensor.detach().double(), reference.detach().double()
    finite = expected.isfinite()
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    if not bool(torch.where(finite, actual.isfinite(), same).all()):
        return float("inf")
    norm = (lambda x: x.abs().max()) if min_norm is None else torch.linalg.vector_norm
    difference = norm(torch.where(finite, actual - expected, 0.0)).item()
    magnitude = max(norm(torch.where(finite, expected, 0.0)).item(), min_norm or 0.0)
    return difference / magnitude if magnitude else (float("inf") if difference else 0.0)


# The number of results that `perturbed_results` returns.
_PERTURBED_RUNS = 3


def perturbed_results(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> list[Any]:
    """Returns the model's results for inputs and parameters that are perturbed up or down, at random, by the rounding of their dtype.

    The results show how much another order of summation may change the model's result. The model is not changed.
    """
    generator = torch.Generator().manual_seed(0)

    def perturb(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        signs = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor.device, tensor.dtype) * 2 - 1
        return tensor * (1 + signs * torch.finfo(tensor.dtype).eps)

    results = []
    for _ in range(_PERTURBED_RUNS):
        perturbed_model = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in perturbed_model.parameters():
                parameter.copy_(perturb(parameter))
        results.append(pytree.tree_map_only(torch.Tensor, torch.clone, perturbed_model(*map(perturb, inputs))))
    return results


def results_in_float64(model: nn.Module, inputs: list[tuple[torch.Tensor, ...]]) -> list[Any] | None:
    """Returns the model's result for each input in float64; None if an exception is raised, e.g. for lack of memory."""
    try:
        wide = copy.deepcopy(model).double()
        return [wide(*[tensor.double() if tensor.is_floating_point() else tensor for tensor in args]) for args in inputs]
    except Exception:
        return None
