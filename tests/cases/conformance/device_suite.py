"""The suite on the device "jax", in eager or lazy mode: each call is compared with the call on the CPU.

`python -m cases.conformance --device` runs the suite. As a program, this module is a worker that pool.py starts. Its first argument is the
mode.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import random
import sys
import warnings
from typing import Any

import torch
from torch.utils import _pytree as pytree

import dynaxla

from . import judge, report, worker
from .calls import copy_tensors
from .entries import Case, Trial, cases
from .expected import ON_THE_DEVICE, by_case
from .trial import SEED, Outcome, Raised, Run, Runner, error_name, gradients_of, quiet, states_of


def _values(run: Run) -> list[torch.Tensor]:
    """Returns all tensors of a run."""
    return [item for item in pytree.tree_leaves((run.inputs, run.result, run.gradients)) if isinstance(item, torch.Tensor)]


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two runs of a kernel differ only by rounding."""
    return one.dtype == other.dtype and torch.allclose(_wide(one), _wide(other), rtol=1e-2, atol=1e-6, equal_nan=True)


def to_the_device(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns copies with the strides and offsets of the tensors, which share memory as the tensors do."""
    storages: dict[int, torch.UntypedStorage] = {}
    copies = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in storages:
            storages[storage._cdata] = torch.UntypedStorage(storage.nbytes(), device="jax").copy_(storage)
        copied = torch.empty(0, dtype=tensor.dtype, device="jax")
        copied.set_(storages[storage._cdata], tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        copied = copied.conj() if tensor.is_conj() else copied
        copied = torch._neg_view(copied) if tensor.is_neg() else copied
        copies.append(copied.requires_grad_(tensor.requires_grad))
    return copies


class _FromTheDevice:
    """Copies results to the CPU. The copies keep strides and offsets, shared memory, and the identity of objects."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, value: Any) -> Any:
        leaves, tree = pytree.tree_flatten(value)
        copies = [self._one(leaf) for leaf in leaves]
        return value if all(copied is leaf for copied, leaf in zip(copies, leaves, strict=True)) else pytree.tree_unflatten(copies, tree)

    def _one(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu") if value.type == "jax" else value
        if not isinstance(value, torch.Tensor) or value.device.type != "jax":
            return value
        if id(value) not in self._tensors:
            self._tensors[id(value)] = value, self._copied(value)
        return self._tensors[id(value)][1]

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = storage.cpu()
        geometry = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        copied = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(self._storages[storage._cdata], *geometry)
        copied = torch._conj(copied) if tensor.is_conj() else copied
        copied = torch._neg_view(copied) if tensor.is_neg() else copied
        copied.requires_grad_(tensor.requires_grad)
        return torch.nn.Parameter(copied, copied.requires_grad) if isinstance(tensor, torch.nn.Parameter) else copied


class DeviceRunner(Runner):
    """Runs the trials of one case on the device, one by one.

    Attributes:
        mode: "eager" or "lazy".
    """

    mode = "eager"

    def outcomes(self, trials: Any, together: int = 1) -> Any:
        return ((trial, self.run(trial)) for trial in trials)

    def _run(self, trial: Trial) -> Outcome:
        """Runs a trial as a compiled one is run, but skips calls with tensors that are not strided."""
        if any(tensor.layout != torch.strided for tensor in trial.call.tensors):
            return Outcome("skip", "the device has strided tensors only")
        return super()._run(trial)

    def _call(self, trial: Trial, backend: str | None, seed: int = SEED, wide: bool = False) -> Run:
        if backend is None:
            return super()._call(trial, None, seed, wide)
        call = dataclasses.replace(trial.call, text=trial.call.text.replace("device='cpu'", "device='jax'"))
        if isinstance(call.function, torch.nn.Module):
            call.function = copy.deepcopy(call.function).to("jax")
        torch.manual_seed(seed)
        try:
            with dynaxla.device.lazy() if self.mode == "lazy" else contextlib.nullcontext():  # a recording runs at the end of the context
                tensors = to_the_device(copy_tensors(call.tensors))
                with torch.set_grad_enabled(trial.differentiate), torch.device("jax"):  # for calls that create tensors without an operand
                    result = call.python_function()(*tensors)
                states = states_of(call.function)
                inputs = [*tensors, *states]
                gradients = gradients_of((trial.process or _identity)(result), inputs) if trial.differentiate else None
        except Exception as error:
            raise Raised(error) from error
        host = _FromTheDevice()
        return Run(host(inputs), host(result), host(gradients), False)

    def _expect_error(self, trial: Trial, expected: Exception) -> Outcome:
        try:
            self._call(trial, self.backend)
        except Raised:
            return Outcome("pass")
        return Outcome("fail", "wrong acceptance", "accepted; the CPU raises")

    def _raised(self, trial: Trial, error: Exception) -> Outcome:
        return Outcome("fail", f"raises:{error_name(error)}", str(error).strip()[:600])

    def compare(self, trial: Trial, actual: Run, expected: Run) -> judge.Difference | Outcome:
        """Compares runs as those of compiled calls, except for values that depend on uninitialised memory on the CPU."""
        difference = super().compare(trial, actual, expected)
        if isinstance(difference, Outcome) or difference.kind != "value":
            return difference
        torch.use_deterministic_algorithms(True, warn_only=True)  # then torch fills such memory
        try:
            filled = self._call(trial, None)
        finally:
            torch.use_deterministic_algorithms(False)
        if all(map(_is_close, _values(filled), _values(expected))):
            return difference
        return Outcome("pass", "values not compared: uninitialised memory")

    def _differs(self, trial: Trial, difference: judge.Difference) -> Outcome:
        return Outcome("fail", f"wrong {difference.kind}", difference.text[:600])


def _identity(value: Any) -> Any:
    return value


def runner_of(case: Case, mode: str = "eager") -> DeviceRunner:
    runner = worker.runner_of(case, DeviceRunner)
    runner.mode = mode
    # Graphs do not contain this op. On the device it returns uninitialised memory.
    runner.uninitialised |= case.name in ("resize_", "resize_as_") and case.kind == "zero_size"
    return runner


def failures_of_a_sample(count: int, calls: int, seed: int, mode: str) -> list[str]:
    """Returns the failures of the first calls of some cases. Cases that are expected to fail are left out."""
    dynaxla.device.enable()
    known = by_case(ON_THE_DEVICE)
    # In eager mode, the device runs torch's checks of arguments, whose exceptions `changed_numbers` does not handle yet.
    candidates = [case for case in cases() if str(case) not in known and case.kind != "changed_numbers"]
    chosen = random.Random(seed).sample(candidates, count)
    failures: list[str] = []
    with warnings.catch_warnings():
        quiet()
        for case in chosen:
            failures += report.failure_lines(worker.run_case(case, calls, runner=runner_of(case, mode)))
    return failures


if __name__ == "__main__":
    dynaxla.device.enable()
    worker.main(functools.partial(runner_of, mode=sys.argv[1]), cases_between=20)
