"""A program run step by step in eager mode: what eager mode leaves undefined is refused, and rounding errors can be imitated.

A compiler may round elsewhere than eager mode does, so results that are not exact are compared within bounds; and a program in which
another rounding would change a comparison, an integer or an index has no one right result. Both are found out by running the program
several times, each inexact number moved by about its dtype's precision.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .program import Program, Step, evaluate

# The largest and the smallest magnitude that a step may give, by dtype: far from overflow, and from the denormals that XLA flushes.
LIMITS = {torch.float16: (1e3, 1e-3), torch.complex64: (1e5, 1e-6)}
LIMIT = (1e6, 1e-6)
NOISE = {
    torch.float16: 1e-3,
    torch.bfloat16: 8e-3,
    torch.float32: 1e-6,
    torch.float64: 2e-15,
    torch.complex64: 1e-6,
    torch.complex128: 2e-15,
}


class Rejected(Exception):
    """Eager mode refuses the program, or does not define its results."""


@contextlib.contextmanager
def strict_warnings() -> Iterator[None]:
    """Inside, a warning is an exception, each time: PyTorch gives many of them only once in a process."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
    finally:
        torch.set_warn_always(before)


Runner = Callable[..., Any]


class Stepwise:
    """Runs a program's steps on the live tensors of its inputs.

    noise: a generator for the signs of imitated rounding errors, or None.
    After a run, `values` holds every value, and `random` the numbers of those that depend on random numbers.
    """

    def __init__(self, program: Program, noise: torch.Generator | None = None) -> None:
        self.program = program
        self.noise = noise
        self.values: list[torch.Tensor] = []
        self.random: set[int] = set()
        self._touched: set[int] = set()
        self._inputs: list[torch.Tensor] = []

    def run(self, inputs: Sequence[torch.Tensor]) -> Any:
        """The program's result. Raises: Rejected, or whatever eager mode raises."""
        self.values = list(inputs)
        # What an earlier run has written into an input stays there.
        touched = self._touched & set(map(storage_key, inputs))
        self._inputs = list(inputs)  # kept until the next run, so that its inputs lie elsewhere unless they are these
        for step in self.program.steps:
            operands = [self.values[number] for number in step.operands]
            results = self._step(step, operands)
            if step.random or any(storage_key(operand) in touched for operand in operands):
                touched.update(map(storage_key, results + operands[:1] if step.writes else results))
            self.values += results
        self._touched = touched & set(map(storage_key, self._inputs))
        self.random = {number for number, value in enumerate(self.values) if storage_key(value) in touched}
        return self.program.pack(self.values)

    def _step(self, step: Step, operands: list[torch.Tensor]) -> list[torch.Tensor]:
        if step.requires and not evaluate(step.requires, operands):
            raise Rejected(f"{step.op} requires {step.requires}")
        finite = all(_is_finite(operand) for operand in operands)
        exact = self._without_rounding(step, operands) if self.noise is not None else None
        results = run_step(step, operands)
        storages = set(map(storage_key, operands))
        made = [result for result in results if storage_key(result) not in storages]
        if not finite and (made or step.writes) and any(tensor.is_complex() for tensor in (*operands, *made)):
            # Which part of an infinite complex number is NaN differs between torch's own kernels (C99, Annex G, leaves it open), and adding
            # such numbers makes NaNs of finite parts, since eager mode multiplies by alpha = 1 + 0j first.
            raise Rejected(f"{step.op} with infinite complex numbers, whose parts are not defined one by one")
        written = operands[: int(step.writes)]
        # What is written as integers may be read as floating point elsewhere.
        reread = [
            value
            for value in self.values
            if any(value.dtype != tensor.dtype and storage_key(value) == storage_key(tensor) for tensor in written)
        ]
        for tensor in [*made, *written, *reread]:
            _check_range(step, tensor, finite)
        if self.noise is not None:
            references = exact if exact is not None else [None] * (len(results) + 1)
            for tensor, reference in zip([*results, operands[0] if operands else None], references, strict=True):
                if tensor is not None and (any(tensor is new for new in made) or (step.writes and tensor is operands[0])):
                    _disturb(tensor, reference, self.noise)
        return results

    def _without_rounding(self, step: Step, operands: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """The step's results, and operand 0 after it, computed in float64; None where that cannot be done."""
        if step.random:
            return None
        try:
            with torch.no_grad():
                inexact = any(operand.is_floating_point() or operand.is_complex() for operand in operands)
                wide = [_widen(operand.detach(), not inexact) for operand in operands]
                results = run_step(step, wide)
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
            return None
        return [*results, wide[0] if wide else torch.empty(0)]


def run_step(step: Step, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The step's results on live tensors.

    Raises: Rejected if it gives something else than its number of tensors.
    """
    result = evaluate(step.code, operands, step.results > 0)
    results = [] if step.results == 0 else [result] if step.results == 1 else list(result)
    if len(results) != step.results or not all(isinstance(item, torch.Tensor) for item in results):
        raise Rejected(f"{step.op} gives {type(result)}")
    return results


def storage_key(tensor: torch.Tensor) -> int:
    """What tensors on the same memory have in common while they live."""
    return tensor.untyped_storage()._cdata


def _widen(tensor: torch.Tensor, integers: bool) -> torch.Tensor:
    """A copy in which rounding hardly matters; integers stay (they may be indices) unless there is nothing else."""
    if tensor.is_complex():
        return tensor.to(torch.complex128, copy=True)
    return tensor.to(torch.float64, copy=True) if tensor.is_floating_point() or integers else tensor.clone()


def _is_finite(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex()) or bool(tensor.detach().isfinite().all())


def _check_range(step: Step, tensor: torch.Tensor, finite: bool) -> None:
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
        return
    size = tensor.detach().abs()
    size = size[size.isfinite()]
    if finite and size.numel() < tensor.numel():
        raise Rejected(f"{step.op} gives infinities or NaNs")
    most, least = LIMITS.get(tensor.dtype, LIMIT)
    if size.numel() and (float(size.max()) > most or bool(((size > 0) & (size < least)).any())):
        raise Rejected(f"{step.op} gives very large or very small numbers")


def _disturb(tensor: torch.Tensor, reference: torch.Tensor | None, noise: torch.Generator) -> None:
    """Move every element that is not exact by about its dtype's precision, up or down."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel() or overlaps_itself(tensor):
        return
    tensor = tensor.detach()
    if reference is not None and reference.shape == tensor.shape:
        exact = reference.to(torch.complex128) == tensor.to(torch.complex128)
    else:
        exact = torch.zeros(tensor.shape, dtype=torch.bool)
    if bool(exact.all()):
        return
    amount = NOISE[tensor.dtype]
    parts = [tensor]
    if tensor.is_complex():
        plain = torch.view_as_real(tensor.resolve_conj())
        parts = [plain[..., 0], plain[..., 1]]
    moved = []
    for part in parts:
        signs = torch.randint(0, 2, part.shape, generator=noise, dtype=torch.float64) * 2 - 1
        moved.append(torch.where(exact, part.double(), part.double() * (1 + amount * signs)))
    tensor.data.copy_(torch.complex(*moved) if len(moved) == 2 else moved[0])


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements lie in one place."""
    return len(places(tensor)) != tensor.numel()


def places(tensor: torch.Tensor) -> set[int]:
    """The positions of the tensor's elements in its storage, in elements."""
    found = {tensor.storage_offset()} if tensor.numel() else set()
    for size, step in zip(tensor.shape, tensor.stride(), strict=True):
        found = {place + index * step for place in found for index in range(size)}
    return found
