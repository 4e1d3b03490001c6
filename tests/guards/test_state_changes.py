"""Tests of guards/state_changes.py: the stamp changes with each change of the state that a function reads, and only then."""

from __future__ import annotations

import torch

from dynaxla.guards.state_changes import StateChangeDetector, version_of


def test_stamp_changes_with_the_state() -> None:
    constant, own, entries = torch.ones(2), torch.ones(2), {"a": 1}

    def function() -> object:
        return constant, own, entries

    detector = StateChangeDetector({"function": function}, [own])
    first = detector.stamp()
    detector.captured.put("key", 1)
    own.add_(1)
    assert detector.stamp() == first
    assert detector.captured.get("key") == 1
    constant.add_(1)
    second = detector.stamp()
    assert second != first
    assert detector.captured.get("key") is None
    entries["a"] = 2
    assert detector.stamp() not in (first, second)


def test_state_of_a_tensor() -> None:
    tensor = torch.ones(2)
    before = version_of(tensor)
    assert version_of(tensor) == before
    tensor.data = torch.ones(2)
    assert version_of(tensor) != before
    with torch.inference_mode():
        assert version_of(torch.ones(2))[1] is None
