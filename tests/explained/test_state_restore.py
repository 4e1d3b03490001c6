"""All that a function leads to is as before, whatever it has done."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from dynaxla.explained.state_restore import restored_afterwards


class Held:
    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
        self.cache = torch.zeros(4)
        self.views = self.cache[1:3]
        self.names = ["a"]
        self.counts = {"calls": 0}
        self.array = np.zeros(2)
        self.generator = torch.Generator().manual_seed(3)
        self.sparse = torch.eye(3).to_sparse()


held = Held()


def writes() -> None:
    held.views.fill_(7)
    with torch.no_grad():
        held.weight.mul_(float("nan"))


def writes_unseen() -> None:
    held.weight.data.add_(1)
    held.cache.numpy()[0] = 5
    held.array[1] = 3


def takes_other_memory() -> None:
    held.weight.data = torch.ones(5, 5)
    held.cache.resize_(9)
    held.cache = torch.ones(2)


def leaves_gradients() -> None:
    held.weight.sum().backward()
    held.weight.requires_grad_(False)


def changes_python() -> None:
    held.names.append("b")
    held.counts["calls"] += 1
    held.counts["new"] = 1
    held.extra = 3  # type: ignore[attr-defined]


def draws() -> None:
    torch.rand(3)
    torch.rand(3, generator=held.generator)
    random.random()
    np.random.rand()


def turns_gradients_off() -> None:
    torch.set_grad_enabled(False)


def state() -> tuple[object, ...]:
    weight = held.weight
    return (
        weight.tolist(), weight.data_ptr(), weight.requires_grad, weight.grad, held.cache.tolist(), id(held.cache), id(held.views),
        held.views.tolist(), held.names, dict(held.counts), sorted(vars(held)), held.array.tolist(), held.generator.get_state().tolist(),
        torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist(), torch.is_grad_enabled(),
        held.sparse.to_dense().tolist(),
    )  # fmt: skip


CHANGES = [writes, writes_unseen, takes_other_memory, leaves_gradients, changes_python, draws, turns_gradients_off]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_is_undone(change: Callable[[], None]) -> None:
    global held
    held = Held()
    before = repr(state())
    with restored_afterwards(change, (), {}):
        change()
        assert repr(state()) != before
    assert repr(state()) == before


def test_so_are_arguments_and_after_an_exception() -> None:
    x, names = torch.ones(3), [1]

    def fails(x: torch.Tensor, names: list[int]) -> None:
        x.zero_()
        names.clear()
        raise KeyError("its own")

    with pytest.raises(KeyError, match="its own"), restored_afterwards(fails, (x,), {"names": names}):
        fails(x, names)
    assert x.tolist() == [1, 1, 1]
    assert names == [1]


def test_what_was_not_written_to_keeps_its_version() -> None:
    x, y = torch.ones(3), torch.ones(3)
    with restored_afterwards(lambda: None, (x, y), {}):
        y.add_(1)
    assert (x._version, y.tolist()) == (0, [1, 1, 1])
