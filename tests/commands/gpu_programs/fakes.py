"""Fake models and tensors on a CUDA device that does not exist. Import this module before torch."""

# ruff: noqa: E402  (the guard must be loaded before torch)

from __future__ import annotations

from .guard import load

_GUARD = load()

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from support.fakes import fake_models

MODE = FakeTensorMode(allow_non_fake_inputs=True)
ATTENTION = ("math", "flash", "efficient", "cudnn")


@contextlib.contextmanager
def cuda() -> Iterator[None]:
    """In this context, tensors and modules are created as fake ones on "cuda"."""
    with MODE, torch.device("cuda"):
        yield


@contextlib.contextmanager
def attention(backend: str) -> Iterator[None]:
    """In this context, scaled_dot_product_attention on "cuda" uses one of `ATTENTION`, independent of CUDA's choice."""
    _GUARD.gpuless_force_attention(ATTENTION.index(backend))
    try:
        yield
    finally:
        _GUARD.gpuless_force_attention(-1)


def fake_model(real: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Returns a copy of a model with fake parameters and buffers on "cuda"; those of floats have another dtype, if one is given."""
    return fake_models.fake_model(real, MODE, "cuda", dtype)


def fake_inputs(real: Any, dtype: torch.dtype | None = None) -> Any:
    """Returns the same tree with fake tensors on "cuda"."""
    return fake_models.fake_inputs(real, MODE, "cuda", dtype)
