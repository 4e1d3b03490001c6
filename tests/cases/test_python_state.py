"""Random changes of Python state: a compiled step notices all changes that eager mode notices, and the generator finds planted faults."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.faults.guards import FAULTS
from cases.python_state import fault_search
from cases.python_state.cases import draw_case, judge, judge_compiled
from cases.python_state.choices import HypothesisChoices, SeededChoices

# Faults of several kinds, each of which few cases suffice to find.
QUICKLY_FOUND = [
    "code_is_ignored",
    "numpy_scalars_are_equal",
    "slices_are_equal",
    "closure_cells_are_ignored",
    "methods_are_ignored",
    "code_without_a_file_is_trusted",
    "globals_are_ignored",
    "the_reference_checks_ignore_containers",
    "the_reference_checks_ignore_classes",
]


@settings(max_examples=150)
@given(st.data(), st.booleans())
def test_changes_that_eager_mode_notices_are_noticed(data: st.DataObject, with_observation: bool) -> None:
    case = draw_case(HypothesisChoices(data.draw))
    verdict = judge(case, with_observation)
    assert not verdict.problem, f"{verdict.problem}: {case.change[0]}\n{case.text}"


@pytest.mark.quick
def test_seeded_changes_are_noticed() -> None:
    verdicts = [judge(draw_case(SeededChoices(seed)), bool(seed % 2)) for seed in range(500, 1000)]
    assert [500 + index for index, verdict in enumerate(verdicts) if verdict.problem] == []
    assert sum(verdict.differs for verdict in verdicts) > 300
    assert sum(verdict.refused for verdict in verdicts) < 10


@pytest.mark.quick
@pytest.mark.sample(quick=2)
@pytest.mark.parametrize("seed", range(2000, 2012))
def test_compiled_steps_notice_changes(seed: int) -> None:
    case = draw_case(SeededChoices(seed))
    verdict = judge_compiled(case)
    assert not verdict.problem, f"{verdict.problem}: {case.change[0]}\n{case.text}"


@pytest.mark.parametrize("name", QUICKLY_FOUND)
def test_planted_faults_are_found(name: str) -> None:
    assert fault_search.find(FAULTS[name], range(300))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_every_planted_fault_is_found(name: str) -> None:
    assert fault_search.find(FAULTS[name], range(3000))
