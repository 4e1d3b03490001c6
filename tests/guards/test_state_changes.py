"""What a function reads: the stamp is another one after each change, and only then."""

from __future__ import annotations

import torch

from dynaxla.guards.state_changes import StateChangeDetector, state_of


def test_a_stamp() -> None:
    constant, own, entries = torch.ones(2), torch.ones(2), {"a": 1}

    def function() -> object:
        return constant, own, entries

    readings = StateChangeDetector({"function": function}, [own])
    first = readings.stamp()
    readings.captured.put("key", 1)
    own.add_(1)
    assert readings.stamp() == first
    assert readings.captured.get("key") == 1
    constant.add_(1)
    second = readings.stamp()
    assert second != first
    assert readings.captured.get("key") is None
    entries["a"] = 2
    assert readings.stamp() not in (first, second)


def test_the_state_of_a_tensor() -> None:
    tensor = torch.ones(2)
    before = state_of(tensor)
    assert state_of(tensor) == before
    tensor.data = torch.ones(2)
    assert state_of(tensor) != before
    with torch.inference_mode():
        assert state_of(torch.ones(2))[1] is None
