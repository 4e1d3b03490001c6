"""Tests of the device of a graph, and of refused devices."""

from __future__ import annotations

import pytest
import torch

import dynaxla
from dynaxla.runtime import devices
from dynaxla.runtime.devices import common_device, jax_device, main_device, platform_of, with_index
from support import internals

CPU = torch.device("cpu")


def test_common_device() -> None:
    assert common_device([]) == CPU
    assert common_device([CPU, CPU]) == CPU
    assert common_device([torch.device("cuda"), torch.device("cuda:0")]) == torch.device("cuda:0")


@pytest.mark.parametrize("names", [("cpu", "cuda:0"), ("cuda:0", "cuda:1")], ids=str)
def test_several_devices_are_refused(names: tuple[str, str]) -> None:
    with pytest.raises(dynaxla.errors.DeviceMismatch, match=f"tensors on several devices: {names[0]}, {names[1]}") as caught:
        common_device(map(torch.device, names))
    assert "torch.compiler.disable" in caught.value.hint


def test_gpu_without_an_index_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert with_index(torch.device("cuda")) == torch.device("cuda:0"), "no GPU is in use"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert with_index(torch.device("cuda")) == torch.device("cuda:1")
    assert with_index(torch.device("cuda:0")) == torch.device("cuda:0")
    assert with_index(torch.device("cpu:0")) == CPU
    assert common_device([torch.device("cuda"), torch.device("cuda:1")]) == torch.device("cuda:1")


def test_main_device_is_the_first_accelerator() -> None:
    assert main_device([]) == CPU
    assert main_device([CPU, torch.device("meta")]) == CPU, "tensors without data have no device"
    assert main_device([torch.device("cuda:1"), CPU, torch.device("cuda:0")]) == torch.device("cuda:0")


def test_gpu_is_found_by_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX lists devices in any order, and may see fewer devices than torch."""

    class FakeDevice:
        def __init__(self, index: int) -> None:
            self.local_hardware_id = index

    second, first = FakeDevice(2), FakeDevice(1)
    internals.accelerators(monkeypatch, [second, first])
    try:
        assert jax_device(torch.device("cuda:1")) is first
        assert jax_device(torch.device("cuda:2")) is second
        with pytest.raises(dynaxla.errors.UnsupportedTensor, match="JAX does not see cuda:0"):
            jax_device(torch.device("cuda"))
    finally:
        devices._accelerator.cache_clear()


def test_platforms() -> None:
    assert platform_of(CPU) == "cpu"
    assert platform_of(torch.device("cuda:1")) == ("rocm" if torch.version.hip else "cuda")
    with pytest.raises(dynaxla.errors.UnsupportedTensor, match="device 'xpu' cannot be handed to XLA"):
        platform_of(torch.device("xpu"))


def test_cpu_device_is_not_one_of_jaxs() -> None:
    """It is a device of dynaxla's client, so it does not depend on the user's settings of JAX."""
    import jax

    assert jax_device(CPU).platform == "cpu"
    assert jax_device(CPU) is jax_device(CPU)
    assert jax_device(CPU) not in jax.devices("cpu")
