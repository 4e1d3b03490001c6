"""Self-tests of the private entry points that have a public alternative. Each process calls each entry point once with small values.

An entry point that raises, or returns another result than its public alternative, is removed from `private.Fast`. The public alternative
then runs, and `dynaxla doctor` reports the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import jax
import numpy as np
import torch

from . import private
from .private import Fast

log = logging.getLogger("dynaxla")


def _import(device: jax.Device) -> bool:
    assert Fast.to_buffer is not None
    assert Fast.torch_to_capsule is not None
    tensor = torch.arange(64, dtype=torch.float32, device="cpu").view(4, 16)
    array = Fast.to_buffer(Fast.torch_to_capsule(tensor), device, None)
    return array.shape == (4, 16) and array.dtype == np.float32 and bool((np.asarray(array) == tensor.numpy()).all())


def _export(device: jax.Device) -> bool:
    assert Fast.to_capsule is not None
    assert Fast.torch_from_capsule is not None
    numbers = np.arange(64, dtype=np.float32).reshape(4, 16)
    tensor = Fast.torch_from_capsule(Fast.to_capsule(jax.device_put(numbers, device), None))
    return tensor.shape == (4, 16) and tensor.dtype == torch.float32 and tensor.tolist() == numbers.tolist()


def _storage_at(device: jax.Device) -> bool:
    assert Fast.storage_at is not None
    tensor = torch.arange(8, dtype=torch.float32, device="cpu")
    storage = Fast.storage_at(tensor.data_ptr(), tensor.device, 32)
    other = torch.empty(0, dtype=torch.float32, device="cpu").set_(storage, 0, (8,), (1,))
    return storage.nbytes() == 32 and other.tolist() == tensor.tolist()


def _reinterpret(device: jax.Device) -> bool:
    assert Fast.reinterpret is not None
    tensor = torch.arange(8, dtype=torch.float32, device="cpu")
    other = Fast.reinterpret(tensor, (2, 3), (1, 2), 1)
    return torch.equal(other, tensor.as_strided((2, 3), (1, 2), 1)) and private.storage_id(other) == private.storage_id(tensor)


def _zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float32, device="cpu")


def _guards(device: jax.Device) -> bool:
    assert Fast.guards is not None
    tensor = _zeros(2, 3)
    check = Fast.guards(tensor, dynamic_dims_sizes=[[2, 3]], dynamic_dims_strides=[[3, 1]]).check
    others = [_zeros(3, 2), _zeros(2, 3).double(), _zeros(3, 2).t()]
    return check(_zeros(2, 3)) and not any(map(check, others))


def _guard_tree(device: jax.Device) -> bool:
    assert Fast.guard_tree is not None
    from .guards import DictCheck

    checked = {"a": 1}
    check = DictCheck([checked])
    if not check.are_unchanged():
        return True  # this Python keeps no version numbers, so "changed" is the correct answer
    checked["b"] = 2
    return not check.are_unchanged()


def _traceback_scope(device: jax.Device) -> bool:
    assert Fast.traceback_scope is not None
    with Fast.traceback_scope():
        return True


# The self-test of each entry point of `Fast`, or of several that are used together. The entry points for programs are missing here, because
# their test needs a program: they are tested at their first use (programs.py).
_TESTS: dict[tuple[str, ...], Callable[[jax.Device], bool]] = {
    ("to_buffer", "torch_to_capsule"): _import,
    ("to_capsule", "torch_from_capsule"): _export,
    ("storage_at",): _storage_at,
    ("reinterpret",): _reinterpret,
    ("guards",): _guards,
    ("guard_tree",): _guard_tree,
    ("traceback_scope",): _traceback_scope,
}


_has_run = False


def run(device: jax.Device) -> None:
    """Tests the entry points that this installation has, once in a process.

    Args:
        device: A CPU device of XLA.
    """
    global _has_run
    if _has_run or private.functorch_level() is not None:  # a functorch transform would wrap the tensors of the tests
        return
    _has_run = True
    with private.without_modes(), private.below_autograd():
        _run(device)


def _run(device: jax.Device) -> None:
    for names, test in _TESTS.items():
        if not all(getattr(Fast, name) for name in names):
            continue
        try:
            reason = "" if test(device) else "its result is wrong"
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        if reason:
            log.info("dynaxla does not use the private function %s: %s", "/".join(names), reason)
            private.gate(names, reason)
