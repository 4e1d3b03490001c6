"""Tests of buffers/device_kinds.py: the kind of buffers for each device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dynaxla.buffers import device_kinds
from dynaxla.runtime import clients, devices
from support import internals


def test_torchs_own_devices_have_no_kind() -> None:
    assert device_kinds.kind_of("cpu") is None
    assert device_kinds.kind_of("cuda") is None
    assert not devices.is_in_xla(torch.device("cpu"))


def test_registered_device(monkeypatch: pytest.MonkeyPatch) -> None:
    internals.no_other_devices(monkeypatch)
    kind: Any = object()
    device_kinds.register("meta", kind)
    devices.register("meta", lambda index: clients.cpu_device())
    assert device_kinds.kind_of("meta") is kind
    assert devices.is_in_xla(torch.device("meta"))
    assert devices.platform_of(torch.device("meta")) == "cpu"
    assert devices.jax_device(torch.device("meta")) is clients.cpu_device()
    assert devices.with_index(torch.device("meta")) == torch.device("meta", 0)
