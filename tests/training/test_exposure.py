"""Before Python gets at a tensor's memory, what computes it has run; what asks the dispatcher needs no such warning."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dynaxla.training.exposure import Exposure

LOOKS: dict[str, Callable[[torch.Tensor], Any]] = {
    "numpy": lambda x: x.numpy(),
    "np.asarray": np.asarray,
    "tolist": lambda x: x.tolist(),
    "data_ptr": lambda x: x.data_ptr(),
    "storage": lambda x: x.untyped_storage(),
    **({"const_data_ptr": lambda x: x.const_data_ptr()} if hasattr(torch.Tensor, "const_data_ptr") else {}),  # torch 2.13
    "dlpack": lambda x: x.__dlpack__(),
    "map_": lambda x: x.map_(x, min),
    "deepcopy": copy.deepcopy,
    "repr": repr,
    "format": lambda x: f"{x}",
    "apply_": lambda x: x.apply_(abs),
}
# After these Python may go on reading and writing the memory.
GIVES = ("numpy", "np.asarray", "data_ptr", "storage", "const_data_ptr", "dlpack")


def nothing(tensor: torch.Tensor) -> None:
    raise AssertionError(f"{tensor.shape} is not kept")


class NoOp(TorchDispatchMode):
    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{op} was asked for")


@pytest.mark.parametrize("name", LOOKS)
def test_what_waits(name: str) -> None:
    """What looks then is not seen by the modes around it."""
    calls: list[str] = []
    kept: list[torch.Tensor] = []
    x = torch.ones(2)
    with Exposure(lambda: calls.append(name), kept.append), NoOp():
        LOOKS[name](x)
    assert calls
    assert [tensor is x for tensor in kept] == [True] * (name in GIVES)


def test_the_address_on_a_gpu() -> None:
    calls: list[int] = []
    with Exposure(lambda: calls.append(1), nothing), pytest.raises(AttributeError, match="CUDA"):
        _ = torch.ones(2).__cuda_array_interface__
    assert calls


@pytest.mark.parametrize("look", [lambda x: x.shape, lambda x: x + 1, lambda x: x.stride(), lambda x: x[0], lambda x: x.dtype])
def test_what_does_not_wait(look: Callable[[torch.Tensor], Any]) -> None:
    calls: list[int] = []
    with Exposure(lambda: calls.append(1), nothing):
        look(torch.ones(2))
    assert not calls


def test_nothing_is_shown_if_it_could_not_be_computed() -> None:
    def fails() -> None:
        raise KeyError("no")

    x = torch.ones(2)
    with Exposure(fails, nothing), pytest.raises(KeyError):
        x.apply_(lambda value: value + 1)
    assert x.tolist() == [1, 1]
