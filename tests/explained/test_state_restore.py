"""Tests that all state which a function can reach is restored."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from dynaxla.explained.state_restore import restored_afterwards


class Objects:
    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
        self.cache = torch.zeros(4)
        self.views = self.cache[1:3]
        self.names = ["a"]
        self.counts = {"calls": 0}
        self.array = np.zeros(2)
        self.generator = torch.Generator().manual_seed(3)
        self.sparse = torch.eye(3).to_sparse()


objects = Objects()


def writes() -> None:
    objects.views.fill_(7)
    with torch.no_grad():
        objects.weight.mul_(float("nan"))


def writes_unseen() -> None:
    objects.weight.data.add_(1)
    objects.cache.numpy()[0] = 5
    objects.array[1] = 3


def takes_other_memory() -> None:
    objects.weight.data = torch.ones(5, 5)
    objects.cache.resize_(9)
    objects.cache = torch.ones(2)


def leaves_gradients() -> None:
    objects.weight.sum().backward()
    objects.weight.requires_grad_(False)


def changes_python() -> None:
    objects.names.append("b")
    objects.counts["calls"] += 1
    objects.counts["new"] = 1
    objects.extra = 3  # type: ignore[attr-defined]


def draws() -> None:
    torch.rand(3)
    torch.rand(3, generator=objects.generator)
    random.random()
    np.random.rand()


def turns_gradients_off() -> None:
    torch.set_grad_enabled(False)


def state() -> tuple[object, ...]:
    weight = objects.weight
    return (
        weight.tolist(), weight.data_ptr(), weight.requires_grad, weight.grad, objects.cache.tolist(), id(objects.cache), id(objects.views),
        objects.views.tolist(), objects.names, dict(objects.counts), sorted(vars(objects)), objects.array.tolist(),
        objects.generator.get_state().tolist(), torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist(),
        torch.is_grad_enabled(), objects.sparse.to_dense().tolist(),
    )  # fmt: skip


CHANGES = [writes, writes_unseen, takes_other_memory, leaves_gradients, changes_python, draws, turns_gradients_off]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_change_is_restored(change: Callable[[], None]) -> None:
    global objects
    objects = Objects()
    before = repr(state())
    with restored_afterwards(change, (), {}):
        change()
        assert repr(state()) != before
    assert repr(state()) == before


def test_arguments_are_restored_after_an_exception() -> None:
    x, names = torch.ones(3), [1]

    def fails(x: torch.Tensor, names: list[int]) -> None:
        x.zero_()
        names.clear()
        raise KeyError("its own")

    with pytest.raises(KeyError, match="its own"), restored_afterwards(fails, (x,), {"names": names}):
        fails(x, names)
    assert x.tolist() == [1, 1, 1]
    assert names == [1]


def test_version_of_an_unchanged_tensor_stays() -> None:
    x, y = torch.ones(3), torch.ones(3)
    with restored_afterwards(lambda: None, (x, y), {}):
        y.add_(1)
    assert (x._version, y.tolist()) == (0, [1, 1, 1])
