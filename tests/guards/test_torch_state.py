"""torch's own settings, as a recorded program depends on them."""

from __future__ import annotations

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
    lambda: torch.device("meta"),
]


def test_settings_of_torch() -> None:
    usual = global_state()
    states = [usual]
    for make in SETTINGS:
        with make():
            states.append(global_state())
        assert global_state() == usual
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


@pytest.mark.parametrize("place", private.FLOAT32_PRECISIONS, ids=".".join)
def test_precision_of_float32(place: tuple[str, str]) -> None:
    """The newer settings are seen, also where the older getters raise because they contradict them."""
    usual, given = global_state(), private.float32_precision(*place)
    for value in ("ieee", "tf32"):
        torch._C._set_fp32_precision_setter(*place, value)
        try:
            assert (global_state() == usual) == (value == given)
        finally:
            torch._C._set_fp32_precision_setter(*place, given)
    assert global_state() == usual


def test_a_plain_cuda_is_the_current_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    states = []
    for current in (0, 1):
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_initialized", lambda: True)
            patch.setattr(torch.cuda, "current_device", lambda current=current: current)
            states.append(global_state())
    assert states[0] == global_state() != states[1]
