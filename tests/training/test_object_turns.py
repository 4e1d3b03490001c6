"""Random steps that get several sets of objects in turns: results equal eager mode's, and each planted fault is found.

`python -m cases.object_turns --count 5000` runs more of them.
"""

from __future__ import annotations

import pytest

import dynaxla
from cases.faults.steps import FAULTS
from cases.object_turns.programs import differences

SEEDS = range(40)


@pytest.mark.sample(usual=2)
@pytest.mark.parametrize("seed", SEEDS)
def test_random_steps(seed: int) -> None:
    before = dynaxla.metrics.snapshot().get("steps", 0)
    assert not differences(seed)
    if seed % 2 == 0:  # with fullgraph; without it, few calls equal a call that was observed in eager mode
        assert dynaxla.metrics.snapshot().get("steps", 0) > before, "no call was replayed"


@pytest.mark.thorough
@pytest.mark.sample(usual=1)
@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(name: str) -> None:
    with FAULTS[name]():
        assert differences(0)
