"""Tests of `synchronize`, which waits for compilations and checks."""

from __future__ import annotations

import time

import pytest
import torch

import dynaxla
from dynaxla.runtime import background
from support import internals


class _SlowCompilation:
    """A compilation that takes 0.05 seconds."""

    is_done = False

    def work(self) -> bool:
        time.sleep(0.05)
        self.is_done = True
        return False


class _FailedChecks:
    """The checks of a GPU, with a failed check."""

    def finish(self) -> None:
        raise IndexError("index 9 is out of range")


def test_synchronize_waits_for_compilations_and_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    first = _SlowCompilation()
    background.enqueue(first)
    dynaxla.synchronize()
    assert first.is_done
    second = _SlowCompilation()
    internals.late_report(monkeypatch, torch.device("cuda"), _FailedChecks())
    background.enqueue(second)
    with pytest.raises(IndexError, match="index 9"):
        dynaxla.synchronize()
    assert second.is_done
