"""Models whose parameters and buffers are fake tensors."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree


def fake_tensor(real: torch.Tensor, mode: FakeTensorMode, device: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """One of the same shape and strides; of another dtype, if it is one of floats."""
    dtype = dtype if dtype is not None and real.is_floating_point() else real.dtype
    with mode:
        made = torch.empty_strided(real.shape, real.stride(), dtype=dtype, device=device)
    return made.requires_grad_(real.requires_grad)


def fake_model(real: nn.Module, mode: FakeTensorMode, device: str, dtype: torch.dtype | None = None) -> nn.Module:
    """A model like this one; parameters and buffers that it has twice are one there too."""
    known: dict[int, Any] = {}
    for tensor in [*real.parameters(), *real.buffers()]:
        made = fake_tensor(tensor.detach(), mode, device, dtype)
        known[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
    return copy.deepcopy(real, known)


def fake_inputs(real: Any, mode: FakeTensorMode, device: str, dtype: torch.dtype | None = None) -> Any:
    """The same tree with fake tensors."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: fake_tensor(tensor, mode, device, dtype), real)
