"""With eight devices: tensors that are sharded over a mesh, in each mode."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch
from jax.sharding import PartitionSpec
from torch import nn

import dynaxla
from dynaxla import sharding
from dynaxla.device import storages
from dynaxla.errors import ArgumentError, DeviceMismatch, UnsupportedTensor
from dynaxla.observe import metrics
from dynaxla.sharding import Mesh, mark_sharding, shard_module

from .running import MODES, array_of, compile_anew

MESH = Mesh((2, 4), ("fsdp", "tp"))


def spec_of(tensor: torch.Tensor) -> Any:
    found = sharding.sharding_of(tensor)
    return None if found is None else tuple(found.spec)


def _host_and_sharded(*shape: int, spec: Any = ("fsdp", "tp"), mesh: Mesh = MESH) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a CPU tensor, and a tensor with its values that is sharded over a mesh."""
    host = torch.randn(shape)
    return host, mark_sharding(host.to("jax"), mesh, spec)


def _addresses(tensor: torch.Tensor) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in array_of(tensor).addressable_shards]


def check_mark_sharding_keeps_the_tensor() -> None:
    host = torch.randn(16, 8)
    x = host.to("jax")
    view, version, identity = x.t(), x._version, id(x)
    assert mark_sharding(x, MESH, ("fsdp", "tp")) is x
    assert (id(x), x._version, x.device) == (identity, version, torch.device("jax:0"))
    assert spec_of(x) == ("fsdp", "tp")
    assert spec_of(view) == ("tp", "fsdp")
    assert array_of(x).addressable_shards[0].data.shape == (8, 2)
    torch.testing.assert_close(view.cpu(), host.t())
    mark_sharding(view, MESH, PartitionSpec(("fsdp", "tp")))  # another view of the same storage
    assert spec_of(x) == (None, ("fsdp", "tp"))
    torch.testing.assert_close(x.cpu(), host)


def check_writes_keep_the_sharding() -> None:
    for mode in MODES:
        host, x = _host_and_sharded(16, 8)
        writes: list[Callable[[torch.Tensor], Any]] = [
            lambda x: x.mul_(2), lambda x: x.t()[1].add_(1), lambda x: x.view(-1)[3:70].fill_(5), lambda x: x.view(-1).sub_(1),
            lambda x: x.copy_(torch.ones(16, 8, device=x.device)), lambda x: x[2:4].copy_(torch.full((2, 8), 3.0)), lambda x: x.zero_(),
            lambda x: torch.add(x, 1, out=x), lambda x: x.copy_(torch.arange(128.0).view(16, 8)),
        ]  # fmt: skip
        for write in writes:
            with MODES[mode]():
                write(x)
            write(host)
            assert spec_of(x) == ("fsdp", "tp"), mode
            torch.testing.assert_close(x.cpu(), host)


def check_new_tensors_and_copies_have_the_sharding() -> None:
    host, x = _host_and_sharded(16, 8)
    for mode in MODES:
        with MODES[mode]():
            tensors = [torch.zeros_like(x), torch.empty_like(x), torch.ones_like(x), torch.full_like(x, 3), torch.rand_like(x), x.clone()]
            half = torch.zeros_like(x, dtype=torch.bfloat16)
        assert [spec_of(tensor) for tensor in (*tensors, half)] == [("fsdp", "tp")] * 7, mode
        assert spec_of(torch.ones_like(x.t())) == ("tp", "fsdp")
        torch.testing.assert_close(tensors[0].cpu() + tensors[2].cpu() + tensors[3].cpu(), torch.full((16, 8), 4.0))
    assert spec_of(torch.zeros_like(x[:8])) is None
    copied = copy.deepcopy(nn.Parameter(x))
    assert spec_of(copied) == ("fsdp", "tp")
    file = io.BytesIO()
    torch.save({"x": x}, file)
    file.seek(0)
    torch.testing.assert_close(torch.load(file)["x"].cpu(), host)


def check_tensor_on_one_device_with_a_sharded_tensor() -> None:
    """A tensor on one device is replicated over the mesh once an op takes it with a sharded tensor. Otherwise it stays."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x @ x.t() + y)

    host, x = _host_and_sharded(16, 8)
    other = torch.randn(16)
    expected = function(host, other)

    def lazily(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with dynaxla.device.lazy():
            return function(x, y)

    for run in (function, lazily, compile_anew(function)):
        y = other.to("jax")
        torch.testing.assert_close(run(x, y).cpu(), expected)
        y[3] = 7.0  # a write after the replication
        changed = other.clone()
        changed[3] = 7.0
        torch.testing.assert_close(run(x, y).cpu(), function(host, changed))
        alone, y = host.to("jax"), other.to("jax")
        torch.testing.assert_close(run(alone, y).cpu(), expected)
        assert spec_of(alone) is None
        assert spec_of(y) is None
        torch.testing.assert_close(run(x, y).cpu(), expected)


def check_each_sharding_has_a_program() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x * 2).softmax(1) @ y.t()

    compiled = compile_anew(function)
    host, other = torch.randn(16, 8), torch.randn(8, 8)
    x, y = host.to("jax"), other.to("jax")
    expected = function(host, other)
    rows, same = Mesh((8,), ("rows",)), Mesh((4, 2), ("a", "b"))
    first = MESH, ("fsdp", "tp")
    for mesh, spec in [first, (MESH, (None, "tp")), (rows, ("rows",)), (same, ("b", "a")), (MESH, ()), first]:
        mark_sharding(x, mesh, spec)
        for _ in range(2):
            torch.testing.assert_close(compiled(x, y).cpu(), expected)
        torch.testing.assert_close(function(x, y).cpu(), expected)
    torch.testing.assert_close(compiled(host.to("jax"), other.to("jax")).cpu(), expected)


def check_tensors_on_two_meshes_are_refused() -> None:
    first, last = Mesh((4,), ("a",)), Mesh((4,), ("b",), range(4, 8))
    _, x = _host_and_sharded(8, 8, spec=("a",), mesh=first)
    _, y = _host_and_sharded(8, 8, spec=("b",), mesh=last)
    _, z = _host_and_sharded(8, 8, spec=("c",), mesh=Mesh((4,), ("c",), (3, 2, 1, 0)))
    for left, right in [(x, y), (x, z)]:
        for run in (torch.add, compile_anew(lambda x, y: x + y)):
            with pytest.raises(DeviceMismatch, match=r"two meshes: Mesh\(a=4\) over the devices \[0, 1, 2, 3\] and Mesh"):
                run(left, right)
        with pytest.raises(DeviceMismatch, match="two meshes"):
            dynaxla.compile_step(torch.add)(left, right)
        with dynaxla.device.lazy():
            total = left + right
            with pytest.raises(DeviceMismatch, match="two meshes"):
                total.cpu()


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


SPECS = {"*.up.weight": ("tp", "fsdp"), "*.up.bias": ("tp",), "*.down.weight": ("fsdp", "tp")}


def check_a_step_writes_in_place() -> None:
    _, weight = _host_and_sharded(16, 8)
    state = torch.zeros_like(weight)

    @dynaxla.compile_step(fullgraph=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        state.mul_(0.9).add_(weight * x)
        weight.sub_(state)
        return weight.sum()

    x = torch.ones(8).to("jax")
    for _ in range(2):
        step(x)
    before, copies = [_addresses(weight), _addresses(state)], metrics.snapshot().get("undonated", 0)
    step(x)
    assert [_addresses(weight), _addresses(state)] == before
    assert metrics.snapshot().get("undonated", 0) == copies


def check_shared_arrays_are_not_donated() -> None:
    """A clone that shares the array, an array that `as_jax` returned, and a tensor that was replicated over the mesh."""
    add = compile_anew(lambda x, y: x.add_(y))
    host, x = _host_and_sharded(16, 8)
    shared, returned = x.clone(), dynaxla.as_jax(x)
    alone = torch.ones(16, 8).to("jax")
    returned_alone = dynaxla.as_jax(alone)
    add(x, alone)
    torch.testing.assert_close(x.cpu(), host + 1)
    torch.testing.assert_close(shared.cpu(), host)
    assert (returned == host.numpy()).all()
    assert spec_of(alone) == ()
    add(alone, x)  # a shard of it could be the array that was handed out
    assert (returned_alone == 1).all()
    torch.testing.assert_close(alone.cpu(), host + 2)


def check_constraints_in_programs() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = mark_sharding((x * 2).sin(), MESH, ("tp",))
        return (y * y).sum(1)

    host = torch.randn(16, 8)
    expected = torch.autograd.functional.vjp(lambda x: ((x * 2).sin() ** 2).sum(1), host, torch.ones(16))
    marked = compile_anew(lambda x: mark_sharding(x * 2, MESH, (None, "tp")), fallback="error")
    for x in (host.to("jax"), mark_sharding(host.to("jax"), MESH, ("fsdp",))):
        result = marked(x)
        assert spec_of(result) == (None, "tp")
        torch.testing.assert_close(result.cpu(), host * 2)
        with dynaxla.device.lazy():
            result = mark_sharding(x * 2, MESH, (None, "tp"))
        assert spec_of(result) == (None, "tp")
        torch.testing.assert_close(result.cpu(), host * 2)
        for run in (compile_anew(function), function):
            leaf = x.detach().clone().requires_grad_()
            result = run(leaf)
            result.sum().backward()
            torch.testing.assert_close((result.cpu(), leaf.grad.cpu()), expected, rtol=1e-4, atol=1e-5)


def check_constraints_in_steps() -> None:
    host, weight = _host_and_sharded(8, 16, spec=("tp",))
    host_x = torch.randn(4, 8)
    leaf = nn.Parameter(weight)
    optimizer = torch.optim.SGD([leaf], lr=0.1)

    def compute(x: torch.Tensor, weight: torch.Tensor, mark: bool) -> torch.Tensor:
        hidden = x @ weight
        return (mark_sharding(hidden, MESH, ("tp", "fsdp")) if mark else hidden).sin()

    @dynaxla.compile_step(fullgraph=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        result = compute(x, leaf, True)
        result.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return result.detach()

    expected = nn.Parameter(host.clone())
    compute(host_x, expected, False).sum().backward()
    result = step(host_x.to("jax"))
    assert spec_of(result) == ("tp", "fsdp")
    torch.testing.assert_close(result.cpu(), compute(host_x, host, False), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(leaf.detach().cpu(), host - 0.1 * expected.grad, rtol=1e-4, atol=1e-5)
    assert spec_of(leaf) == ("tp",)


def check_gradients_of_constraints_in_steps() -> None:
    """A gradient has its tensor's constraint. XLA would give it the sharding of the tensor from which it is computed."""
    host, factors = _host_and_sharded(8, 16, spec=("fsdp",))

    @dynaxla.compile_step(fullgraph=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        leaf = x.detach().requires_grad_()
        (mark_sharding(leaf, MESH, (None, "tp")) * factors).sum().backward()
        return leaf.grad * 2

    gradient = step(torch.randn(8, 16).to("jax"))
    torch.testing.assert_close(gradient.cpu(), host * 2)
    assert spec_of(gradient) == (None, "tp")


def check_custom_op_with_a_torch_kernel() -> None:
    @torch.library.custom_op("dynaxla_test::reversed_rows", mutates_args=())
    def reversed_rows(x: torch.Tensor) -> torch.Tensor:
        return x.flip(0).contiguous()

    @reversed_rows.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    host, x = _host_and_sharded(16, 8)
    for run in (reversed_rows, compile_anew(lambda x: reversed_rows(x * 2) / 2)):
        torch.testing.assert_close(run(x).cpu(), host.flip(0))


def check_shards_and_arrays() -> None:
    host, x = _host_and_sharded(16, 8)
    shards = sharding.local_shards(x)
    assert [str(device) for device, _, _ in shards] == [f"jax:{index}" for index in range(8)]
    for _, index, part in shards:
        torch.testing.assert_close(part, host[index])
    array = dynaxla.as_jax(x)
    assert array is array_of(x)
    assert len(array.devices()) == 8
    x.zero_()
    torch.testing.assert_close(torch.cat([part.flatten() for _, _, part in shards]).sum(), host.sum())


def check_shard_module() -> None:
    model = nn.Sequential(Block(16, 32), nn.BatchNorm1d(16))
    model(torch.randn(4, 16)).sum().backward()
    values = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    assert shard_module(model, MESH, {"0.*.weight": ("tp",), **SPECS}) is model
    expected = {"0.norm.weight": ("tp",), "0.norm.bias": (), "0.up.weight": ("tp", "fsdp"), "1.running_mean": (), "1.weight": ()}
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert {name: spec_of(found[name]) for name in expected} == expected
    for name, parameter in model.named_parameters():
        assert spec_of(parameter.grad) == spec_of(parameter)
        torch.testing.assert_close(parameter.grad.cpu(), values[name])
    with pytest.raises(ArgumentError, match=r"pattern '\*.left' matches no parameter"):
        shard_module(model, MESH, {"*.left": ()})
    with pytest.raises(ArgumentError, match=r"0.down.bias: dimension 0 of a tensor float32\[16\]") as error:
        shard_module(nn.Sequential(Block(16, 32)), Mesh((3,), ("a",)), {"0.down.bias": ("a",)})
    assert "18" in str(error.value)


def check_loading_keeps_shardings() -> None:
    model = shard_module(nn.Sequential(Block(16, 32)), MESH, SPECS)
    state = {name: torch.randn_like(value.cpu()) for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    assert spec_of(model[0].up.weight) == ("tp", "fsdp")
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value.cpu(), state[name])


def check_random_numbers_are_those_of_one_device() -> None:
    plain, (_, x) = torch.ones(16, 8).to("jax"), _host_and_sharded(16, 8)
    x.fill_(1)
    drop = compile_anew(lambda x: nn.functional.dropout(x, 0.5))
    for run in (lambda x: nn.functional.dropout(x, 0.5), drop, torch.rand_like):
        torch.manual_seed(3)
        expected = run(plain)
        torch.manual_seed(3)
        actual = run(x)
        assert spec_of(actual) is not None
        assert actual.tolist() == expected.tolist()


def check_bad_specs() -> None:
    x = torch.zeros(6, 8, device="jax")
    for spec, message in [
        (("tp",), r"dimension 0 of a tensor float32\[6, 8\] has size 6, not a multiple of the 4 devices .*pad it to 8"),
        ((None, "pp"), r"names an axis 'pp', which Mesh\(fsdp=2, tp=4; .*the axes of the mesh are fsdp, tp"),
        (("fsdp", "fsdp"), "has the axis 'fsdp' twice"),
        ((None, None, "tp"), "has 3 entries for a tensor .* of 2 dimensions"),
        ("tp", "one entry for each dimension"),
    ]:  # fmt: skip
        with pytest.raises(ArgumentError, match=f"(?s){message}"):
            mark_sharding(x, MESH, spec)
    with pytest.raises(UnsupportedTensor, match=r'(?s)is on cpu.*x.to\("jax"\)'):
        mark_sharding(torch.zeros(8, 8), MESH, ("tp",))
    with pytest.raises(UnsupportedTensor, match="part of another tensor"):
        mark_sharding(x[2:4], MESH, ("fsdp",))
    with pytest.raises(UnsupportedTensor, match="shards a tensor on cpu"):
        compile_anew(lambda x: mark_sharding(x * 2, MESH, ("fsdp",)))(torch.ones(8, 8))
    assert spec_of(x) is None


def check_bad_specs_in_every_interface() -> None:
    class DeviceMesh:
        mesh, mesh_dim_names = torch.arange(8).view(2, 4), ("fsdp", "tp")

    def lazily(x: torch.Tensor, mesh: Any, spec: Any) -> None:
        with dynaxla.device.lazy():
            mark_sharding(x * 2, mesh, spec)

    def mark(x: torch.Tensor, spec: Any) -> torch.Tensor:
        return mark_sharding(x * 2, MESH, spec)

    x = torch.zeros(6, 8, device="jax")
    calls: list[Callable[[Any], Any]] = [
        lambda spec: mark_sharding(x, DeviceMesh(), spec), lambda spec: shard_module(nn.Linear(8, 6), MESH, {"weight": spec}),
        lambda spec: shard_module(nn.Linear(8, 6), DeviceMesh(), {"weight": spec}), lambda spec: lazily(x, MESH, spec),
        lambda spec: lazily(x, DeviceMesh(), spec), lambda spec: compile_anew(mark)(x, spec),
        lambda spec: dynaxla.compile_step(mark, fullgraph=True)(x, spec), lambda spec: dynaxla.compile_step(mark)(x, spec),
        lambda spec: jax.jit(dynaxla.to_jax(lambda x: mark(x, spec), device="jax"))(jax.numpy.ones((6, 8))),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(ArgumentError, match=r"(?s)dimension 0 of a tensor float32\[6, 8\] has size 6.* along \('tp',\).*pad it to 8"):
            call(("tp",))
        with pytest.raises(ArgumentError, match=r"(?s)names an axis 'pp', which Mesh\(fsdp=2, tp=4; .*the axes of the mesh are fsdp, tp"):
            call((None, "pp"))
    virtual = mark_sharding(torch.zeros(8, 8, device="jax"), Mesh((8,), ("a",), virtual=True), ("a",))
    real = mark_sharding(torch.zeros(8, 8, device="jax"), MESH, ("fsdp",))
    with pytest.raises(DeviceMismatch, match="two meshes"):
        sharding.report(compile_anew(torch.add), virtual, real, run=False)
    assert not sharding.report(compile_anew(lambda x: x * 2), real, run=False).collectives


def check_bad_meshes() -> None:
    for arguments, message in [
        (((2, 8), ("a", "b")), "needs 16 devices, and JAX has 8 here"), (((2, 4), ("a", "a")), "the names must be different identifiers"),
        (((0,), ("a",)), "each axis needs a positive size"), (((2,), ("a", "b")), "a positive size and a name"),
        (((2,), ("a", ), (1, 1)), "2 different devices"),
    ]:  # fmt: skip
        with pytest.raises(ArgumentError, match=message):
            Mesh(*arguments)
    with pytest.raises(ArgumentError, match="is not a mesh"):
        Mesh.of(3)
    one = Mesh((1,), ("a",), ("jax:0",))
    x = torch.ones(3).to("jax")
    assert mark_sharding(x, one, ("a",)) is x
    with pytest.raises(ArgumentError, match="does not have the device of a tensor"):
        mark_sharding(x, Mesh((1,), ("a",), (1,)), ())


def check_a_torch_mesh() -> None:
    class DeviceMesh:  # the attributes of torch's class, without process groups
        mesh, mesh_dim_names = torch.arange(8).view(4, 2), ("a", "b")

    mesh = Mesh.of(DeviceMesh())
    assert mesh == Mesh((4, 2), ("a", "b"))
    x = mark_sharding(torch.zeros(8, 4, device="jax"), DeviceMesh(), ("a", "b"))
    assert spec_of(x) == ("a", "b")
    assert mesh.jax is sharding.sharding_of(x).mesh


class Layers(nn.Module):
    """Layers in Megatron's style: each is a product that widens, and one that narrows."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, 2 * width, bias=False) for _ in range(count))
        self.down = nn.ModuleList(nn.Linear(2 * width, width, bias=False) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = down(nn.functional.gelu(up(x)))
        return x


def _step(model: nn.Module) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @dynaxla.compile_step(fullgraph=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def check_collectives_are_those_that_theory_predicts() -> None:
    x = torch.randn(24, 16).to("jax")
    for count in (2, 8):
        layers, mesh = 3, Mesh((count,), ("tp",))
        model = shard_module(Layers(layers, 16), mesh, {"up.*": ("tp",), "down.*": (None, "tp")})
        step = _step(model)
        step(x.clone())
        report = sharding.report(step, x.clone())
        (moved,) = report.collectives
        assert (moved.kind, moved.axes, moved.count) == ("all-reduce", "tp", 2 * layers - 1)
        assert moved.bytes == (2 * layers - 1) * 24 * 16 * 4
        (memory,) = report.memory
        assert memory.arguments < sum(parameter.nbytes for parameter in model.parameters()) // count + x.nbytes + 64
        assert "all-reduce" in str(report)
    mesh = Mesh((8,), ("data",))
    model = shard_module(Layers(3, 16), mesh, {})
    step, batch = _step(model), mark_sharding(x.clone(), mesh, ("data",))
    step(batch)
    report = sharding.report(step, batch)
    assert {moved.kind for moved in report.collectives} == {"all-reduce"}
    assert sum(moved.bytes for moved in report.collectives) == sum(parameter.nbytes for parameter in model.parameters()) + 4
    forward = torch.compile(Layers(2, 16).to("jax"), backend="dynaxla")
    (moved,) = sharding.report(forward, mark_sharding(torch.randn(16, 16).to("jax"), mesh, (None, "data"))).collectives
    assert any("on_meshes.py" in line for line in moved.lines)
    with pytest.raises(ArgumentError, match="runs no program on several devices"):
        sharding.report(torch.sin, x)


def check_jax_settings_are_unchanged() -> None:
    assert jax.config.jax_enable_x64 is False
    assert len(jax.devices()) == 8
    assert not isinstance(storages.content_of(torch.ones(3).to("jax").untyped_storage()), storages.StorageContent)
