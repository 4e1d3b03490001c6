"""The comparison of a compiled call's results with eager's. It says what differs; it never raises for a difference."""

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
    """kind: "structure", "dtype", "shape", "stride", "bits", "aliasing", "value"; text: what is where."""

    kind: str
    text: str


def leaves(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def form(actual: Any, expected: Any, *, strides: bool = True) -> Difference | None:
    """Everything but the values of tensors. Python numbers are compared here."""
    flat_actual, spec_actual = pytree.tree_flatten(actual)
    flat_expected, spec_expected = pytree.tree_flatten(expected)
    if spec_actual != spec_expected:
        return Difference("structure", f"{spec_actual}, eager gives {spec_expected}")
    for index, (mine, theirs) in enumerate(zip(flat_actual, flat_expected, strict=True)):
        found = _form_of_one(mine, theirs, strides)
        if found is not None:
            return Difference(found.kind, f"result {index}: {found.text}")
    return None


def _form_of_one(mine: Any, theirs: Any, strides: bool) -> Difference | None:
    if type(mine) is not type(theirs):
        return Difference("structure", f"{type(mine).__name__}, eager gives {type(theirs).__name__}")
    if not isinstance(theirs, torch.Tensor):
        same = mine == theirs or (mine != mine and theirs != theirs)
        return None if same else Difference("value", f"{mine!r}, eager gives {theirs!r}")
    for name, kind in (("dtype", "dtype"), ("shape", "shape"), ("device", "structure"), ("layout", "structure")):
        if getattr(mine, name) != getattr(theirs, name):
            return Difference(kind, f"{name} {getattr(mine, name)}, eager gives {getattr(theirs, name)}")
    if theirs.layout is not torch.strided:
        return None
    if strides and significant_strides(mine) != significant_strides(theirs):
        return Difference("stride", f"shape {tuple(theirs.shape)}: strides {mine.stride()}, eager gives {theirs.stride()}")
    for name in ("is_conj", "is_neg"):
        if getattr(mine, name)() != getattr(theirs, name)():
            return Difference("bits", f"{name} {getattr(mine, name)()}, eager gives {getattr(theirs, name)()}")
    return None


def significant_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides of the dimensions in which there is anything to stride over."""
    return tuple(step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1) if tensor.numel() else ()


def aliasing(inputs: tuple[Sequence[torch.Tensor], Any], expected: tuple[Sequence[torch.Tensor], Any]) -> Difference | None:
    """Which tensors share storage, at which offsets, and which are the very same object. Each side: (inputs, outputs)."""
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
    """Values of tensors of equal form: each within tolerance of eager's, or no farther from the wide reference than eager's is.

    reference: gives the same results computed in float64 or complex128, or None where that cannot be.
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
    """For each element: is it as good an approximation of `ref` as eager's results are?

    Where all three are finite: its error is at most eager's largest error, measured absolutely or in units of the tolerance. Elsewhere: it
    is what `ref` would be in this dtype.
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
    where = bad.nonzero()[0].tolist()
    texts = [f"{mine[tuple(where)].item()}, eager gives {theirs[tuple(where)].item()}"]
    if ref is not None and ref.shape == theirs.shape:
        texts.append(f"the reference {ref[tuple(where)].item()}")
    return f"{', '.join(texts)} at {where}; {int(bad.sum())} of {bad.numel()} elements differ"


def default_tolerance(dtype: torch.dtype) -> Tolerance:
    return default_tolerances(dtype)
