"""The comparison of a compiled call's results with those of eager mode. It returns the difference, and never raises for one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.testing._comparison import default_tolerances
from torch.utils import _pytree as pytree

Tolerance = tuple[float, float]  # relative, absolute


@dataclass(frozen=True)
class Difference:
    """A difference of two results.

    Attributes:
        kind: "structure", "dtype", "shape", "stride", "bits", "aliasing" or "value".
        text: A description with both values.
    """

    kind: str
    text: str


def leaves(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def form(actual: Any, expected: Any, *, strides: bool = True) -> Difference | None:
    """Compares everything except the values of tensors. Python numbers are compared here."""
    flat_actual, spec_actual = pytree.tree_flatten(actual)
    flat_expected, spec_expected = pytree.tree_flatten(expected)
    if spec_actual != spec_expected:
        return Difference("structure", f"{spec_actual}, eager gives {spec_expected}")
    for index, (actual_leaf, expected_leaf) in enumerate(zip(flat_actual, flat_expected, strict=True)):
        difference = _form_of_one(actual_leaf, expected_leaf, strides)
        if difference is not None:
            return Difference(difference.kind, f"result {index}: {difference.text}")
    return None


def _form_of_one(actual: Any, expected: Any, strides: bool) -> Difference | None:
    if type(actual) is not type(expected):
        return Difference("structure", f"{type(actual).__name__}, eager gives {type(expected).__name__}")
    if not isinstance(expected, torch.Tensor):
        is_same = actual == expected or (actual != actual and expected != expected)
        return None if is_same else Difference("value", f"{actual!r}, eager gives {expected!r}")
    for name, kind in (("dtype", "dtype"), ("shape", "shape"), ("device", "structure"), ("layout", "structure")):
        if getattr(actual, name) != getattr(expected, name):
            return Difference(kind, f"{name} {getattr(actual, name)}, eager gives {getattr(expected, name)}")
    if expected.layout is not torch.strided:
        return None
    if strides and significant_strides(actual) != significant_strides(expected):
        return Difference("stride", f"shape {tuple(expected.shape)}: strides {actual.stride()}, eager gives {expected.stride()}")
    for name in ("is_conj", "is_neg"):
        if getattr(actual, name)() != getattr(expected, name)():
            return Difference("bits", f"{name} {getattr(actual, name)()}, eager gives {getattr(expected, name)()}")
    return None


def significant_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the strides of the dimensions with more than one element."""
    return tuple(step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1) if tensor.numel() else ()


def aliasing(inputs: tuple[Sequence[torch.Tensor], Any], expected: tuple[Sequence[torch.Tensor], Any]) -> Difference | None:
    """Compares which tensors share storage, with which offsets, and which are the same object. Each side is (inputs, outputs)."""
    mine, theirs = (_sharing([*tensors, *leaves(outputs)], len(tensors)) for tensors, outputs in (inputs, expected))
    if mine == theirs:
        return None
    count = len(inputs[0])
    names = [f"input {i}" for i in range(count)] + [f"result {i}" for i in range(len(leaves(inputs[1])))]

    def text(pairs: set[tuple[int, int, str]]) -> str:
        return ", ".join(f"{names[i]} {how} {names[j]}" for i, j, how in sorted(pairs)) or "nothing"

    return Difference("aliasing", f"only compiled: {text(mine - theirs)}; only eager: {text(theirs - mine)}")


def _sharing(tensors: Sequence[torch.Tensor], inputs: int) -> set[tuple[int, int, str]]:
    found = set()
    for j, second in enumerate(tensors):
        for i, first in enumerate(tensors[:j]):
            if first is second:
                found.add((i, j, "is"))
            elif j >= inputs and _share(first, second):
                found.add((i, j, "starts as" if first.data_ptr() == second.data_ptr() else "shares storage with"))
    return found


def _share(first: torch.Tensor, second: torch.Tensor) -> bool:
    if not (first.layout is second.layout is torch.strided and first.numel() and second.numel()):
        return False
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def values(
    actual: Any,
    expected: Any,
    tolerance: Callable[[torch.dtype], Tolerance],
    reference: Callable[[], Any] = lambda: None,
    what: str = "result",
) -> Difference | None:
    """Compares the values of tensors of equal form.

    Each value must be within the tolerance of eager mode's, or no farther from a reference than eager mode's values are.

    Args:
        reference: Returns the same results, computed in float64 or complex128, or None if this is not possible.
    """
    pairs = list(zip(leaves(actual), leaves(expected), strict=True))
    wrong = [index for index, (mine, theirs) in enumerate(pairs) if not close(mine, theirs, tolerance(theirs.dtype)).all()]
    if not wrong:
        return None
    wide = leaves(reference())
    for index in wrong:
        mine, theirs = (plain(tensor) for tensor in pairs[index])
        ref = plain(wide[index]) if len(wide) == len(pairs) else None
        limits = tolerance(theirs.dtype)
        bad = ~close(mine, theirs, limits)
        if ref is not None and ref.shape == theirs.shape and ref.is_complex() == theirs.is_complex():
            bad &= ~no_farther(mine, theirs, ref, limits)
        if bad.any():
            return Difference("value", f"{what} {index}: {_worst(mine, theirs, ref, bad)}")
    return None


def plain(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return tensor.resolve_conj().resolve_neg()


def close(mine: torch.Tensor, theirs: torch.Tensor, tolerance: Tolerance) -> torch.Tensor:
    mine, theirs = plain(mine), plain(theirs)
    if theirs.dtype.is_floating_point or theirs.dtype.is_complex:
        wide = torch.complex128 if theirs.is_complex() else torch.float64
        return torch.isclose(mine.to(wide), theirs.to(wide), rtol=tolerance[0], atol=tolerance[1], equal_nan=True)
    return mine == theirs


def no_farther(mine: torch.Tensor, theirs: torch.Tensor, ref: torch.Tensor, tolerance: Tolerance) -> torch.Tensor:
    """For each element: True if it approximates `ref` as well as eager mode's results do.

    Where all three are finite, its error is at most eager mode's largest error, measured absolutely or in units of the tolerance.
    Elsewhere, it is equal to `ref` in this dtype.
    """
    same = close(mine, ref.to(mine.dtype), tolerance)
    if not (theirs.dtype.is_floating_point or theirs.dtype.is_complex):
        return same
    wide = torch.complex128 if theirs.is_complex() else torch.float64
    mine, theirs, ref = mine.to(wide), theirs.to(wide), ref.to(wide)
    finite = mine.isfinite() & theirs.isfinite() & ref.isfinite()
    if not finite.any():
        return same
    unit = tolerance[1] + tolerance[0] * ref.abs()
    error, allowed = (mine - ref).abs(), (theirs - ref).abs()
    within = (error <= allowed[finite].max()) | (error / unit <= (allowed / unit)[finite].max())
    return torch.where(finite, within | same, same)


def _worst(mine: torch.Tensor, theirs: torch.Tensor, ref: torch.Tensor | None, bad: torch.Tensor) -> str:
    index = bad.nonzero()[0].tolist()
    texts = [f"{mine[tuple(index)].item()}, eager gives {theirs[tuple(index)].item()}"]
    if ref is not None and ref.shape == theirs.shape:
        texts.append(f"the reference {ref[tuple(index)].item()}")
    return f"{', '.join(texts)} at {index}; {int(bad.sum())} of {bad.numel()} elements differ"


def default_tolerance(dtype: torch.dtype) -> Tolerance:
    return default_tolerances(dtype)
