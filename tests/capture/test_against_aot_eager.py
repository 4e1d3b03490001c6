"""Tests of the cases of tests/cases/aot. The reference is eager mode, or aot_eager for cases in which aot_eager differs from eager mode."""

from __future__ import annotations

import pytest

from cases.aot import CASES
from cases.aot.judge import judge


@pytest.mark.sample(usual=10)
@pytest.mark.parametrize("name", CASES)
def test_case_agrees_with_eager_or_aot_eager(name: str) -> None:
    judge(CASES[name])


def test_number_of_cases() -> None:
    assert len(CASES) >= 150
