"""`synchronize`: nothing goes on afterwards."""

from __future__ import annotations

import time

import pytest
import torch

import dynaxla
from dynaxla.runtime import background
from support import internals


class _Slow:
    """A compilation that takes a while."""

    is_done = False

    def work(self) -> bool:
        time.sleep(0.05)
        self.is_done = True
        return False


class _Failed:
    """The checks of a GPU, one of which has failed."""

    def finish(self) -> None:
        raise IndexError("index 9 is out of range")


def test_it_waits_for_compilations_and_for_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = _Slow()
    background.enqueue(slow)
    dynaxla.synchronize()
    assert slow.is_done
    again = _Slow()
    internals.late_report(monkeypatch, torch.device("cuda"), _Failed())
    background.enqueue(again)
    with pytest.raises(IndexError, match="index 9"):
        dynaxla.synchronize()
    assert again.is_done
