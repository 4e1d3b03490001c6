"""Gives gradients on a mesh the shardings of their parameters.

XLA chooses the shardings of a program's results. It does not know that some of the results are gradients.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.weak import WeakIdKeyDictionary

from ..runtime import meshes
from . import copies, storages
from .lazy_mode import DeferredContent

# The sharded leaf tensors, which may get gradients.
_sharded: WeakIdKeyDictionary = WeakIdKeyDictionary()


def register(tensor: torch.Tensor) -> None:
    """Registers a tensor if it is a leaf. After each later backward pass, its gradient gets the sharding of the tensor."""
    if tensor.is_leaf:
        _sharded[tensor] = None


def reshard_all() -> None:
    """Gives the gradient of each registered tensor the tensor's sharding. No value changes. Called after each backward pass."""
    if not meshes.may_have_sharded_arrays() or _get_current_dispatch_mode_stack():  # with a dispatch mode, a step is being traced
        return
    for tensor in list(_sharded):
        gradient = tensor.grad
        if gradient is not None and gradient.device == tensor.device and gradient.stride() == tensor.stride():
            _reshard(gradient, tensor)


def _reshard(gradient: torch.Tensor, tensor: torch.Tensor) -> None:
    """Gives a gradient with the tensor's shape and strides the tensor's sharding."""
    storage = gradient.untyped_storage()
    shape, sharding = storages.shape_and_sharding(tensor.untyped_storage())
    if sharding is None or gradient.numel() * gradient.itemsize != storage.nbytes():
        return
    content = storages.content_of(storage)
    if isinstance(content, DeferredContent) and content.recording is not None:
        if content.shape_dtype[0] == shape:
            content.sharding = sharding
        return
    array = copies.packed_array(gradient)  # a program may have returned the gradient's array in another shape
    if array.shape == shape and meshes.sharding_of(array) != sharding:
        storages.compare_and_swap([(storage, array, meshes.copy_to(array, sharding))])
