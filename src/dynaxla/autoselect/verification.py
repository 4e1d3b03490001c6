"""Runs an engine, and compares it with eager mode: results, gradients, writes to inputs, and shared memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..runtime import private
from .agreement import compare
from .clones import by_storage, clones, content, in_float64, sharing

Call = Callable[..., Any]


@dataclass(frozen=True)
class Run:
    """The effects of a call.

    Attributes:
        args: the inputs after the call.
        results: its results.
        gradients: of the inputs that require them; None in inference.
        seconds: the time of the call, with the backward pass.
    """

    args: Sequence[Any]
    results: Sequence[Any]
    gradients: Sequence[torch.Tensor | None] | None
    seconds: float


def run(call: Call, args: Sequence[Any], device: torch.device, training: bool) -> Run:
    """Calls an engine, and in training runs its backward pass from fixed pseudorandom gradients of the results.

    The `.grad` of leaves does not change.

    Raises: the errors of the engine.
    """
    start = now(device)
    results = list(call(*args))
    gradients = _gradients(results, args) if training else None
    return Run(args, results, gradients, now(device) - start)


def now(device: torch.device) -> float:
    """Returns the time in seconds after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _gradients(results: Sequence[Any], args: Sequence[Any]) -> list[torch.Tensor | None]:
    ends = [item for item in results if isinstance(item, torch.Tensor) and item.requires_grad and item.grad_fn is not None]
    wanted = [item for item in args if isinstance(item, torch.Tensor) and item.requires_grad]
    if not ends or not wanted:
        return []
    tangents = [_tangent(end) for end in ends]
    return list(torch.autograd.grad(ends, wanted, tangents, allow_unused=True))


def _tangent(end: torch.Tensor) -> torch.Tensor:
    """Returns a gradient with magnitudes from 0.5 to 1.5 and both signs, computed from indices, without torch's random generators."""
    with torch.no_grad():
        places = torch.arange(end.numel(), device=end.device, dtype=torch.float64)
        numbers = (torch.frac(places * 0.6180339887) + 0.5) * torch.where(places % 3 == 1, -1.0, 1.0)
        return numbers.reshape(end.shape).to(end.dtype)


class Expected:
    """Runs a call in eager mode, as the reference for engines.

    Args:
        eager: TorchDynamo's graph as it is. In inference it runs on the user's own inputs, and its results are those of the call; in
            training it runs on clones.
        args: the inputs.
        written: the positions of the inputs that the graph writes to. The version counters of tensors do not show all writes (statistics
            of a batch norm).

    Attributes:
        run: the run of eager mode.
    """

    def __init__(self, eager: Call, args: Sequence[Any], device: torch.device, training: bool, written: Collection[int]) -> None:
        self._eager, self._device, self._training = eager, device, training
        self._before = args
        self._written = sharing(args, written)
        self.run = run(eager, clones(args) if training else args, device, training)

    def difference(self, mine: Run) -> str:
        """Returns a description of the first difference between an engine's run on clones and eager mode, or ""."""
        return self._of_facts(mine) or self._of_inputs(mine) or self._of_values(mine)

    def _of_facts(self, mine: Run) -> str:
        theirs = self.run
        if len(mine.results) != len(theirs.results):
            return f"it gives {len(mine.results)} results, eager mode {len(theirs.results)}"
        for index, (one, other) in enumerate(zip(mine.results, theirs.results, strict=True)):
            if _facts(one) != _facts(other):
                return f"result {index} is {_facts(one)}, eager mode's {_facts(other)}"
        for index, (one, other) in enumerate(zip(_places(mine), _places(theirs), strict=True)):
            if one != other:
                return f"result {index} shares memory with {one or 'nothing'}, eager mode's with {other or 'nothing'}"
        return ""

    def _of_inputs(self, mine: Run) -> str:
        for places in by_storage(self.run.args).values():
            if torch.equal(content(mine.args[places[0]]), content(self.run.args[places[0]])):
                continue
            if not self._written.issuperset(places):
                return f"it writes to input {places[0]}, eager mode does not"
            for place in places:
                found = compare(mine.args[place].detach(), self.run.args[place].detach())
                if not found.agrees:
                    return f"input {place} differs after the call: {found.detail or f'it is {found.error:.1e} off'}"
        return ""

    def _of_values(self, mine: Run) -> str:
        pairs: list[tuple[str, Sequence[Any], Sequence[Any]]] = [("the results", mine.results, self.run.results)]
        if mine.gradients is not None and self.run.gradients is not None:
            if [item is None for item in mine.gradients] != [item is None for item in self.run.gradients]:
                return "it gives gradients to other inputs than eager mode"
            pairs.append(("the gradients", mine.gradients, self.run.gradients))
        with torch.no_grad():
            if all(compare(one, other, gradients=index > 0).agrees for index, (_, one, other) in enumerate(pairs)):
                return ""
        wide = self._in_float64()
        references: Sequence[Any] = (None, None) if wide is None else (wide.results, wide.gradients)
        with torch.no_grad():
            for index, ((what, one, other), reference) in enumerate(zip(pairs, references, strict=False)):
                found = compare(one, other, reference, gradients=index > 0)
                if not found.agrees:
                    return f"{what} differ: {found.detail or f'they are {found.error:.1e} off'}"
        return ""

    def _in_float64(self) -> Run | None:
        """Runs the graph in float64. None if that fails, or if the inputs have been overwritten."""
        if self._written and not self._training:
            return None
        try:
            return run(self._eager, in_float64(self._before), self._device, self._training)
        except Exception:
            return None


def _facts(item: Any) -> tuple[Any, ...]:
    if not isinstance(item, torch.Tensor):
        return type(item).__name__, None if isinstance(item, float) else item
    strides = [step for size, step in zip(item.shape, item.stride(), strict=True) if size != 1] if item.numel() else []
    return "tensor", tuple(item.shape), item.dtype, str(item.device), tuple(strides), item.requires_grad, item.is_conj(), item.is_neg()


def _places(found: Run) -> list[str]:
    """Returns for each result the input or earlier result that shares its storage, with the offset in that of an input, or ""."""
    owners: dict[int, str] = {}
    for index, item in enumerate(found.args):
        if isinstance(item, torch.Tensor) and item.untyped_storage().nbytes():
            owners.setdefault(private.storage_id(item), f"input {index}")
    places = []
    for index, item in enumerate(found.results):
        if not isinstance(item, torch.Tensor) or not item.untyped_storage().nbytes():
            places.append("")
            continue
        storage = private.storage_id(item)
        owner = owners.setdefault(storage, f"result {index}")
        places.append("" if owner == f"result {index}" else f"{owner}, at {item.storage_offset()}" if owner.startswith("input") else owner)
    return places
