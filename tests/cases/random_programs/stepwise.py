"""Runs a program step by step in eager mode. Rejects undefined behaviour, and can simulate rounding errors.

A compiler may round at other points than eager mode. So inexact results are compared within bounds, and a program is rejected if other
rounding would change a comparison, an integer or an index. For both, the program runs several times. In each run, each inexact number
changes by about its dtype's precision.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .program import Program, Step, evaluate

# The largest and smallest magnitude of a step's results, by dtype: far from overflow, and from denormals, which XLA flushes to zero.
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
    """Eager mode rejects the program, or does not define its results."""


@contextlib.contextmanager
def strict_warnings() -> Iterator[None]:
    """In this context, each warning is an exception, even those that PyTorch raises only once in a process."""
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
    """Runs a program's steps on its input tensors.

    Attributes:
        program: the program.
        noise: a generator for the signs of simulated rounding errors, or None.
        values: all values, after a run.
        random: the numbers of the values that depend on random numbers, after a run.
    """

    def __init__(self, program: Program, noise: torch.Generator | None = None) -> None:
        self.program = program
        self.noise = noise
        self.values: list[torch.Tensor] = []
        self.random: set[int] = set()
        self._random_storages: set[int] = set()
        self._inputs: list[torch.Tensor] = []

    def run(self, inputs: Sequence[torch.Tensor]) -> Any:
        """Returns the program's result. Raises Rejected, or the exceptions of eager mode."""
        self.values = list(inputs)
        # Random numbers that an earlier run has written into an input stay there.
        random_storages = self._random_storages & set(map(storage_key, inputs))
        self._inputs = list(inputs)  # kept alive until the next run, so that its new inputs get other storages
        for step in self.program.steps:
            operands = [self.values[number] for number in step.operands]
            results = self._step(step, operands)
            if step.random or any(storage_key(operand) in random_storages for operand in operands):
                random_storages.update(map(storage_key, results + operands[:1] if step.writes else results))
            self.values += results
        self._random_storages = random_storages & set(map(storage_key, self._inputs))
        self.random = {number for number, value in enumerate(self.values) if storage_key(value) in random_storages}
        return self.program.pack(self.values)

    def _step(self, step: Step, operands: list[torch.Tensor]) -> list[torch.Tensor]:
        if step.requires and not evaluate(step.requires, operands):
            raise Rejected(f"{step.op} requires {step.requires}")
        finite = all(_is_finite(operand) for operand in operands)
        exact = self._without_rounding(step, operands) if self.noise is not None else None
        results = run_step(step, operands)
        storages = set(map(storage_key, operands))
        new_results = [result for result in results if storage_key(result) not in storages]
        if not finite and (new_results or step.writes) and any(tensor.is_complex() for tensor in (*operands, *new_results)):
            # Which part of an infinite complex number is NaN differs between torch's kernels (C99, Annex G, does not define it). A sum of
            # such numbers changes finite parts to NaN, because eager mode first multiplies by alpha = 1 + 0j.
            raise Rejected(f"{step.op} with infinite complex numbers, whose parts are not defined one by one")
        written = operands[: int(step.writes)]
        # Integers may be written to memory that another value reads as floating point.
        reread = [
            value
            for value in self.values
            if any(value.dtype != tensor.dtype and storage_key(value) == storage_key(tensor) for tensor in written)
        ]
        for tensor in [*new_results, *written, *reread]:
            _check_range(step, tensor, finite)
        if self.noise is not None:
            references = exact if exact is not None else [None] * (len(results) + 1)
            for tensor, reference in zip([*results, operands[0] if operands else None], references, strict=True):
                if tensor is not None and (any(tensor is new for new in new_results) or (step.writes and tensor is operands[0])):
                    _disturb(tensor, reference, self.noise)
        return results

    def _without_rounding(self, step: Step, operands: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """Returns the step's results, and operand 0 after it, computed in float64; None if that is not possible."""
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
    """Returns the step's results.

    Raises: Rejected if these are not tensors, or not the step's number of results.
    """
    result = evaluate(step.code, operands, step.results > 0)
    results = [] if step.results == 0 else [result] if step.results == 1 else list(result)
    if len(results) != step.results or not all(isinstance(item, torch.Tensor) for item in results):
        raise Rejected(f"{step.op} gives {type(result)}")
    return results


def storage_key(tensor: torch.Tensor) -> int:
    """Returns a key that is equal for tensors with the same storage, while they are alive."""
    return tensor.untyped_storage()._cdata


def _widen(tensor: torch.Tensor, integers: bool) -> torch.Tensor:
    """Returns a copy in higher precision.

    Args:
        tensor: the tensor.
        integers: also convert integers, if no operand is inexact. Otherwise, they may be indices.
    """
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
    """Changes each inexact element by about its dtype's precision, up or down."""
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
    """True if two elements share memory."""
    return len(positions_of(tensor)) != tensor.numel()


def positions_of(tensor: torch.Tensor) -> set[int]:
    """Returns the positions of the tensor's elements in its storage, in elements."""
    positions = {tensor.storage_offset()} if tensor.numel() else set()
    for size, step in zip(tensor.shape, tensor.stride(), strict=True):
        positions = {position + index * step for position in positions for index in range(size)}
    return positions
