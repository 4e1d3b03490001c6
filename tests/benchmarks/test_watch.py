"""Tests of the benchmark of checks that the state outside a step is unchanged."""

from __future__ import annotations

import torch

from benchmarks import watch


def test_measure_counts_parameters_and_closures() -> None:
    small, wider = watch.measure(layers=3, closures=1, rounds=3), watch.measure(layers=3, closures=5, rounds=3)
    assert small["tensors"] == wider["tensors"] == 6
    assert wider["entries"] > small["entries"]
    assert 0 < small["minimum_us"] <= small["median_us"]
    assert small["beyond_tensors_us"] == small["minimum_us"] - 0.15 * 6


def test_step_reduces_the_loss() -> None:
    step, x = watch.step_of(layers=2, closures=1), torch.ones(2, 4)
    assert step(x) > step(x)
