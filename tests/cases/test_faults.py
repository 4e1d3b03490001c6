"""The list of planted faults: each fault can be planted and removed, and a draw has faults of all modules."""

from __future__ import annotations

import pytest

from cases import faults


def test_draw_has_faults_of_all_modules() -> None:
    drawn = faults.drawn()
    assert len(set(drawn)) == len(drawn) == faults.COUNT
    assert drawn == faults.drawn()
    for module in faults.FOLDERS:
        assert len(set(drawn) & set(faults.faults_of(module))) >= 2, module


def test_names_of_faults_are_unique() -> None:
    assert len(faults.all_faults()) == sum(len(faults.faults_of(module)) for module in faults.FOLDERS)


@pytest.mark.parametrize("module", faults.FOLDERS)
def test_each_fault_can_be_planted(module: str) -> None:
    for fault in faults.faults_of(module).values():
        with fault():
            pass
