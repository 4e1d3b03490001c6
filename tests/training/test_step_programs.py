"""compile_step in training programs as users write them, compared with eager mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dynaxla
from cases.step_programs import PROGRAMS


def is_close(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_close, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return one == pytest.approx(other, rel=2e-4, abs=2e-4, nan_ok=True)
    return bool(one == other)


@pytest.mark.sample(usual=4)
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*before.*optimizer.step", "ignore:Converting a tensor with requires_grad")
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_in_eager_mode(name: str) -> None:
    expected = PROGRAMS[name](lambda step: step)
    torch._dynamo.reset()
    found = PROGRAMS[name](dynaxla.compile_step)
    assert is_close(found, expected), f"{found} instead of {expected}"
