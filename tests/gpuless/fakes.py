"""Models and tensors on a CUDA device that is not there. Import this module before torch."""

from __future__ import annotations

from .guard import load

_GUARD = load()

import contextlib  # noqa: E402
import copy  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

MODE = FakeTensorMode(allow_non_fake_inputs=True)
ATTENTION = ("math", "flash", "efficient", "cudnn")


@contextlib.contextmanager
def cuda() -> Iterator[None]:
    """Inside, tensors and modules are made as fake ones on "cuda"."""
    with MODE, torch.device("cuda"):
        yield


@contextlib.contextmanager
def attention(backend: str) -> Iterator[None]:
    """Inside, scaled_dot_product_attention on "cuda" is one of `ATTENTION`, whatever CUDA would take."""
    _GUARD.gpuless_force_attention(ATTENTION.index(backend))
    try:
        yield
    finally:
        _GUARD.gpuless_force_attention(-1)


def fake_tensor(real: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """One of the same shape and strides on "cuda"; of another dtype, if it is one of floats."""
    dtype = dtype if dtype is not None and real.is_floating_point() else real.dtype
    with MODE:
        made = torch.empty_strided(real.shape, real.stride(), dtype=dtype, device="cuda")
    return made.requires_grad_(real.requires_grad)


def fake_model(real: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """A model like this one with fake parameters and buffers on "cuda"; those that it has twice are one there too."""
    known: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        made = fake_tensor(tensor.detach(), dtype)
        return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made

    for tensor in [*real.parameters(), *real.buffers()]:
        known[id(tensor)] = fake(tensor)
    return copy.deepcopy(real, dict(known))


def fake_inputs(real: Any, dtype: torch.dtype | None = None) -> Any:
    """The same tree with fake tensors on "cuda"."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: fake_tensor(tensor, dtype), real)
