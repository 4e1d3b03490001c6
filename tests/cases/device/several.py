"""With four devices: ops, autograd, recordings and compiled graphs on devices other than "jax:0"."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dynaxla
from dynaxla.device import storages


def check_several_devices() -> None:
    assert torch.jax.device_count() == 4
    x = torch.arange(3.0).to("jax:1")
    assert (x + 1).device == x.sum().device == x[1:].device == torch.device("jax:1")
    assert x.to("jax:3").add_(1).tolist() == [1, 2, 3]
    assert x.tolist() == [0, 1, 2]
    with pytest.raises(RuntimeError, match="same device"):
        x + x.to("jax:0")
    assert torch.zeros(1, device="jax").device == x.to("jax").device == torch.device("jax:0")
    with pytest.raises(NotImplementedError, match='write "jax:2"'):
        torch.jax.set_device(2)
    with pytest.raises(RuntimeError, match='there is no "jax:4"'):
        torch.zeros(1, device="jax:4")
    assert copy.deepcopy(x).device == x.device
    torch.manual_seed(0)
    assert torch.rand(2, device="jax:1").tolist() == torch.rand(2, device="jax:2").tolist()


def check_device_context_sets_the_current_device() -> None:
    """Random states, for instance those that a checkpoint saves, are those of the context's device."""
    states = [torch.jax.get_rng_state(index) for index in range(4)]
    torch.jax.manual_seed_all(0)
    torch.rand(2, device="jax:2")
    with torch.jax.device(2):
        assert torch.jax.current_device() == torch.jax.current_stream().device_index == torch.jax.Stream().device_index == 2
        assert torch.equal(torch.jax.get_rng_state(), torch.jax.get_rng_state(2))
        assert not torch.equal(torch.jax.get_rng_state(), torch.jax.get_rng_state(0))
    assert torch.jax.current_device() == 0
    torch.jax.set_rng_state_all(states)
    x = torch.ones(64, device="jax:3", requires_grad=True)
    y = checkpoint(lambda x: nn.functional.dropout(x * 3) * 2, x, use_reentrant=False)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


def check_backward_passes() -> None:
    for device in ("jax:0", "jax:3"):
        x = torch.ones(2, device=device, requires_grad=True)
        y = torch.ones(2, device="jax:1", requires_grad=True)
        (x * x + (y * 2).to(device)).cpu().sum().backward()
        assert x.grad is not None
        assert y.grad is not None
        assert (x.grad.device, x.grad.tolist(), y.grad.tolist()) == (torch.device(device), [2, 2], [2, 2])


def check_each_device_has_its_own_recording() -> None:
    with dynaxla.device.lazy():
        one, three = torch.arange(3.0, device="jax:1") + 1, torch.arange(3.0, device="jax:3") * 2
        with pytest.raises(RuntimeError, match="same device"):
            one + three
        with pytest.raises(RuntimeError, match="same device"):
            torch.zeros_like(one, device="jax:1").add_(three)
        moved = one.to("jax:3") + three
        assert (moved.device, moved.tolist()) == (torch.device("jax:3"), [1, 4, 7])
        drawn = torch.rand(2, device="jax:2")
    assert (one + 1).tolist() == [2, 3, 4]
    assert drawn.device == torch.device("jax:2")


def check_compiled_graphs() -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        y.add_(1)
        return torch.arange(3, device=x.device) * x + y

    compiled = torch.compile(step, backend="dynaxla")
    for device in ("jax:1", "jax:3"):
        x, y = torch.arange(3.0).to(device), torch.zeros(3).to(device)
        result = compiled(x, y)
        arrays = [storages.array_of(tensor.untyped_storage()) for tensor in (result, y)]
        assert result.device == torch.device(device)
        assert {jax_device.id for array in arrays if array is not None for jax_device in array.devices()} == {result.device.index}
        assert (result.tolist(), y.tolist()) == ([1, 2, 5], [1, 1, 1])
    with pytest.raises(RuntimeError, match="same device"):
        compiled(x, y.to("jax:0"))
    moved = torch.compile(lambda x: (x + 1).to("jax:2") * 2, backend="dynaxla")(x)
    assert (moved.device, moved.tolist()) == (torch.device("jax:2"), [2, 4, 6])
