"""Tests of guards/torch_state.py: torch's settings, on which recorded programs depend."""

from __future__ import annotations

import decimal
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dynaxla.guards.torch_state import global_state
from dynaxla.runtime import private

SETTINGS: list[Callable[[], Any]] = [
    torch.no_grad,
    torch.inference_mode,
    lambda: torch.autocast("cpu"),
    lambda: torch.autocast("cpu", torch.float16),
    lambda: torch.autocast("cpu", cache_enabled=False),
    lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    torch.autograd.graph.save_on_cpu,
    lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    lambda: torch.backends.cudnn.flags(enabled=False),
    lambda: decimal.localcontext(prec=5),
    lambda: decimal.localcontext(rounding=decimal.ROUND_UP),
    lambda: torch.device("meta"),
]


def test_each_setting_changes_the_state() -> None:
    initial = global_state()
    states = [initial]
    for make in SETTINGS:
        with make():
            states.append(global_state())
        assert global_state() == initial
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_default_dtype(torch.float64)
    try:
        assert global_state() not in states
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)
    assert len(set(states)) == len(states)
    with torch.device("meta"):
        assert global_state() == states[-1]


@pytest.mark.parametrize("setting", private.FLOAT32_PRECISIONS, ids=".".join)
def test_precision_of_float32(setting: tuple[str, str]) -> None:
    """The newer settings are noticed, also if they contradict the older ones, whose getters then raise."""
    initial, initial_value = global_state(), private.float32_precision(*setting)
    for value in ("ieee", "tf32"):
        torch._C._set_fp32_precision_setter(*setting, value)
        try:
            assert (global_state() == initial) == (value == initial_value)
        finally:
            torch._C._set_fp32_precision_setter(*setting, initial_value)
    assert global_state() == initial


def test_current_gpu_is_part_of_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    states = []
    for current in (0, 1):
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_initialized", lambda: True)
            patch.setattr(torch.cuda, "current_device", lambda current=current: current)
            states.append(global_state())
    assert states[0] == global_state() != states[1]
