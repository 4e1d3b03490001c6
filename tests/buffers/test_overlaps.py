"""Tests of buffers/overlaps.py: inputs that share memory at one call, and at another call do not, or share other memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dynaxla.buffers.overlaps import AliasGuard, internally_overlapping, undetected_overlaps
from dynaxla.errors import UnsupportedTensor


def _rows(start: int, other: int) -> tuple[torch.Tensor, torch.Tensor]:
    whole = torch.arange(40.0)
    return whole[start : start + 10], whole[other : other + 10]


def _within(whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return whole[:10], whole[5:15]


PAIRS: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]] = {
    "separate": lambda: (torch.arange(10.0), torch.arange(10.0)),
    "neighbours": lambda: _rows(0, 10),
    "five after": lambda: _rows(0, 5),
    "three after": lambda: _rows(0, 3),
    "five before": lambda: _rows(5, 0),
    "both later": lambda: _rows(20, 25),
    "the same memory": lambda: _rows(0, 0),
    "of another view": lambda: _within(torch.arange(40.0)[:30].data),
    "one storage, two memories": lambda: (torch.arange(20.0)[10:], torch.arange(10.0)),
}
NOT_OVERLAPPING = {"separate", "neighbours", "one storage, two memories"}


@pytest.mark.parametrize("first", PAIRS)
def test_changed_overlap_is_noticed(first: str) -> None:
    overlaps = AliasGuard(PAIRS[first](), {0}, (), static=True)
    assert overlaps.is_needed
    for _, name in itertools.product(range(2), PAIRS):
        assert overlaps.check(PAIRS[name]()) == (name == first or {name, first} <= NOT_OVERLAPPING), name


@pytest.mark.parametrize("first", ["separate", "five after"])
@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
def test_writes_are_visible_in_the_other_input_at_later_calls(first: str, trains: bool) -> None:
    def write(mine: torch.Tensor, theirs: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        mine.mul_(3)
        return theirs.clone() * factor

    compiled = torch.compile(write, backend="dynaxla", dynamic=False)
    factor = torch.full((10,), 2.0, requires_grad=trains)
    for name in (first, *PAIRS):
        my_inputs, their_inputs = PAIRS[name](), PAIRS[name]()
        found, expected = compiled(*my_inputs, factor), write(*their_inputs, factor)
        torch.testing.assert_close((found, *my_inputs), (expected, *their_inputs), msg=lambda text, name=name: f"{name}: {text}")
        assert found.requires_grad == trains


def test_inputs_with_dynamic_sizes_begin_to_overlap() -> None:
    def write(mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
        mine.add_(1)
        return theirs * 2

    mine, theirs = np.arange(40.0), np.arange(40.0)
    compiled = torch.compile(write, backend="dynaxla", dynamic=True)
    for size in (10, 10, 12, 8):  # two storages with one memory, which torch's own guards do not notice
        found = compiled(torch.from_numpy(mine)[:size], torch.from_numpy(mine)[10:15])
        expected = write(torch.from_numpy(theirs)[:size], torch.from_numpy(theirs)[10:15])
        torch.testing.assert_close((found, torch.from_numpy(mine)), (expected, torch.from_numpy(theirs)))


def test_fallback_error_refuses_new_overlap() -> None:
    compiled = torch.compile(
        lambda mine, theirs: mine.add_(1).sum() + theirs, backend="dynaxla", options={"fallback": "error"}, dynamic=False
    )
    compiled(*PAIRS["separate"]())
    whole, part = PAIRS["five after"]()
    with pytest.raises(UnsupportedTensor, match="writes to an input that shares memory with another input"):
        compiled(whole, part)
    assert whole.tolist() == list(range(10))


def test_guard_is_needed_only_for_written_inputs_that_could_overlap() -> None:
    whole = torch.zeros(20)
    assert not AliasGuard([whole], {0}, (), static=True).is_needed
    assert not AliasGuard([whole, torch.zeros(3)], (), (), static=True).is_needed
    assert not AliasGuard([whole, torch.zeros(3)], {0}, {1}, static=True).is_needed
    assert AliasGuard([whole, torch.zeros(3)], {0}, {0}, static=True).is_needed


def test_interleaved_elements_do_not_overlap() -> None:
    whole = torch.zeros(4, 6)
    overlaps = AliasGuard([torch.zeros(4, 3), torch.zeros(4, 3)], {1}, (), static=True)
    assert overlaps.check([whole[:, :3], whole[:, 3:]])
    assert not overlaps.check([whole[:, :3], whole[:, 2:5]])
    assert overlaps.check([torch.zeros(0), torch.zeros(0)])


def test_a_few_of_many_inputs_move() -> None:
    whole = torch.zeros(100)
    tensors = [whole[10 * index : 10 * index + 10] for index in range(10)]
    overlaps = AliasGuard(tensors, {0}, (), static=True)
    assert overlaps.check(tensors)
    assert overlaps.check([torch.zeros(10), *tensors[1:]])
    assert not overlaps.check([whole[15:25], *tensors[1:]])
    assert not overlaps.check([*tensors[:9], whole[9:19]])
    assert overlaps.check([*tensors[:9], whole[11:21]])  # nothing is written there
    assert overlaps.check([torch.zeros(10) for _ in range(10)])


def test_fake_tensors_pass_the_guard() -> None:
    overlaps = AliasGuard(PAIRS["five after"](), {0}, (), static=True)
    with FakeTensorMode() as mode:
        assert overlaps.check([mode.from_tensor(torch.zeros(10)), mode.from_tensor(torch.zeros(10))])


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "block": lambda whole: whole[1:, :2],
    "inner block": lambda whole: whole[1:3, 1:3],
    "column": lambda whole: whole[2:, :1],
    "rows": lambda whole: whole[1:],
    "columns": lambda whole: whole[:, 1:],
    "transposed": lambda whole: whole.t(),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_overlap_that_torch_does_not_detect(name: str, dynamic: bool) -> None:
    def write(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        part.mul_(3)
        total = whole.sum()
        whole.add_(1)
        return total + part.sum()

    compiled = torch.compile(write, backend="dynaxla", dynamic=dynamic)
    for _ in range(2):
        mine, theirs = torch.arange(20.0).view(5, 4), torch.arange(20.0).view(5, 4)
        assert compiled(VIEWS[name](mine), mine).item() == write(VIEWS[name](theirs), theirs).item()
        torch.testing.assert_close(mine, theirs)


def test_neighbours_do_not_overlap() -> None:
    whole = torch.zeros(5, 4)
    assert not undetected_overlaps([whole[:, :2], whole[:, 2:], whole[0, 0].clone(), 3])
    assert not undetected_overlaps([whole[:2], whole[2:]])


def test_two_storages_on_one_memory_overlap() -> None:
    memory = np.zeros(20)
    assert undetected_overlaps([3, torch.from_numpy(memory)[:10], torch.zeros(3), torch.from_numpy(memory)[9:]]) == {1, 3}
    assert not undetected_overlaps([torch.from_numpy(memory)[:10], torch.from_numpy(memory)[10:]])


INTERNALLY_OVERLAPPING: dict[str, Callable[[], torch.Tensor]] = {
    "expanded": lambda: torch.arange(5.0).expand(4, 5),
    "windows": lambda: torch.arange(8.0).unfold(0, 5, 1),
}


@pytest.mark.parametrize("name", INTERNALLY_OVERLAPPING)
def test_elements_that_share_memory(name: str) -> None:
    """A write to one element writes to the others. Writes that eager mode refuses are refused at the same op."""

    def write(whole: torch.Tensor, other: torch.Tensor, factor: int) -> torch.Tensor:
        other[0] = 1
        whole[0].mul_(factor)
        return whole.sum() + other.sum()

    compiled = torch.compile(write, backend="dynaxla", dynamic=True)
    for make in (lambda: torch.arange(20.0).view(4, 5), INTERNALLY_OVERLAPPING[name]):
        mine, theirs, others = make(), make(), (torch.zeros(3), torch.zeros(3))
        assert compiled(mine, others[0], 3).item() == write(theirs, others[1], 3).item()
        torch.testing.assert_close((mine, others[0]), (theirs, others[1]))


def test_internally_overlapping() -> None:
    crossed = torch.zeros(30).as_strided((2, 3), (3, 2))
    apart = [torch.zeros(2, 3).t(), torch.zeros(1, 3).expand(1, 3), torch.zeros(0, 3).expand(0, 3), crossed]
    together = [torch.zeros(3).expand(2, 3), torch.zeros(9).unfold(0, 3, 2), torch.zeros(30).as_strided((2, 3), (4, 2))]
    assert internally_overlapping([3, *apart, *together]) == {5, 6, 7}


def test_internal_overlap_at_a_later_call() -> None:
    overlaps = AliasGuard([torch.zeros(3, 5)], {0}, (), static=False)
    assert overlaps.is_needed
    assert overlaps.check([torch.zeros(5, 3).t()])
    assert not overlaps.check([INTERNALLY_OVERLAPPING["windows"]()])
