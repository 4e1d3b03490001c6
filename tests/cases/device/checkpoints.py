"""With eight devices: `torch.distributed.checkpoint` from each mesh to each other, without a whole tensor on the CPU."""

from __future__ import annotations

import math
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dynaxla.device import storages
from dynaxla.errors import ArgumentError, UnsupportedTensor
from dynaxla.sharding import Mesh, checkpointable, mark_sharding

from .on_meshes import MESH, spec_of

OTHER = Mesh((4, 2), ("a", "b"), [5, 4, 7, 6, 1, 0, 3, 2])


def saved(state: Any, path: Any) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(state, checkpoint_id=path)


def loaded(state: Any, path: Any) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, checkpoint_id=path)


@contextmanager
def folders() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@contextmanager
def copies_to_the_cpu() -> Iterator[list[int]]:
    """Yields the list of the sizes in bytes of all copies to the CPU and from it."""
    sizes: list[int] = []
    original_to_cpu, original_from_cpu = storages.to_cpu_tensor, storages.array_from_cpu

    def to_cpu_tensor(array: Any, dtype: torch.dtype) -> torch.Tensor:
        sizes.append(array.size * array.dtype.itemsize)
        return original_to_cpu(array, dtype)

    def array_from_cpu(tensor: torch.Tensor, target: Any) -> Any:
        sizes.append(tensor.nbytes)
        return original_from_cpu(tensor, target)

    storages.to_cpu_tensor, storages.array_from_cpu = to_cpu_tensor, array_from_cpu  # type: ignore[assignment]
    try:
        yield sizes
    finally:
        storages.to_cpu_tensor, storages.array_from_cpu = original_to_cpu, original_from_cpu


def _placed(mesh: Mesh | None, spec: Any, host: torch.Tensor) -> torch.Tensor:
    return host.to("jax") if mesh is None else mark_sharding(host.to("jax"), mesh, spec)


# Placements: a mesh (None: one device), and the spec of a tensor of three dimensions.
WAYS: list[tuple[Mesh | None, Any]] = [
    (MESH, ("fsdp", "tp")), (MESH, (None, ("fsdp", "tp"))), (MESH, ("tp",)), (OTHER, (None, "b", "a")), (OTHER, (("b", "a"),)), (None, ()),
]  # fmt: skip


Way = tuple[Mesh | None, Any]


def from_meshes(hosts: dict[str, Callable[[], torch.Tensor]], targets: Callable[[Mesh | None, Any], list[Way]]) -> None:
    """Saves tensors with each placement, and loads them into tensors with other placements."""
    for mesh, spec in WAYS:
        state = {name: _placed(mesh, spec, make()) for name, make in hosts.items()} | {"scalar": _placed(mesh, (), torch.tensor(3.5))}
        before = {name: (tensor.cpu(), spec_of(tensor)) for name, tensor in state.items()}
        with folders() as folder:
            saved(checkpointable(state), folder)
            for name, tensor in state.items():
                torch.testing.assert_close(tensor.cpu(), before[name][0])
                assert spec_of(tensor) == before[name][1]
            for target_mesh, target_spec in targets(mesh, spec):
                target = {
                    name: _placed(target_mesh, target_spec if tensor.dim() else (), torch.zeros_like(tensor, device="cpu"))
                    for name, tensor in state.items()
                }
                specs = {name: spec_of(tensor) for name, tensor in target.items()}
                loaded(checkpointable(target), folder)
                for name, tensor in target.items():
                    torch.testing.assert_close(tensor.cpu(), before[name][0], msg=lambda text: f"{name}, {spec} to {target_spec}: {text}")  # noqa: B023
                    assert (spec_of(tensor), tensor.stride()) == (specs[name], state[name].stride()), name
            cpu_tensors = {name: torch.zeros_like(tensor, device="cpu") for name, tensor in state.items()}
            loaded(cpu_tensors, folder)
            for name, tensor in cpu_tensors.items():
                torch.testing.assert_close(tensor, before[name][0])


def check_from_one_mesh_to_another() -> None:
    hosts: dict[str, Callable[[], torch.Tensor]] = {
        "ordinary": lambda: torch.randn(8, 16, 4),
        "transposed": lambda: torch.randn(4, 16, 8).transpose(0, 2),
        "half": lambda: torch.randn(8, 16, 4).bfloat16(),
    }
    from_meshes(hosts, lambda *way: [WAYS[(WAYS.index(way) + step) % len(WAYS)] for step in (0, 1, 3)])


def check_from_plain_tensors() -> None:
    host = torch.randn(16, 8)
    target = _placed(MESH, ("tp", "fsdp"), torch.zeros(16, 8, dtype=torch.bfloat16))
    with folders() as folder:
        saved({"x": host}, folder)
        loaded(checkpointable({"x": target}), folder)
    torch.testing.assert_close(target.cpu(), host.bfloat16())  # DCP converts the dtype


def check_shards_are_copied_one_by_one() -> None:
    """Each shard is written once. Replicas are not written."""
    rows, columns = 256, 64
    for mesh, spec, parts in [(MESH, ("fsdp", "tp"), 8), (MESH, ("tp",), 4), (MESH, (), 1), (OTHER, (None, "b"), 2)]:
        state = {"x": _placed(mesh, spec, torch.randn(rows, columns))}
        nbytes = rows * columns * 4
        with folders() as folder:
            with copies_to_the_cpu() as sizes:
                saved(checkpointable(state), folder)
            assert sizes == [nbytes // parts] * parts, (spec, sizes)
            entry = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata["x"]
            assert isinstance(entry, TensorStorageMetadata)
            assert sum(math.prod(chunk.sizes) for chunk in entry.chunks) == rows * columns
            target = _placed(MESH, (("tp", "fsdp"),), torch.zeros(rows, columns))
            with copies_to_the_cpu() as sizes:
                loaded(checkpointable({"x": target}), folder)
            assert sum(sizes) == 2 * nbytes, "old values are copied to the CPU, and loaded values from the CPU"
            assert max(sizes) == nbytes // 8
        torch.testing.assert_close(target.cpu(), state["x"].cpu())


def check_loading_writes_in_place() -> None:
    weight = nn.Parameter(_placed(MESH, ("fsdp", "tp"), torch.zeros(16, 8)))
    views, copied = (weight.detach().t(), weight.detach()[2:5, 1]), weight.detach().clone()
    identity, storage, host = id(weight), weight.untyped_storage(), torch.randn(16, 8)
    state = {"model": {"weight": weight, "name": "before"}, "list": [1, 2], "many": [weight.detach()], "epoch": 3}
    target = {"model": {"weight": weight.detach(), "name": ""}, "list": [0, 0], "many": [weight.detach()], "epoch": 0}
    with torch.no_grad(), folders() as folder:
        weight.copy_(host)
        saved(checkpointable(state), folder)
        weight.zero_()
        version = weight._version
        loaded(checkpointable(target), folder)
    assert (id(weight), weight.untyped_storage(), spec_of(weight)) == (identity, storage, ("fsdp", "tp"))
    assert weight._version > version
    torch.testing.assert_close(weight.detach().cpu(), host)
    for view, expected in zip(views, (host.t(), host[2:5, 1]), strict=True):
        torch.testing.assert_close(view.cpu(), expected)
    assert not copied.cpu().any(), "a clone keeps the old array"
    assert (target["model"]["name"], target["list"], target["epoch"]) == ("before", [1, 2], 3)  # type: ignore[index]
    assert target["many"][0].untyped_storage() is storage  # type: ignore[index]
    weight.square().sum().backward()
    torch.testing.assert_close(weight.grad.cpu(), 2 * host)


def check_programs_write_in_place_to_loaded_tensors() -> None:
    """Loaded arrays share no memory with the file's contents or with each other, so a program may write to them."""

    @torch.compile(backend="dynaxla")
    def double(x: torch.Tensor) -> None:
        x.mul_(2)

    host = torch.randn(16, 8)
    x = _placed(MESH, ("tp",), host)
    with folders() as folder:
        saved(checkpointable({"x": x}), folder)
        target = _placed(MESH, ("tp",), torch.zeros(16, 8))
        for _ in range(2):
            loaded(checkpointable({"x": target}), folder)
            cloned = target.clone()
            torch.testing.assert_close(target.cpu(), host)
            double(target)
            torch.testing.assert_close(target.cpu(), host * 2)
            torch.testing.assert_close(cloned.cpu(), host)


def check_nothing_is_written_if_a_read_fails() -> None:
    hosts = {f"x{index}": torch.randn(16, 8) for index in range(3)}
    state = {name: _placed(MESH, ("fsdp", "tp"), host) for name, host in hosts.items()}
    with folders() as folder:
        saved(checkpointable({"first": {"x0": state["x0"]}, "rest": {"x1": state["x1"], "x2": state["x2"]}}), folder)
        target = {name: _placed(OTHER, ("a",), torch.zeros(16, 8)) for name in hosts}
        view = {"first": checkpointable({"x0": target["x0"]}), "rest": checkpointable({"x1": target["x1"], "x2": target["x2"]})}
        versions = [tensor._version for tensor in target.values()]
        file = next(folder.glob("*.distcp"))
        content = file.read_bytes()
        file.write_bytes(content[: len(content) * 2 // 3])
        with pytest.raises(dcp.api.CheckpointException):
            loaded(view, folder)
        assert all(not tensor.cpu().any() for tensor in target.values())
        assert versions == [tensor._version for tensor in target.values()]
        file.write_bytes(content)
        loaded(view, folder)
    for name, tensor in target.items():
        torch.testing.assert_close(tensor.cpu(), hosts[name])


def check_a_checkpoint_with_other_contents() -> None:
    x = _placed(MESH, ("fsdp",), torch.zeros(16, 8))
    with folders() as folder:
        saved(checkpointable({"x": x, "n": 1}), folder)
        for state in ({"y": x}, {"x": _placed(MESH, ("fsdp",), torch.zeros(16, 4))}):
            with pytest.raises((dcp.api.CheckpointException, ValueError)):
                loaded(checkpointable(state), folder)
    assert not x.cpu().any()


def check_checkpointable_in_a_nested_dict() -> None:
    x = _placed(MESH, ("fsdp",), torch.zeros(16, 8))
    with folders() as folder:
        with pytest.raises(dcp.api.CheckpointException, match="too deep"):
            saved({"all": {"model": checkpointable({"x": x})}}, folder)
        saved({"all": {"model": {"x": torch.ones(16, 8)}}}, folder)
        with pytest.raises(dcp.api.CheckpointException):
            loaded({"all": {"model": checkpointable({"x": x})}}, folder)
        with pytest.raises(UnsupportedTensor, match="async_save"):
            dcp.async_save(checkpointable({"x": x}), checkpoint_id=folder)
    assert not x.cpu().any()
    with pytest.raises(ArgumentError, match="a state dict"):
        checkpointable([x])  # type: ignore[arg-type]
