"""Gives gradients on a mesh the shardings of their parameters.

XLA chooses the shardings of a program's results, and does not know which of them are gradients.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.weak import WeakIdKeyDictionary

from ..runtime import meshes
from . import copies, storages
from .lazy_mode import DeferredContent

# The sharded leaf tensors, which may get a gradient.
_sharded: WeakIdKeyDictionary = WeakIdKeyDictionary()


def will_follow(tensor: torch.Tensor) -> None:
    """Registers a leaf tensor, whose gradient gets the tensor's sharding after each backward pass from now on."""
    if tensor.is_leaf:
        _sharded[tensor] = None


def follow_all() -> None:
    """Gives all gradients the shardings of their parameters, after a backward pass. No value changes."""
    if not meshes.exist() or _get_current_dispatch_mode_stack():  # with a dispatch mode, a step is being traced
        return
    for tensor in list(_sharded):
        gradient = tensor.grad
        if gradient is not None and gradient.device == tensor.device and gradient.stride() == tensor.stride():
            _follow(gradient, tensor)


def _follow(gradient: torch.Tensor, tensor: torch.Tensor) -> None:
    """Gives a gradient, which has the tensor's shape and strides, the tensor's sharding."""
    storage = gradient.untyped_storage()
    shape, sharding = storages.lies(tensor.untyped_storage())
    if sharding is None or gradient.numel() * gradient.itemsize != storage.nbytes():
        return
    held = storages.held_by(storage)
    if isinstance(held, DeferredContent) and held.recording is not None:
        if held.kind[0] == shape:
            held.sharding = sharding
        return
    array = copies.packed_array(gradient)  # a program may have returned it in another shape
    if array.shape == shape and meshes.sharding_of(array) != sharding:
        storages.replace_arrays([(storage, array, meshes.copied_to(array, sharding))])
