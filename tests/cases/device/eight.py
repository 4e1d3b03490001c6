"""With eight devices: models and data on each, copies between them in each mode, and parallel training written by hand."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dynaxla
from dynaxla.device import storages

from .running import MODES, compile_anew

DEVICES = [f"jax:{index}" for index in range(8)]


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.GELU(), nn.Linear(5, 3))


def _check_devices_of_arrays(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        array = storages.array_of(tensor.untyped_storage())
        assert array is not None
        assert array.devices() == {jax.local_devices()[tensor.device.index]}, tensor.device


def check_models_on_several_devices() -> None:
    assert torch.jax.device_count() == torch.accelerator.device_count() == 8
    x = torch.randn(4, 6)
    model = _network()
    expected = copy.deepcopy(model)
    expected(x).square().sum().backward()
    for device in DEVICES[::3]:
        model_on_device = copy.deepcopy(model).to(device)
        x_on_device = x.to(device)
        result = model_on_device(x_on_device)
        result.square().sum().backward()
        gradients = [parameter.grad for parameter in model_on_device.parameters()]
        assert {tensor.device for tensor in (result, *gradients, *model_on_device.buffers())} == {torch.device(device)}
        _check_devices_of_arrays(result, *gradients, *model_on_device.parameters(), *model_on_device.buffers())
        torch.testing.assert_close([g.cpu() for g in gradients], [p.grad for p in expected.parameters()], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(model_on_device[1].running_mean.cpu(), expected[1].running_mean)


def check_copies_between_devices() -> None:
    source = torch.arange(12.0).view(3, 4).to("jax:1")
    for device in DEVICES:
        for copied in (
            source.to(device, copy=True), source.t().to(device, copy=True).t(), source[:, 1:3].to(device, copy=True),
            torch.empty(3, 4, device=device).copy_(source), source.detach().to(torch.device(device), torch.float64),
        ):  # fmt: skip
            _check_devices_of_arrays(copied)
            expected = source.cpu()[:, 1:3] if copied.shape[1] == 2 else source.cpu()
            assert copied.tolist() == expected.tolist()
            copied.zero_()
    assert source.tolist() == torch.arange(12.0).view(3, 4).tolist()
    part = torch.zeros(4, 3, device="jax:5")
    part.t()[1:].copy_(source[1:])
    assert part.t().tolist() == [[0, 0, 0, 0], [4, 5, 6, 7], [8, 9, 10, 11]]
    _check_devices_of_arrays(part)
    assert source.to("jax:1") is source
    with pytest.raises(RuntimeError, match="same device"):
        source.cpu().to("jax:2") @ source.t()


def check_files_load_onto_another_device() -> None:
    saved = {"a": torch.arange(3.0).to("jax:3"), "b": torch.ones(2).to("jax:6")}
    for map_location, expected_devices in [
        (None, ["jax:3", "jax:6"]), ("jax:2", ["jax:2"] * 2), ("cpu", ["cpu"] * 2), (torch.device("jax"), ["jax:0"] * 2),
        ({"jax:3": "jax:1", "jax:6": "cpu"}, ["jax:1", "cpu"]), (lambda storage, _: storage, ["cpu"] * 2),
    ]:  # fmt: skip
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        loaded = torch.load(file, map_location=map_location)
        assert [str(loaded[name].device) for name in "ab"] == expected_devices, map_location
        assert [loaded[name].tolist() for name in "ab"] == [[0, 1, 2], [1, 1]]
        _check_devices_of_arrays(*(tensor for tensor in loaded.values() if tensor.device.type == "jax"))


def check_random_numbers_on_each_device() -> None:
    torch.manual_seed(3)
    first = [torch.randn(3, device=device) for device in DEVICES]
    torch.manual_seed(3)
    assert [tensor.tolist() for tensor in first] == [torch.randn(3, device=device).tolist() for device in DEVICES]
    torch.jax.set_rng_state(torch.jax.get_rng_state("jax:2"), "jax:4")
    assert torch.rand(2, device="jax:4").tolist() == torch.rand(2, device="jax:2").tolist()
    with torch.random.fork_rng(devices=range(8), device_type="jax"):
        inside = [torch.rand(1, device=device).item() for device in DEVICES]
    assert inside == [torch.rand(1, device=device).item() for device in DEVICES]
    _check_devices_of_arrays(*first)


def check_layers_on_several_devices() -> None:
    """Values are copied from device to device."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in DEVICES]
    whole = nn.Sequential(*copy.deepcopy(layers))
    parts = [layer.to(device) for layer, device in zip(layers, DEVICES, strict=True)]
    x = torch.randn(2, 4)
    whole(x).sum().backward()
    value = x
    for part in parts:
        value = part(value.to(part.weight.device))
    value.sum().backward()
    for part, expected in zip(parts, whole, strict=True):
        torch.testing.assert_close(part.weight.grad.cpu(), expected.weight.grad)
        assert part.weight.grad.device == part.weight.device
    moved = nn.Sequential(*parts).to("jax:2")
    assert {parameter.device.index for parameter in moved.parameters()} == {parameter.grad.device.index for parameter in moved.parameters()}


def check_parallel_training() -> None:
    """Data parallelism gives the results of training on the CPU.

    Every second device has a copy of the parameters and gets a part of each batch. Gradients are summed on the first device.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    loader = DataLoader(TensorDataset(torch.randn(32, 6, dtype=torch.float64), torch.randint(3, (32,))), batch_size=16)

    def train_on_cpu() -> Any:
        own_model = copy.deepcopy(model)
        optimizer = torch.optim.Adam(own_model.parameters(), lr=0.01)
        losses = []
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(own_model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, [parameter.detach() for parameter in own_model.parameters()]

    replicas = [copy.deepcopy(model).to(device) for device in DEVICES[::2]]
    optimizer = torch.optim.Adam(replicas[0].parameters(), lr=0.01)
    losses = []
    for x, y in loader:
        part_losses: list[float] = []
        failed: list[BaseException] = []

        def work(replica: nn.Module, x: torch.Tensor, y: torch.Tensor, part_losses: Any = part_losses, failed: Any = failed) -> None:
            try:
                replica.zero_grad()
                device = next(replica.parameters()).device
                loss = nn.functional.cross_entropy(replica(x.to(device)), y.to(device)) / len(replicas)
                loss.backward()
                part_losses.append(loss.item())
            except BaseException as error:
                failed.append(error)

        parts = zip(replicas, x.chunk(len(replicas)), y.chunk(len(replicas)), strict=True)
        threads = [threading.Thread(target=work, args=part) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed, failed
        losses.append(sum(part_losses))
        with torch.no_grad():
            for leader, *others in zip(*(replica.parameters() for replica in replicas), strict=True):
                for other in others:
                    leader.grad += other.grad.to(leader.device)
        optimizer.step()
        with torch.no_grad():
            for leader, *others in zip(*(replica.parameters() for replica in replicas), strict=True):
                for other in others:
                    other.copy_(leader)
    expected = train_on_cpu()
    torch.testing.assert_close(losses, expected[0])
    for replica in replicas:
        torch.testing.assert_close([parameter.detach().cpu() for parameter in replica.parameters()], expected[1])


def check_memory_of_each_device() -> None:
    before = [torch.jax.memory_allocated(device) for device in DEVICES]
    large = torch.zeros(1 << 18, device="jax:4") + 1
    torch.jax.synchronize("jax:4")
    after = [torch.jax.memory_allocated(device) for device in DEVICES]
    assert [late - early >= large.nbytes for late, early in zip(after, before, strict=True)] == [index == 4 for index in range(8)]


def _variants(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """The function in eager mode, recorded in lazy mode, and compiled."""

    def lazily(*args: Any) -> Any:
        with dynaxla.device.lazy():
            return function(*args)

    return [function, lazily, compile_anew(function)]


def check_copies_in_each_mode() -> None:
    """Copies between devices and with the CPU, of whole tensors and parts. A later write to the source does not change a copy."""

    def move(x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = (x + 1).to("jax:3")
        doubled_without_waiting = (x * 2).to("jax:6", non_blocking=True)
        target[1:].copy_(y[1:], non_blocking=True)
        target[0].copy_(doubled_without_waiting[0].double())
        x.mul_(10)
        return y, doubled_without_waiting, target + 0, y.to("jax:3"), y.to("jax:5").t().to("jax:0"), y.cpu() + 0.5, y.to(x.device) - x

    for run in _variants(move):
        for source_device, target_device in (("jax:1", "jax:4"), ("jax:3", "jax:0")):
            x, target = torch.arange(6.0).view(2, 3).to(source_device), torch.zeros(2, 3, device=target_device)
            results = run(x, target)
            assert [str(tensor.device) for tensor in results] == ["jax:3", "jax:6", target_device, "jax:3", "jax:0", "cpu", source_device]
            _check_devices_of_arrays(*(tensor for tensor in (*results, x, target) if tensor.device.type == "jax"))
            y, doubled = [[1, 2, 3], [4, 5, 6]], [[0, 2, 4], [6, 8, 10]]
            expected = [y, doubled, [doubled[0], y[1]], y, [[1, 4], [2, 5], [3, 6]], [[v + 0.5 for v in row] for row in y]]
            assert [tensor.tolist() for tensor in results[:6]] == expected
            assert results[6].tolist() == [[1, -8, -17], [-26, -35, -44]]
            assert (x.tolist(), target.tolist()) == ([[0, 10, 20], [30, 40, 50]], [doubled[0], y[1]])


class _Halves(nn.Module):
    """Two layers, each on a device of its own."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second = nn.Linear(4, 3).double(), nn.Linear(3, 2).double()
        self.first.to(first)
        self.second.to(second)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh().to(self.second.weight.device))


def _train(model: nn.Module, forward: Callable[[torch.Tensor], torch.Tensor], mode: Callable[[], Any], **settings: Any) -> list[Any]:
    """Runs two steps. Returns the losses, and the parameters and states afterwards."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, **settings)
    x = torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4).to(next(model.parameters()).device)
    losses = []
    for _ in range(2):
        with mode():
            optimizer.zero_grad()
            loss = forward(x).square().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    for parameter, state in optimizer.state.items():
        assert {state[name].device for name in ("exp_avg", "exp_avg_sq")} == {parameter.device}
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [value.detach().cpu() for value in [*losses, *model.parameters(), *states]]


def check_a_module_on_two_devices_in_each_mode() -> None:
    """One optimizer trains both layers. Its states are on the devices of the parameters."""
    reference = _Halves("cpu", "cpu")
    expected = _train(reference, reference, MODES["eager"])
    for compile_it, mode, settings in (
        (False, "eager", {"foreach": True}), (False, "lazy", {"foreach": False}), (True, "eager", {}), (True, "lazy", {"fused": True}),
    ):  # fmt: skip
        model = _Halves("jax:2", "jax:7")
        torch.testing.assert_close(_train(model, compile_anew(model) if compile_it else model, MODES[mode], **settings), expected)
        assert [parameter.device.index for parameter in model.parameters()] == [2, 2, 7, 7]


def check_states_load_from_another_device() -> None:
    """Loaded parameters and optimizer states keep their devices. With assign=True, the loaded tensors become the parameters."""
    model = _Halves("jax:1", "jax:4")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model(torch.ones(2, 4, dtype=torch.float64, device="jax:1")).sum().backward()
    optimizer.step()
    for mode in MODES.values():
        other = _Halves("jax:5", "jax:4")
        other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.05)
        with mode():
            for value in other.parameters():
                value.data.mul_(2)
            other.load_state_dict(model.state_dict())
            other_optimizer.load_state_dict(optimizer.state_dict())
        assert [parameter.device.index for parameter in other.parameters()] == [5, 5, 4, 4]
        assert [state["exp_avg"].device.index for state in other_optimizer.state.values()] == [5, 5, 4, 4]
        for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
            assert mine.tolist() == theirs.tolist()
            assert other_optimizer.state[mine]["exp_avg"].tolist() == optimizer.state[theirs]["exp_avg"].tolist()
        _check_devices_of_arrays(*(parameter.detach() for parameter in other.parameters()))
    other.load_state_dict(model.state_dict(), assign=True)
    assert [parameter.device.index for parameter in other.parameters()] == [1, 1, 4, 4]


def check_deepcopied_modules_keep_their_devices() -> None:
    model = _Halves("jax:6", "jax:3")
    for mode in MODES.values():
        with mode():
            model.first.weight.data.add_(1)
            copied = copy.deepcopy(model)
            model.first.weight.data.sub_(1)
        assert [parameter.device.index for parameter in copied.parameters()] == [6, 6, 3, 3]
        assert (copied.first.weight - model.first.weight).round().tolist() == [[1] * 4] * 3
        assert copied.second.weight.tolist() == model.second.weight.tolist()
        assert copied(torch.ones(1, 4, dtype=torch.float64, device="jax:6")).device == torch.device("jax:3")


def check_the_default_device_in_each_mode() -> None:
    def make() -> tuple[torch.Tensor, ...]:
        return torch.zeros(2) + 1, torch.arange(3), torch.tensor([2.5]), torch.full((2,), 3.0).to("jax:1"), torch.ones(1, device="cpu")

    expected = [("jax:5", [1, 1]), ("jax:5", [0, 1, 2]), ("jax:5", [2.5]), ("jax:1", [3, 3]), ("cpu", [1])]
    for run in _variants(make):
        with torch.device("jax:5"):
            tensors = run()
        assert [(str(tensor.device), tensor.tolist()) for tensor in tensors] == expected
    torch.set_default_device("jax:5")
    try:
        for run in _variants(make):
            assert [(str(tensor.device), tensor.tolist()) for tensor in run()] == expected
        layer = nn.Linear(3, 2)
        assert {layer.weight.device, layer(torch.randn(4, 3)).device, torch.get_default_device()} == {torch.device("jax:5")}
    finally:
        torch.set_default_device(None)
    assert torch.zeros(1).device.type == "cpu"


def check_refused_devices_in_each_mode() -> None:
    """Operands on several devices, and a ninth device, raise an error. Nothing is written."""
    x, y = torch.ones(2, 2, device="jax:2"), torch.ones(2, 2, device="jax:3")
    index = torch.tensor([0], device="jax:3")
    ops_on_two_devices: list[Callable[[torch.Tensor, torch.Tensor], Any]] = [
        lambda x, y: x + y, lambda x, y: x.add_(y), lambda x, y: x @ y, lambda x, y: torch.cat([x, y]),
        lambda x, y: torch.where(x > 0, x, y), lambda x, y: x.index_copy_(0, index, x[:1]), lambda x, y: nn.functional.linear(x, y),
        lambda x, y: torch.lerp(x, x, y),
    ]  # fmt: skip
    for op in ops_on_two_devices:
        for run in _variants(op):
            with pytest.raises(RuntimeError, match="same device"):
                run(x, y)
    uses_of_a_ninth_device: list[Callable[[torch.Tensor], Any]] = [
        lambda x: (x + 1).to("jax:8"), lambda x: x + torch.zeros(2, device="jax:8"), lambda x: torch.empty_like(x, device="jax:8"),
    ]  # fmt: skip
    for use in uses_of_a_ninth_device:
        for run in _variants(use):
            with pytest.raises(RuntimeError, match=r'there is no "jax:8"|jax:2 and jax:8'):  # TorchDynamo's message, if it checks first
                run(x)
    for use in (torch.jax.synchronize, torch.jax.memory_allocated, torch.jax.get_rng_state, torch.jax.Stream):
        with pytest.raises(RuntimeError, match='there is no "jax:8"'):
            use("jax:8")
    with torch.device("jax:8"), pytest.raises(RuntimeError, match='there is no "jax:8"'):
        torch.zeros(2)
    assert x.tolist() == y.tolist() == [[1, 1], [1, 1]]
