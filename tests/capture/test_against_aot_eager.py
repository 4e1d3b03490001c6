"""Each case of tests/cases/aot as in eager mode, or, where aot_eager differs from that, as in aot_eager."""

from __future__ import annotations

import pytest

from cases.aot import CASES
from cases.aot.judge import judge


@pytest.mark.sample(usual=10)
@pytest.mark.parametrize("name", CASES)
def test_as_in_eager_or_aot_eager(name: str) -> None:
    judge(CASES[name])


def test_the_table_is_long() -> None:
    assert len(CASES) >= 150
