"""With eight devices: models on each, data to each, and the parallel training that people write by hand."""

from __future__ import annotations

import copy
import io
import threading
from typing import Any

import jax
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dynaxla.device import storages

PLACES = [f"jax:{index}" for index in range(8)]


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.GELU(), nn.Linear(5, 3))


def _arrays_are_where_they_say(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        array = storages.array_of(tensor.untyped_storage())
        assert array is not None
        assert array.devices() == {jax.local_devices()[tensor.device.index]}, tensor.device


def check_a_model_on_each() -> None:
    assert torch.jax.device_count() == torch.accelerator.device_count() == 8
    x = torch.randn(4, 6)
    model = _network()
    expected = copy.deepcopy(model)
    expected(x).square().sum().backward()
    for place in PLACES:
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
    """Parameters copied to each device, a part of each batch to each, gradients summed on the first: as the CPU does alone."""
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

    replicas = [copy.deepcopy(model).to(place) for place in PLACES]
    optimizer = torch.optim.Adam(replicas[0].parameters(), lr=0.01)
    losses = []
    for x, y in loader:
        found: list[float] = []
        failed: list[BaseException] = []

        def work(replica: nn.Module, x: torch.Tensor, y: torch.Tensor, found: Any = found, failed: Any = failed) -> None:
            try:
                replica.zero_grad()
                place = next(replica.parameters()).device
                loss = nn.functional.cross_entropy(replica(x.to(place)), y.to(place)) / len(PLACES)
                loss.backward()
                found.append(loss.item())
            except BaseException as error:
                failed.append(error)

        parts = zip(replicas, x.chunk(8), y.chunk(8), strict=True)
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
