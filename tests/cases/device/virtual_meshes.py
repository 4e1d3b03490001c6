"""With one device: programs for virtual meshes, whose devices do not exist, are compiled but not run."""

from __future__ import annotations

import dataclasses
import os
from unittest import mock

import jax
import pytest
import torch
from torch import nn

import dynaxla
from dynaxla import sharding
from dynaxla.engine.executable import recorded_runs
from dynaxla.errors import ArgumentError
from dynaxla.runtime import private, topologies
from dynaxla.sharding import Mesh, mark_sharding, shard_module

MESH = Mesh((64, 4), ("data", "model"), virtual=True)
SPECS = {"0.weight": ("model", "data"), "0.bias": ("model",), "2.weight": ("data", "model")}


def _model() -> nn.Module:
    return shard_module(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)), MESH, SPECS)


def check_report_without_running_a_step() -> None:
    """Parameters and optimizer state, which is sharded as the parameters are, do not change. Afterwards the step works."""
    model = _model()
    x = mark_sharding(torch.randn(2048, 64).to("jax"), MESH, ("data",))
    optimizer = torch.optim.AdamW(model.parameters())
    before = [parameter.detach().cpu() for parameter in model.parameters()]

    @dynaxla.compile_step(fullgraph=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for _ in range(2):
        report = sharding.report(step, x, run=False)
    assert report.count("all-reduce") + report.count("reduce-scatter") >= 1
    assert {item.axes for item in report.collectives} <= {"data", "model", "data, model"}
    weights = 2 * 64 * 128 * 4
    (memory,) = report.memory
    assert 3 * weights // 256 < memory.arguments < 3 * weights // 256 + x.nbytes // 64 + 4096  # Adam has two of each
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.detach().cpu(), old)
    expected = model(x).square().mean().item()
    assert abs(step(x).item() - expected) < 1e-5
    assert not torch.equal(next(model.parameters()).detach().cpu(), before[0])


def check_max_pooling_stays_on_each_device() -> None:
    """Each device pools its part of the batch, forward and backward."""
    model = shard_module(nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(3, 2, 1), nn.Flatten(), nn.Linear(4 * 4 * 4, 5)), MESH, {})
    x = mark_sharding(torch.randn(64, 3, 9, 9).to("jax"), MESH, ("data",))

    @dynaxla.compile_step
    def step() -> None:
        model(x).square().mean().backward()

    report = sharding.report(step, run=False)
    assert {item.kind for item in report.collectives} == {"all-reduce"}, report


def check_both_passes() -> None:
    """The backward pass is compiled for saved values with the shardings that XLA chose in the forward pass."""
    model, x = _model(), mark_sharding(torch.randn(64, 64).to("jax"), MESH, ("data",))
    compiled = torch.compile(model, backend="dynaxla")

    def passes() -> None:
        compiled(x).sum().backward()

    report = sharding.report(passes, run=False)
    assert [memory.program.rpartition("_")[2] for memory in report.memory] == ["forward", "backward"]
    assert report.count("collective-permute") == report.count("all-to-all") == 0
    model.zero_grad()
    torch.testing.assert_close(compiled(x), model(x))


def check_sharding_constraints() -> None:
    """A constraint on a virtual mesh affects only programs that are compiled for a report."""
    host = torch.randn(64, 64)
    x = mark_sharding(host.to("jax"), MESH, ("data",))

    def gathered(x: torch.Tensor) -> torch.Tensor:
        return mark_sharding(x * 2, MESH, ()) + 1

    compiled = torch.compile(gathered, backend="dynaxla")
    (moved,) = sharding.report(compiled, x, run=False).collectives
    assert (moved.kind, moved.axes, moved.bytes) == ("all-gather", "data", host.nbytes)
    for run in (compiled, gathered):
        torch.testing.assert_close(run(x).cpu(), host * 2 + 1)
    with dynaxla.device.lazy():
        result = gathered(x)
    torch.testing.assert_close(result.cpu(), host * 2 + 1)


def check_programs_for_a_topology() -> None:
    """A report for a topology compiles programs for its devices. Reports before and after it are for this machine."""
    topology = stand_in_topology(256)
    model, host = _model(), torch.randn(2048, 64)
    x = mark_sharding(host.to("jax"), MESH, ("data",))
    compiled = torch.compile(model, backend="dynaxla")

    def passes() -> None:
        compiled(mark_sharding(x * 2, MESH, ("data",))).sum().backward()

    step = dynaxla.compile_step(passes)
    expected = model(x * 2).detach()
    for function in (passes, step):
        virtual = sharding.report(function, run=False)
        with mock.patch.object(topologies, "topology", return_value=topology), recorded_runs() as runs:
            for_topology = sharding.report(function, run=False, topology=topology.name)
        assert all(set(run.program.mesh.devices.flat) == set(topology.devices) for run in runs if run.program is not None)
        virtual_again = sharding.report(function, run=False)
        assert {item.axes for item in for_topology.collectives} <= {"data", "model", "data, model"}
        for first, second in ((virtual, for_topology), (for_topology, virtual_again)):
            assert [(item.kind, item.axes, item.count) for item in first.collectives] == [
                (item.kind, item.axes, item.count) for item in second.collectives
            ]
    model.zero_grad()
    torch.testing.assert_close(compiled(x * 2), expected)


def check_one_device_of_a_topology() -> None:
    topology = stand_in_topology(4)
    x = torch.randn(8, 16, device="jax")
    compiled = torch.compile(lambda x: x @ x.T, backend="dynaxla")
    with mock.patch.object(topologies, "topology", return_value=topology):
        (memory,) = sharding.report(compiled, x, run=False, topology=topology.name).memory
        assert (memory.arguments, memory.results) == (8 * 16 * 4, 8 * 8 * 4)
        with pytest.raises(ArgumentError, match=r"has 256 devices, and the topology stand-in has 4"):
            sharding.report(compiled, mark_sharding(torch.randn(64, 64).to("jax"), MESH, ("data",)), run=False, topology=topology.name)
        with pytest.raises(ArgumentError, match="run=False"):
            sharding.report(compiled, x, topology=topology.name)
    with pytest.raises(ArgumentError, match="platform 'cuda'"):
        sharding.report(compiled, x, run=False, platform="cuda", topology="h100:8")
    torch.testing.assert_close(compiled(x).cpu(), x.cpu() @ x.cpu().T)


def check_each_precision_has_a_program_for_a_topology() -> None:
    """TorchDynamo guards the setting: an earlier program is used only if its precision is set again."""
    topology = dataclasses.replace(stand_in_topology(4), platform="tpu")
    x = torch.randn(8, 8, device="jax")
    compiled = torch.compile(lambda x: x @ x, backend="dynaxla")
    with mock.patch.object(topologies, "topology", return_value=topology), recorded_runs() as runs:
        try:
            for precision in ("highest", "medium", "highest"):
                torch.set_float32_matmul_precision(precision)
                sharding.report(compiled, x, run=False, topology=topology.name)
        finally:
            torch.set_float32_matmul_precision("highest")
    highest, medium, again = [run.program for run in runs]
    assert highest is again
    assert medium is not highest


def stand_in_topology(count: int) -> topologies.Topology:
    """Returns a topology of CPU devices, for which XLA's compiler for the CPU compiles."""
    devices = tuple(private.make_cpu_client(count).local_devices())
    topologies._devices.update(devices)
    return topologies.Topology("cpu", "stand-in", devices)


def check_error_messages() -> None:
    x = mark_sharding(torch.ones(64, 64, device="jax"), MESH, ("data",))
    with pytest.raises(ArgumentError, match=r"(?s)no program on several devices.*run=False"):
        sharding.report(torch.compile(lambda x: x * 2, backend="dynaxla"), x)
    with pytest.raises(ArgumentError, match=r"(?s)is virtual, and was given the devices \[0, 1\].*leave devices out"):
        Mesh((2,), ("a",), (0, 1), virtual=True)
    with pytest.raises(ArgumentError, match=r"size 6, not a multiple of the 64 devices"):
        mark_sharding(torch.ones(6, device="jax"), MESH, ("data",))
    assert repr(MESH) == "Mesh(data=64, model=4; virtual)"
    assert sharding.sharding_of(x) is None


def check_settings_of_the_process_are_unchanged() -> None:
    assert "XLA_FLAGS" not in os.environ
    assert len(jax.devices()) == 1
    assert jax.config.jax_enable_x64 is False
