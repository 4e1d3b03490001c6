"""What it costs to see that nothing around a step has changed: the places that are looked at."""

from __future__ import annotations

import torch

from benchmarks import watch


def test_every_parameter_is_watched_and_closures_are_places() -> None:
    small, wider = watch.measure(layers=3, closures=1, rounds=3), watch.measure(layers=3, closures=5, rounds=3)
    assert small["tensors"] == wider["tensors"] == 6
    assert wider["places"] > small["places"]
    assert 0 < small["minimum_us"] <= small["median_us"]
    assert small["beyond_tensors_us"] == small["minimum_us"] - 0.15 * 6


def test_the_step_trains() -> None:
    step, x = watch.step_of(layers=2, closures=1), torch.ones(2, 4)
    assert step(x) > step(x)
