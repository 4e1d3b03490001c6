"""Gradients on a mesh lie as their parameters do: XLA, which chooses how a program's results lie, does not know what they are for."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.weak import WeakIdKeyDictionary

from ..runtime import meshes
from . import copies, storages
from .recording import Waiting

# What has been sharded, and may get a gradient.
_sharded: WeakIdKeyDictionary = WeakIdKeyDictionary()


def will_follow(tensor: torch.Tensor) -> None:
    """From now on the gradient of a leaf lies as it does, after each backward pass."""
    if tensor.is_leaf:
        _sharded[tensor] = None


def follow_all() -> None:
    """Once a backward pass is done: let all gradients lie as their parameters do. Only where they lie changes, and no value."""
    if not meshes.exist() or _get_current_dispatch_mode_stack():  # a step is being recorded
        return
    for tensor in list(_sharded):
        gradient = tensor.grad
        if gradient is not None and gradient.device == tensor.device and gradient.stride() == tensor.stride():
            _follow(gradient, tensor)


def _follow(gradient: torch.Tensor, tensor: torch.Tensor) -> None:
    """gradient: with the tensor's shape and strides."""
    storage = gradient.untyped_storage()
    shape, sharding = storages.lies(tensor.untyped_storage())
    if sharding is None or gradient.numel() * gradient.itemsize != storage.nbytes():
        return
    held = storages.held_by(storage)
    if isinstance(held, Waiting) and held.recording is not None:
        if held.kind[0] == shape:
            held.sharding = sharding
        return
    array = copies.packed_array(gradient)  # a program may have given it in another shape
    if array.shape == shape and meshes.sharding_of(array) != sharding:
        storages.replace_arrays([(storage, array, meshes.moved(array, sharding))])
