"""Models and tensors on a CUDA device that is not there. Import this module before torch."""

# ruff: noqa: E402  (the guard has to be there before torch)

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


def fake_model(real: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """A model like this one with fake parameters and buffers on "cuda"; those of floats are of another dtype, if one is given."""
    return fake_models.fake_model(real, MODE, "cuda", dtype)


def fake_inputs(real: Any, dtype: torch.dtype | None = None) -> Any:
    """The same tree with fake tensors on "cuda"."""
    return fake_models.fake_inputs(real, MODE, "cuda", dtype)
