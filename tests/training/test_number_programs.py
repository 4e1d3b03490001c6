"""Random steps that compute with Python numbers have eager mode's results. `python -m cases.number_programs --count 1000` runs more."""

from __future__ import annotations

import pytest

from cases.faults.steps import NUMBER_FAULTS
from cases.number_programs.programs import difference
from dynaxla.observe import metrics


@pytest.mark.sample(usual=4)
@pytest.mark.parametrize("first_seed", range(0, 60, 5))
def test_random_steps(first_seed: int) -> None:
    before = metrics.snapshot().get("steps", 0)
    for seed in range(first_seed, first_seed + 5):
        assert not difference(seed)
    assert metrics.snapshot().get("steps", 0) - before >= 10, "no call was replayed"


@pytest.mark.thorough
@pytest.mark.parametrize("name", NUMBER_FAULTS)
def test_planted_faults_are_found(name: str) -> None:
    with NUMBER_FAULTS[name]():
        assert any(difference(seed) for seed in range(40))
