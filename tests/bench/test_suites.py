"""Tests of the models of the suites."""

from __future__ import annotations

import torch

from dynaxla.autoselect import agreement
from dynaxla.bench import suites


def test_weights_depend_on_the_seed_and_batch_norms_are_calibrated() -> None:
    case = suites.choose("models", ["resnet18"])[0]
    first, same, other = (suites.make_model(case, seed, torch.float32, torch.device("cpu")) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(first.state_dict().values(), same.state_dict().values(), strict=True))
    assert not torch.equal(first.conv1.weight, other.conv1.weight)
    assert not first.training
    assert first.bn1.momentum == 0.1
    x, y = suites.make_inputs(case, 1, torch.Generator().manual_seed(0), torch.float32, torch.device("cpu"))[0], torch.zeros(1, 3, 224, 224)
    assert agreement.distance(first(x), first(y)) > 0.1
