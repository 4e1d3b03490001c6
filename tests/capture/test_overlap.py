"""Inputs that lie in the same memory, and are written to."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dynaxla.capture.overlap import overlooked

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
def test_writes_are_seen_in_the_other(name: str, dynamic: bool) -> None:
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
    assert not overlooked([whole[:, :2], whole[:, 2:], whole[0, 0].clone(), 3])
    assert not overlooked([whole[:2], whole[2:]])
