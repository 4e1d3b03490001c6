"""Which device a graph is on, and what is refused."""

from __future__ import annotations

import pytest
import torch

import dynaxla
from dynaxla.runtime import devices
from dynaxla.runtime.devices import common_device, jax_device, main_device, platform_of, with_index
from support import internals

CPU = torch.device("cpu")


def test_one_device() -> None:
    assert common_device([]) == CPU
    assert common_device([CPU, CPU]) == CPU
    assert common_device([torch.device("cuda"), torch.device("cuda:0")]) == torch.device("cuda:0")


@pytest.mark.parametrize("names", [("cpu", "cuda:0"), ("cuda:0", "cuda:1")], ids=str)
def test_several_devices(names: tuple[str, str]) -> None:
    with pytest.raises(dynaxla.errors.DeviceMismatch, match=f"tensors on several devices: {names[0]}, {names[1]}") as caught:
        common_device(map(torch.device, names))
    assert "torch.compiler.disable" in caught.value.hint


def test_a_gpu_without_an_index_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert with_index(torch.device("cuda")) == torch.device("cuda:0"), "no GPU is in use"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert with_index(torch.device("cuda")) == torch.device("cuda:1")
    assert with_index(torch.device("cuda:0")) == torch.device("cuda:0")
    assert with_index(torch.device("cpu:0")) == CPU
    assert common_device([torch.device("cuda"), torch.device("cuda:1")]) == torch.device("cuda:1")


def test_an_accelerator_decides() -> None:
    assert main_device([]) == CPU
    assert main_device([CPU, torch.device("meta")]) == CPU, "what has no data is nowhere"
    assert main_device([torch.device("cuda:1"), CPU, torch.device("cuda:0")]) == torch.device("cuda:0")


def test_a_gpu_is_found_by_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX lists the devices in any order, and may see fewer."""

    class Seen:
        def __init__(self, index: int) -> None:
            self.local_hardware_id = index

    two, one = Seen(2), Seen(1)
    internals.accelerators(monkeypatch, [two, one])
    try:
        assert jax_device(torch.device("cuda:1")) is one
        assert jax_device(torch.device("cuda:2")) is two
        with pytest.raises(dynaxla.errors.UnsupportedTensor, match="JAX does not see cuda:0"):
            jax_device(torch.device("cuda"))
    finally:
        devices._accelerator.cache_clear()


def test_platforms() -> None:
    assert platform_of(CPU) == "cpu"
    assert platform_of(torch.device("cuda:1")) == ("rocm" if torch.version.hip else "cuda")
    with pytest.raises(dynaxla.errors.UnsupportedTensor, match="device 'xpu' cannot be handed to XLA"):
        platform_of(torch.device("xpu"))


def test_the_cpu_is_not_jaxs_own() -> None:
    """Our client's device, whatever the user's JAX does with its own."""
    import jax

    assert jax_device(CPU).platform == "cpu"
    assert jax_device(CPU) is jax_device(CPU)
    assert jax_device(CPU) not in jax.devices("cpu")
