"""Runs an engine, and compares it with eager mode: results, gradients, writes to inputs, and shared memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..runtime import private
from .agreement import compare
from .clones import by_storage, clones, in_float64, positions_on_same_storages, storage_bytes

Call = Callable[..., Any]


@dataclass(frozen=True)
class Run:
    """The effects of a call.

    Attributes:
        args: the inputs after the call.
        results: the results of the call.
        gradients: the gradients of the inputs that require gradients; None in inference.
        seconds: the time of the call, in training with its backward pass.
    """

    args: Sequence[Any]
    results: Sequence[Any]
    gradients: Sequence[torch.Tensor | None] | None
    seconds: float


def run(call: Call, args: Sequence[Any], device: torch.device, training: bool) -> Run:
    """Calls an engine. In training the backward pass follows, with the same fixed gradients of the results for each engine.

    The `.grad` of leaves does not change.

    Raises: the engine's exceptions.
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
    differentiable_results = [
        item for item in results if isinstance(item, torch.Tensor) and item.requires_grad and item.grad_fn is not None
    ]
    inputs = [item for item in args if isinstance(item, torch.Tensor) and item.requires_grad]
    if not differentiable_results or not inputs:
        return []
    tangents = [_tangent(result) for result in differentiable_results]
    return list(torch.autograd.grad(differentiable_results, inputs, tangents, allow_unused=True))


def _tangent(result: torch.Tensor) -> torch.Tensor:
    """Returns a fixed gradient for a result, computed from the elements' indices, with magnitudes from 0.5 to 1.5 and both signs."""
    with torch.no_grad():
        indices = torch.arange(result.numel(), device=result.device, dtype=torch.float64)
        numbers = (torch.frac(indices * 0.6180339887) + 0.5) * torch.where(indices % 3 == 1, -1.0, 1.0)
        return numbers.reshape(result.shape).to(result.dtype)


class Expected:
    """A call in eager mode, as the reference for engines.

    Args:
        eager: TorchDynamo's graph, run by torch: in inference on the user's own inputs, in training on clones.
        args: the user's inputs.
        device: the device that does most of the work.
        training: True if a backward pass follows the call.
        written: the positions of the inputs that the graph writes to. (Version counters do not show all writes: not those of a batch
            norm to its statistics.)

    Attributes:
        run: the effects of the call in eager mode.
    """

    def __init__(self, eager: Call, args: Sequence[Any], device: torch.device, training: bool, written: Collection[int]) -> None:
        self._eager, self._device, self._training = eager, device, training
        self._args = args  # in inference eager mode has written to these
        self._written = positions_on_same_storages(args, written)
        self.run = run(eager, clones(args) if training else args, device, training)

    def difference(self, trial: Run) -> str:
        """Returns a description of the first difference between a trial and eager mode; "" if there is none.

        Args:
            trial: the run of an engine on clones of the inputs.
        """
        return self._metadata_difference(trial) or self._input_difference(trial) or self._value_difference(trial)

    def _metadata_difference(self, trial: Run) -> str:
        """Compares the number of results, the metadata of each, and the memory that results share."""
        eager = self.run
        if len(trial.results) != len(eager.results):
            return f"it gives {len(trial.results)} results, eager mode {len(eager.results)}"
        for index, (result, expected) in enumerate(zip(trial.results, eager.results, strict=True)):
            found, wanted = _metadata(result), _metadata(expected)
            for fact in found | wanted:
                if found.get(fact) != wanted.get(fact):
                    return f"result {index} has {fact} {found.get(fact)}, eager mode's has {wanted.get(fact)}"
        for index, (owner, eager_owner) in enumerate(zip(_storage_owners(trial), _storage_owners(eager), strict=True)):
            if owner != eager_owner:
                return f"result {index} shares memory with {owner or 'nothing'}, eager mode's with {eager_owner or 'nothing'}"
        return ""

    def _input_difference(self, trial: Run) -> str:
        """Compares the inputs after the call."""
        for positions in by_storage(self.run.args).values():
            if torch.equal(storage_bytes(trial.args[positions[0]]), storage_bytes(self.run.args[positions[0]])):
                continue
            if not self._written.issuperset(positions):
                return f"it writes to input {positions[0]}, eager mode does not"
            for position in positions:
                agreement = compare(trial.args[position].detach(), self.run.args[position].detach())
                if not agreement.agrees:
                    return f"input {position} differs after the call: {agreement.detail or f'relative error {agreement.error:.1e}'}"
        return ""

    def _value_difference(self, trial: Run) -> str:
        """Compares the values of results and gradients."""
        pairs: list[tuple[str, Sequence[Any], Sequence[Any]]] = [("the results", trial.results, self.run.results)]
        if trial.gradients is not None and self.run.gradients is not None:
            if [item is None for item in trial.gradients] != [item is None for item in self.run.gradients]:
                return "it gives gradients to other inputs than eager mode"
            pairs.append(("the gradients", trial.gradients, self.run.gradients))
        with torch.no_grad():
            if all(compare(values, eager, gradients=index > 0).agrees for index, (_, values, eager) in enumerate(pairs)):
                return ""
        float64_run = self._in_float64()
        references: Sequence[Any] = (None, None) if float64_run is None else (float64_run.results, float64_run.gradients)
        with torch.no_grad():
            for index, ((name, values, eager), reference) in enumerate(zip(pairs, references, strict=False)):
                agreement = compare(values, eager, reference, gradients=index > 0)
                if not agreement.agrees:
                    return f"{name} differ: {agreement.detail or f'relative error {agreement.error:.1e}'}"
        return ""

    def _in_float64(self) -> Run | None:
        """Runs the graph in float64. Returns None if that raises an exception, or if the call has overwritten its inputs."""
        if self._written and not self._training:
            return None
        try:
            return run(self._eager, in_float64(self._args), self._device, self._training)
        except Exception:
            return None


def _metadata(item: Any) -> dict[str, Any]:
    """Returns the metadata of a result, by name. Strides of dimensions of size 1 do not count, nor does the value of a float."""
    if not isinstance(item, torch.Tensor):
        return {"type": type(item).__name__, "value": None if isinstance(item, float) else item}
    strides = [step for size, step in zip(item.shape, item.stride(), strict=True) if size != 1] if item.numel() else []
    return {
        "type": "Tensor", "shape": tuple(item.shape), "dtype": item.dtype, "device": str(item.device), "strides": tuple(strides),
        "requires_grad": item.requires_grad, "is_conj": item.is_conj(), "is_neg": item.is_neg(),
    }  # fmt: skip


def _storage_owners(run: Run) -> list[str]:
    """Returns, for each result, the input or the earlier result on the same storage; "" if there is none.

    An input is named with the storage offset of the result, in elements: "input 0, at storage offset 4".
    """
    owners: dict[int, str] = {}
    for index, item in enumerate(run.args):
        if isinstance(item, torch.Tensor) and item.untyped_storage().nbytes():
            owners.setdefault(private.storage_id(item), f"input {index}")
    names = []
    for index, item in enumerate(run.results):
        if not isinstance(item, torch.Tensor) or not item.untyped_storage().nbytes():
            names.append("")
            continue
        storage = private.storage_id(item)
        owner = owners.setdefault(storage, f"result {index}")
        names.append(
            ""
            if owner == f"result {index}"
            else f"{owner}, at storage offset {item.storage_offset()}"
            if owner.startswith("input")
            else owner
        )
    return names
