"""Calls of the databases on the device "jax", compared with what the CPU does.

`python -m conformance.on_the_device [COUNT] [SEED] [eager|lazy]` runs that many of the telling ones."""

from __future__ import annotations

import dataclasses
import random
import sys
import warnings
from typing import Any

import torch
from compare import TOLERANCE, strides
from torch.utils import _pytree as pytree

import dynaxla

from . import telling
from .calls import Call, copy_tensors
from .trial import quiet


def to_the_device(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies that lie in memory as these do, and share it as they do."""
    storages: dict[int, torch.UntypedStorage] = {}
    found = []
    for tensor in tensors:
        if tensor.layout != torch.strided:
            raise NotImplementedError(f"layout {tensor.layout}")
        storage = tensor.untyped_storage()
        if storage._cdata not in storages:
            storages[storage._cdata] = torch.UntypedStorage(storage.nbytes(), device="jax").copy_(storage)
        moved = torch.empty(0, dtype=tensor.dtype, device="jax")
        moved.set_(storages[storage._cdata], tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        moved = moved.conj() if tensor.is_conj() else moved
        moved = torch._neg_view(moved) if tensor.is_neg() else moved
        found.append(moved.requires_grad_(tensor.requires_grad))
    return found


def difference(actual: Any, expected: Any) -> str:
    """How what the device gave differs from what the CPU gave; "" if it does not."""
    mine, my_tree = pytree.tree_flatten(actual)
    theirs, their_tree = pytree.tree_flatten(expected)
    if my_tree != their_tree:
        return f"structure {my_tree}, not {their_tree}"
    for one, other in zip(mine, theirs, strict=True):
        if not isinstance(other, torch.Tensor):
            if one != other and not (one != one and other != other) and not isinstance(other, torch.device):
                return f"{one!r}, not {other!r}"
            continue
        for name in ("dtype", "shape", "requires_grad", "layout"):
            if getattr(one, name) != getattr(other, name):
                return f"{name} {getattr(one, name)}, not {getattr(other, name)}"
        if other.layout == torch.strided and strides(one) != strides(other):
            return f"strides {strides(one)}, not {strides(other)}"
        relative, absolute = TOLERANCE.get(other.dtype, (0.0, 0.0))
        try:
            torch.testing.assert_close(one.detach().cpu(), other.detach(), rtol=5 * relative, atol=5 * absolute, equal_nan=True)
        except AssertionError as error:
            return str(error)
    return ""


def verdict(call: Call) -> str:
    """ "" where the device does what the CPU does, "skip: ..." where there is nothing to compare, else what is different."""
    theirs = copy_tensors(call.tensors)
    try:
        mine = to_the_device(theirs)
    except (NotImplementedError, RuntimeError) as error:
        return f"skip: {error}"
    torch.manual_seed(0)
    state = torch.get_rng_state()
    try:
        expected = _on(call, "cpu")(*theirs)
    except Exception as error:
        return f"skip: the CPU raises {error}"
    if not torch.equal(state, torch.get_rng_state()):
        return "skip: random"
    with torch.device("jax"):  # where a call makes tensors of nothing
        try:
            actual = _on(call, "jax")(*mine)
            dynaxla.sync()
        except Exception as error:
            return f"raises {type(error).__name__}: {error}"
    return difference((actual, mine), (expected, theirs))


def _on(call: Call, where: str) -> Any:
    """The call, on a device where it names one."""
    return dataclasses.replace(call, text=call.text.replace("device='cpu'", f"device='{where}'")).python_function()


def main(count: int, seed: int, mode: str = "eager") -> int:
    """How many of a sample differ."""
    dynaxla.enable_device()
    dynaxla.set_mode(mode)
    candidates = [candidate for group in telling.groups() for candidate in group]
    sample = random.Random(seed).sample(candidates, min(count, len(candidates)))
    wrong, skipped = 0, 0
    with warnings.catch_warnings():
        quiet()
        for case, number in sample:
            _, trial = telling.call_of(case, number)
            found = verdict(trial.call)
            skipped += found.startswith("skip")
            if found and not found.startswith("skip"):
                wrong += 1
                print(f"{case}, call {number}: {trial.call.describe()}: {found}", flush=True)
    print(f"{len(sample)} calls, {skipped} not compared, {wrong} wrong")
    return wrong


if __name__ == "__main__":
    given = sys.argv[1:]
    sys.exit(main(*map(int, (*given[:2], 100, 0)[:2]), *given[2:3]) > 0)
