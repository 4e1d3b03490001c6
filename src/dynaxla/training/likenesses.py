"""Tensors that are like others in some way: in the same memory, with memory of their own, or without any."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ..runtime import transfer
from .traces import Geometry


def op_before(tensor: torch.Tensor, before: Geometry) -> torch.Tensor:
    """The tensor as it was before an op changed what it reads of its memory."""
    shape, stride, offset, *_ = before
    return torch.as_strided(tensor.detach(), shape, stride, offset)


def bare(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor on the same memory, of which autograd knows nothing: that it was written to has counted when the op was recorded."""
    plain = transfer.reinterpret(tensor, tensor.shape, tensor.stride())
    plain = torch._conj(plain) if tensor.is_conj() and not plain.is_conj() else plain
    return torch._neg_view(plain) if tensor.is_neg() and not plain.is_neg() else plain


def hollow_like(tensor: torch.Tensor) -> torch.Tensor:
    """Memory like a tensor's, with nothing in it."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def fake_like(tensor: torch.Tensor) -> torch.Tensor:
    """Under a FakeTensorMode: a tensor like it."""
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    fake = torch._conj(fake) if tensor.is_conj() else fake
    return torch._neg_view(fake) if tensor.is_neg() else fake


def detached(result: Any) -> Any:
    """What a step returns: no tensor in it keeps what autograd has saved."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor if tensor.is_leaf else tensor.detach(), result)
