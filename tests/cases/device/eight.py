"""With eight devices: models and data on each, what moves between them in each mode, and parallel training that people write by hand."""

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

PLACES = [f"jax:{index}" for index in range(8)]


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.GELU(), nn.Linear(5, 3))


def _arrays_are_where_they_say(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        array = storages.array_of(tensor.untyped_storage())
        assert array is not None
        assert array.devices() == {jax.local_devices()[tensor.device.index]}, tensor.device


def check_a_model_on_some() -> None:
    assert torch.jax.device_count() == torch.accelerator.device_count() == 8
    x = torch.randn(4, 6)
    model = _network()
    expected = copy.deepcopy(model)
    expected(x).square().sum().backward()
    for place in PLACES[::3]:
        mine = copy.deepcopy(model).to(place)
        there = x.to(place)
        result = mine(there)
        result.square().sum().backward()
        gradients = [parameter.grad for parameter in mine.parameters()]
        assert {tensor.device for tensor in (result, *gradients, *mine.buffers())} == {torch.device(place)}
        _arrays_are_where_they_say(result, *gradients, *mine.parameters(), *mine.buffers())
        torch.testing.assert_close([g.cpu() for g in gradients], [p.grad for p in expected.parameters()], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mine[1].running_mean.cpu(), expected[1].running_mean)


def check_copies_between_them() -> None:
    source = torch.arange(12.0).view(3, 4).to("jax:1")
    for place in PLACES:
        for made in (
            source.to(place, copy=True), source.t().to(place, copy=True).t(), source[:, 1:3].to(place, copy=True),
            torch.empty(3, 4, device=place).copy_(source), source.detach().to(torch.device(place), torch.float64),
        ):  # fmt: skip
            _arrays_are_where_they_say(made)
            wanted = source.cpu()[:, 1:3] if made.shape[1] == 2 else source.cpu()
            assert made.tolist() == wanted.tolist()
            made.zero_()
    assert source.tolist() == torch.arange(12.0).view(3, 4).tolist()
    part = torch.zeros(4, 3, device="jax:5")
    part.t()[1:].copy_(source[1:])
    assert part.t().tolist() == [[0, 0, 0, 0], [4, 5, 6, 7], [8, 9, 10, 11]]
    _arrays_are_where_they_say(part)
    assert source.to("jax:1") is source
    with pytest.raises(RuntimeError, match="same device"):
        source.cpu().to("jax:2") @ source.t()


def check_files_go_to_another_device() -> None:
    saved = {"a": torch.arange(3.0).to("jax:3"), "b": torch.ones(2).to("jax:6")}
    for place, expected in [
        (None, ["jax:3", "jax:6"]), ("jax:2", ["jax:2"] * 2), ("cpu", ["cpu"] * 2), (torch.device("jax"), ["jax:0"] * 2),
        ({"jax:3": "jax:1", "jax:6": "cpu"}, ["jax:1", "cpu"]), (lambda storage, _: storage, ["cpu"] * 2),
    ]:  # fmt: skip
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        found = torch.load(file, map_location=place)
        assert [str(found[name].device) for name in "ab"] == expected, place
        assert [found[name].tolist() for name in "ab"] == [[0, 1, 2], [1, 1]]
        _arrays_are_where_they_say(*(tensor for tensor in found.values() if tensor.device.type == "jax"))


def check_random_numbers_of_each() -> None:
    torch.manual_seed(3)
    first = [torch.randn(3, device=place) for place in PLACES]
    torch.manual_seed(3)
    assert [tensor.tolist() for tensor in first] == [torch.randn(3, device=place).tolist() for place in PLACES]
    torch.jax.set_rng_state(torch.jax.get_rng_state("jax:2"), "jax:4")
    assert torch.rand(2, device="jax:4").tolist() == torch.rand(2, device="jax:2").tolist()
    with torch.random.fork_rng(devices=range(8), device_type="jax"):
        inside = [torch.rand(1, device=place).item() for place in PLACES]
    assert inside == [torch.rand(1, device=place).item() for place in PLACES]
    _arrays_are_where_they_say(*first)


def check_a_model_in_parts() -> None:
    """Layers on several devices, with copies between them."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in PLACES]
    whole = nn.Sequential(*copy.deepcopy(layers))
    parts = [layer.to(place) for layer, place in zip(layers, PLACES, strict=True)]
    x = torch.randn(2, 4)
    whole(x).sum().backward()
    value = x
    for part in parts:
        value = part(value.to(part.weight.device))
    value.sum().backward()
    for part, theirs in zip(parts, whole, strict=True):
        torch.testing.assert_close(part.weight.grad.cpu(), theirs.weight.grad)
        assert part.weight.grad.device == part.weight.device
    moved = nn.Sequential(*parts).to("jax:2")
    assert {parameter.device.index for parameter in moved.parameters()} == {parameter.grad.device.index for parameter in moved.parameters()}


def check_parallel_training() -> None:
    """Parameters copied to every second device, a part of each batch to each, gradients summed on the first: as the CPU does alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    loader = DataLoader(TensorDataset(torch.randn(32, 6, dtype=torch.float64), torch.randint(3, (32,))), batch_size=16)

    def alone() -> Any:
        mine = copy.deepcopy(model)
        optimizer = torch.optim.Adam(mine.parameters(), lr=0.01)
        losses = []
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(mine(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, [parameter.detach() for parameter in mine.parameters()]

    replicas = [copy.deepcopy(model).to(place) for place in PLACES[::2]]
    optimizer = torch.optim.Adam(replicas[0].parameters(), lr=0.01)
    losses = []
    for x, y in loader:
        found: list[float] = []
        failed: list[BaseException] = []

        def work(replica: nn.Module, x: torch.Tensor, y: torch.Tensor, found: Any = found, failed: Any = failed) -> None:
            try:
                replica.zero_grad()
                place = next(replica.parameters()).device
                loss = nn.functional.cross_entropy(replica(x.to(place)), y.to(place)) / len(replicas)
                loss.backward()
                found.append(loss.item())
            except BaseException as error:
                failed.append(error)

        parts = zip(replicas, x.chunk(len(replicas)), y.chunk(len(replicas)), strict=True)
        threads = [threading.Thread(target=work, args=part) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed, failed
        losses.append(sum(found))
        with torch.no_grad():
            for leader, *others in zip(*(replica.parameters() for replica in replicas), strict=True):
                for other in others:
                    leader.grad += other.grad.to(leader.device)
        optimizer.step()
        with torch.no_grad():
            for leader, *others in zip(*(replica.parameters() for replica in replicas), strict=True):
                for other in others:
                    other.copy_(leader)
    expected = alone()
    torch.testing.assert_close(losses, expected[0])
    for replica in replicas:
        torch.testing.assert_close([parameter.detach().cpu() for parameter in replica.parameters()], expected[1])


def check_memory_of_each() -> None:
    before = [torch.jax.memory_allocated(place) for place in PLACES]
    large = torch.zeros(1 << 18, device="jax:4") + 1
    torch.jax.synchronize("jax:4")
    after = [torch.jax.memory_allocated(place) for place in PLACES]
    assert [late - early >= large.nbytes for late, early in zip(after, before, strict=True)] == [index == 4 for index in range(8)]


def _ways(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """The function in eager mode, in lazy mode, where it is recorded and run, and compiled."""

    def lazily(*args: Any) -> Any:
        with dynaxla.device.lazy():
            return function(*args)

    return [function, lazily, compile_anew(function)]


def check_copies_in_each_mode() -> None:
    """Between devices, from the CPU and to it, whole and to a part; what is copied does not follow."""

    def move(x: torch.Tensor, there: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = (x + 1).to("jax:3")
        waits_for_none = (x * 2).to("jax:6", non_blocking=True)
        there[1:].copy_(y[1:], non_blocking=True)
        there[0].copy_(waits_for_none[0].double())
        x.mul_(10)
        return y, waits_for_none, there + 0, y.to("jax:3"), y.to("jax:5").t().to("jax:0"), y.cpu() + 0.5, y.to(x.device) - x

    for way in _ways(move):
        for one, other in (("jax:1", "jax:4"), ("jax:3", "jax:0")):
            x, there = torch.arange(6.0).view(2, 3).to(one), torch.zeros(2, 3, device=other)
            found = way(x, there)
            assert [str(tensor.device) for tensor in found] == ["jax:3", "jax:6", other, "jax:3", "jax:0", "cpu", one]
            _arrays_are_where_they_say(*(tensor for tensor in (*found, x, there) if tensor.device.type == "jax"))
            y, doubled = [[1, 2, 3], [4, 5, 6]], [[0, 2, 4], [6, 8, 10]]
            wanted = [y, doubled, [doubled[0], y[1]], y, [[1, 4], [2, 5], [3, 6]], [[v + 0.5 for v in row] for row in y]]
            assert [tensor.tolist() for tensor in found[:6]] == wanted
            assert found[6].tolist() == [[1, -8, -17], [-26, -35, -44]]
            assert (x.tolist(), there.tolist()) == ([[0, 10, 20], [30, 40, 50]], [doubled[0], y[1]])


class _Halves(nn.Module):
    """A part on each of two devices."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second = nn.Linear(4, 3).double(), nn.Linear(3, 2).double()
        self.first.to(first)
        self.second.to(second)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh().to(self.second.weight.device))


def _train(model: nn.Module, forward: Callable[[torch.Tensor], torch.Tensor], mode: Callable[[], Any], **settings: Any) -> list[Any]:
    """Two steps. Gives losses, and what the parameters and the states are then."""
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
    """One optimizer for both parts, whose states are where the parameters are."""
    reference = _Halves("cpu", "cpu")
    expected = _train(reference, reference, MODES["eager"])
    for compile_it, mode, settings in (
        (False, "eager", {"foreach": True}), (False, "lazy", {"foreach": False}), (True, "eager", {}), (True, "lazy", {"fused": True}),
    ):  # fmt: skip
        model = _Halves("jax:2", "jax:7")
        torch.testing.assert_close(_train(model, compile_anew(model) if compile_it else model, MODES[mode], **settings), expected)
        assert [parameter.device.index for parameter in model.parameters()] == [2, 2, 7, 7]


def check_states_load_from_another_device() -> None:
    """Parameters and an optimizer's states go to where their own are; with assign=True the parameters become what is loaded."""
    model = _Halves("jax:1", "jax:4")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model(torch.ones(2, 4, dtype=torch.float64, device="jax:1")).sum().backward()
    optimizer.step()
    for mode in MODES.values():
        other = _Halves("jax:5", "jax:4")
        others = torch.optim.AdamW(other.parameters(), lr=0.05)
        with mode():
            for value in other.parameters():
                value.data.mul_(2)
            other.load_state_dict(model.state_dict())
            others.load_state_dict(optimizer.state_dict())
        assert [parameter.device.index for parameter in other.parameters()] == [5, 5, 4, 4]
        assert [state["exp_avg"].device.index for state in others.state.values()] == [5, 5, 4, 4]
        for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
            assert mine.tolist() == theirs.tolist()
            assert others.state[mine]["exp_avg"].tolist() == optimizer.state[theirs]["exp_avg"].tolist()
        _arrays_are_where_they_say(*(parameter.detach() for parameter in other.parameters()))
    other.load_state_dict(model.state_dict(), assign=True)
    assert [parameter.device.index for parameter in other.parameters()] == [1, 1, 4, 4]


def check_copies_of_modules_stay_where_they_are() -> None:
    model = _Halves("jax:6", "jax:3")
    for mode in MODES.values():
        with mode():
            model.first.weight.data.add_(1)
            made = copy.deepcopy(model)
            model.first.weight.data.sub_(1)
        assert [parameter.device.index for parameter in made.parameters()] == [6, 6, 3, 3]
        assert (made.first.weight - model.first.weight).round().tolist() == [[1] * 4] * 3
        assert made.second.weight.tolist() == model.second.weight.tolist()
        assert made(torch.ones(1, 4, dtype=torch.float64, device="jax:6")).device == torch.device("jax:3")


def check_the_default_device_in_each_mode() -> None:
    def make() -> tuple[torch.Tensor, ...]:
        return torch.zeros(2) + 1, torch.arange(3), torch.tensor([2.5]), torch.full((2,), 3.0).to("jax:1"), torch.ones(1, device="cpu")

    wanted = [("jax:5", [1, 1]), ("jax:5", [0, 1, 2]), ("jax:5", [2.5]), ("jax:1", [3, 3]), ("cpu", [1])]
    for way in _ways(make):
        with torch.device("jax:5"):
            found = way()
        assert [(str(tensor.device), tensor.tolist()) for tensor in found] == wanted
    torch.set_default_device("jax:5")
    try:
        for way in _ways(make):
            assert [(str(tensor.device), tensor.tolist()) for tensor in way()] == wanted
        layer = nn.Linear(3, 2)
        assert {layer.weight.device, layer(torch.randn(4, 3)).device, torch.get_default_device()} == {torch.device("jax:5")}
    finally:
        torch.set_default_device(None)
    assert torch.zeros(1).device.type == "cpu"


def check_what_is_refused_in_each_mode() -> None:
    """Operands of several devices, whatever the op, and a ninth device; nothing is written then."""
    x, y = torch.ones(2, 2, device="jax:2"), torch.ones(2, 2, device="jax:3")
    index = torch.tensor([0], device="jax:3")
    mixing: list[Callable[[torch.Tensor, torch.Tensor], Any]] = [
        lambda x, y: x + y, lambda x, y: x.add_(y), lambda x, y: x @ y, lambda x, y: torch.cat([x, y]),
        lambda x, y: torch.where(x > 0, x, y), lambda x, y: x.index_copy_(0, index, x[:1]), lambda x, y: nn.functional.linear(x, y),
        lambda x, y: torch.lerp(x, x, y),
    ]  # fmt: skip
    for mix in mixing:
        for way in _ways(mix):
            with pytest.raises(RuntimeError, match="same device"):
                way(x, y)
    absent: list[Callable[[torch.Tensor], Any]] = [
        lambda x: (x + 1).to("jax:8"), lambda x: x + torch.zeros(2, device="jax:8"), lambda x: torch.empty_like(x, device="jax:8"),
    ]  # fmt: skip
    for ask in absent:
        for way in _ways(ask):
            with pytest.raises(RuntimeError, match=r'there is no "jax:8"|jax:2 and jax:8'):  # TorchDynamo's own words, where it looks first
                way(x)
    for ask in (torch.jax.synchronize, torch.jax.memory_allocated, torch.jax.get_rng_state, torch.jax.Stream):
        with pytest.raises(RuntimeError, match='there is no "jax:8"'):
            ask("jax:8")
    with torch.device("jax:8"), pytest.raises(RuntimeError, match='there is no "jax:8"'):
        torch.zeros(2)
    assert x.tolist() == y.tolist() == [[1, 1], [1, 1]]
