"""Which device a graph is on, and what is refused."""

from __future__ import annotations

import pytest
import torch

import dynaxla
from dynaxla.runtime.devices import common_device, jax_device, platform_of

CPU = torch.device("cpu")


def test_one_device() -> None:
    assert common_device([]) == CPU
    assert common_device([CPU, CPU]) == CPU
    assert common_device([torch.device("cuda"), torch.device("cuda:0")]) == torch.device("cuda:0")


@pytest.mark.parametrize("names", [("cpu", "cuda:0"), ("cuda:0", "cuda:1")], ids=str)
def test_several_devices(names: tuple[str, str]) -> None:
    with pytest.raises(dynaxla.DeviceMismatch, match=f"tensors on several devices: {names[0]}, {names[1]}") as caught:
        common_device(map(torch.device, names))
    assert "torch.compiler.disable" in caught.value.hint


def test_platforms() -> None:
    assert platform_of(CPU) == "cpu"
    assert platform_of(torch.device("cuda:1")) == ("rocm" if torch.version.hip else "cuda")
    with pytest.raises(dynaxla.UnsupportedTensor, match="device 'xpu' cannot be handed to XLA"):
        platform_of(torch.device("xpu"))


def test_the_cpu_is_not_jaxs_own() -> None:
    """Our client's device, whatever the user's JAX does with its own."""
    import jax

    assert jax_device(CPU).platform == "cpu"
    assert jax_device(CPU) is jax_device(CPU)
    assert jax_device(CPU) not in jax.devices("cpu")
