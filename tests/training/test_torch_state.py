"""torch's own settings, as a recorded program depends on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dynaxla.training.torch_state import global_state

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
