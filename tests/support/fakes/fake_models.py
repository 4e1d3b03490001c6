"""Models whose parameters and buffers are fake tensors."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree


def fake_tensor(real: torch.Tensor, mode: FakeTensorMode, device: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns a fake tensor with the same shape and strides. A floating-point tensor gets the dtype, if one is given."""
    dtype = dtype if dtype is not None and real.is_floating_point() else real.dtype
    with mode:
        fake = torch.empty_strided(real.shape, real.stride(), dtype=dtype, device=device)
    return fake.requires_grad_(real.requires_grad)


def fake_model(real: nn.Module, mode: FakeTensorMode, device: str, dtype: torch.dtype | None = None) -> nn.Module:
    """Returns a copy of a model with fake tensors. Shared parameters and buffers stay shared."""
    known: dict[int, Any] = {}
    for tensor in [*real.parameters(), *real.buffers()]:
        fake = fake_tensor(tensor.detach(), mode, device, dtype)
        known[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
    return copy.deepcopy(real, known)


def fake_inputs(real: Any, mode: FakeTensorMode, device: str, dtype: torch.dtype | None = None) -> Any:
    """Returns the same pytree with fake tensors."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: fake_tensor(tensor, mode, device, dtype), real)
