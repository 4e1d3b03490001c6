"""Tests of parameters and buffers: they are imported once, never copied, never stale, and not kept alive."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from dynaxla.buffers.arguments import Arguments, ExpectedInput
from dynaxla.engine.unit import CompilationUnit
from dynaxla.observe import metrics
from dynaxla.runtime import devices
from dynaxla.runtime.layout import Layout
from support.comparisons.compare import assert_equal

pytestmark = pytest.mark.quick


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("scale", torch.full((16,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


def set_data(net: Net) -> None:
    net.linear.weight.data = torch.randn(16, 16)


def set_transposed_data(net: Net) -> None:
    net.linear.weight.data = torch.randn(16, 16).t()


def set_strided_data(net: Net) -> None:
    net.linear.weight.data = torch.randn(16, 32)[:, ::2]


def set_misaligned_data(net: Net) -> None:
    net.linear.weight.data = torch.randn(16 * 16 + 1)[1:].view(16, 16)


def in_place(net: Net) -> None:
    with torch.no_grad():
        net.linear.weight.mul_(2)
        net.linear.bias[3] = 7


def write_data(net: Net) -> None:
    net.linear.weight.data.fill_(0.25)


def through_numpy(net: Net) -> None:
    net.linear.weight.detach().numpy()[:] = 1.5


def load(net: Net) -> None:
    net.load_state_dict(Net().state_dict())


def load_assign(net: Net) -> None:
    net.load_state_dict(Net().state_dict(), assign=True)


def replace(net: Net) -> None:
    net.linear.weight = nn.Parameter(torch.randn(16, 16))


def replace_layer(net: Net) -> None:
    net.linear = nn.Linear(16, 16)


def optimizer_step(net: Net) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    net(torch.randn(2, 16)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def change_buffer(net: Net) -> None:
    net.scale.add_(1)


def replace_buffer(net: Net) -> None:
    net.scale = torch.full((16,), 5.0)


def set_to_other_storage(net: Net) -> None:
    with torch.no_grad():
        net.linear.weight.set_(torch.randn(16, 16))


def swap(net: Net) -> None:
    weight, other = net.linear.weight.data, torch.randn(16, 16)
    net.linear.weight.data = other
    net(torch.randn(1, 16))
    net.linear.weight.data = weight


def double(net: Net) -> None:
    net.double()
    net.float()


# The maximum number of graphs of all updates.
PROGRAMS = 8

UPDATES: list[Callable[[Net], None]] = [
    set_data, set_transposed_data, set_strided_data, set_misaligned_data, in_place, write_data, through_numpy, load, load_assign, replace,
    replace_layer, optimizer_step, change_buffer, replace_buffer, set_to_other_storage, swap, double,
]  # fmt: skip


@pytest.mark.parametrize("grad", [False, True])
def test_update_is_seen_by_the_next_call(grad: bool) -> None:
    """Each update has its own network with aliased parameters. All networks share the compiled programs."""
    failed: dict[str, str] = {}
    metrics.reset()
    for update in UPDATES:
        net = Net()
        compiled = torch.compile(net, backend="dynaxla", fullgraph=True)
        x = torch.randn(4, 16)
        with torch.set_grad_enabled(grad):
            try:
                for _ in range(3):
                    before = metrics.snapshot().get("input_copies", 0)
                    assert_equal(compiled(x), net(x))
                assert metrics.snapshot().get("input_copies", 0) == before
                for _ in range(2):
                    with torch.enable_grad():
                        update(net)
                    for _ in range(2):
                        assert_equal(compiled(x), net(x))
            except AssertionError as error:
                failed[update.__name__] = str(error)
    assert not failed
    assert metrics.snapshot()["graphs"] <= PROGRAMS, "the networks do not share their programs"


def test_second_call_neither_traces_nor_compiles_nor_copies() -> None:
    net = Net()
    compiled = torch.compile(net, backend="dynaxla", fullgraph=True)
    x = torch.randn(4, 16)
    with torch.no_grad():
        compiled(x)
        before = metrics.snapshot()
        for _ in range(5):
            compiled(torch.randn(4, 16))
        after = metrics.snapshot()
    assert after["calls"] == before["calls"] + 5
    for name in ("graphs", "trace", "lower", "compile", "input_copies", "capture"):
        assert after.get(name, 0) == before.get(name, 0), name
    assert after["aliases"] - before["aliases"] <= 5, "at most the activation may be aliased again"


def test_parameters_are_aliased_in_place() -> None:
    net = Net()
    compiled = torch.compile(net, backend="dynaxla", fullgraph=True)
    metrics.reset()
    with torch.no_grad():
        compiled(torch.randn(4, 16))
    counts = metrics.snapshot()
    assert counts["aliases"] == 3, "weight, bias, buffer"
    assert counts["imports"] == 1, "the activation"
    assert counts.get("input_copies", 0) == 0


def test_misaligned_and_strided_parameters_are_copied_in_each_call() -> None:
    net = Net()
    set_strided_data(net)
    net.scale = torch.full((17,), 2.0)[1:]
    compiled = torch.compile(net, backend="dynaxla", fullgraph=True)
    x = torch.randn(4, 16)
    with torch.no_grad():
        compiled(x)
        metrics.reset()
        compiled(x)
        assert metrics.snapshot()["input_copies"] == 2
        net.scale.mul_(3)
        net.linear.weight.mul_(2)
        assert_equal(compiled(x), net(x))


def test_memory_is_released() -> None:
    net = Net()
    compiled = torch.compile(net, backend="dynaxla", fullgraph=True)
    x = torch.randn(4, 16)
    with torch.no_grad():
        for _ in range(3):
            compiled(x)
    storages = [weakref.ref(tensor) for tensor in (net.linear.weight, net.linear.bias, net.scale, x)]
    freed: list[int] = []
    for index, tensor in enumerate((net.linear.weight, net.scale, x)):
        weakref.finalize(tensor.untyped_storage(), freed.append, index)
    del net, compiled, x, tensor
    torch._dynamo.reset()
    gc.collect()
    assert [reference() for reference in storages] == [None] * 4
    assert len(freed) == 3


def test_input_memory_is_not_held_after_the_call() -> None:
    compiled = torch.compile(lambda x: x * 2, backend="dynaxla")
    x = torch.randn(1000)
    for _ in range(3):
        out = compiled(x)
    reference = weakref.ref(x)
    pointer = x.untyped_storage()
    released: list[bool] = []
    weakref.finalize(pointer, released.append, True)
    del x, pointer
    gc.collect()
    assert reference() is None
    assert released == [True]
    assert out.shape == (1000,)


def test_moved_parameter_releases_its_old_memory() -> None:
    net = Net()
    compiled = torch.compile(net, backend="dynaxla", fullgraph=True)
    x = torch.randn(4, 16)
    with torch.no_grad():
        compiled(x)
        compiled(x)
        released: list[bool] = []
        weakref.finalize(net.linear.weight.untyped_storage(), released.append, True)
        net.linear.weight.data = torch.randn(16, 16)
        gc.collect()
        assert released == [True]
        assert_equal(compiled(x), net(x))


def test_array_keeps_the_copy_of_a_parameter_alive() -> None:
    """A parameter in another layout is copied for the call. No other object refers to the copy."""
    layout = Layout.of((64, 64), (64, 1))
    static = ExpectedInput((64, 64), (64, 1), torch.float32, layout, True)
    arguments = Arguments([static], torch.device("cpu"), devices.jax_device(torch.device("cpu")))
    weight = torch.randn(64, 64)
    (array,) = arguments.arrays([weight.t()])
    other_tensors = [torch.full((64, 64), 7.0) for _ in range(100)]
    torch.testing.assert_close(torch.from_dlpack(array), weight.t().contiguous(), rtol=0, atol=0)
    assert len(other_tensors) == 100


def programs() -> set[int]:
    """Returns the addresses of all compilation units that are alive."""
    gc.collect()
    return {id(obj) for obj in gc.get_objects() if issubclass(type(obj), CompilationUnit)}


@pytest.mark.parametrize("freeze", [False, True], ids=["plain", "freeze"])
@pytest.mark.parametrize("backend", ["dynaxla", "dynaxla_retrace"])
def test_programs_are_released(backend: str, freeze: bool) -> None:
    """JAX's objects refer to the frames in which they were created, and so to TorchDynamo's code. This must not keep the program alive."""
    torch._dynamo.reset()
    before = programs()
    net = Net()
    x = torch.randn(4, 16)
    compiled = torch.compile(net, backend=backend, options={"freeze": freeze})
    for _ in range(2):
        with torch.set_grad_enabled(not freeze):
            out = compiled(x)
        if not freeze:
            out.sum().backward()
    assert programs() - before
    del out, net, compiled
    torch._dynamo.reset()
    assert not programs() - before


def run_in_threads(work: Callable[[int], None], count: int = 4) -> None:
    """Runs work(0) to work(count - 1) in parallel, without gradients. Raises the first failure."""
    failures: list[BaseException] = []

    def guarded(index: int) -> None:
        try:
            with torch.no_grad():
                work(index)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def test_threads_share_a_compiled_model() -> None:
    net = Net().eval()
    compiled = torch.compile(net, backend="dynaxla", fullgraph=True)
    inputs = [torch.randn(4, 16) for _ in range(8)]
    with torch.no_grad():
        compiled(inputs[0])
        expected = [net(x) for x in inputs]

    def work(index: int) -> None:
        for turn in range(50):
            position = (index + turn) % len(inputs)
            assert_equal(compiled(inputs[position]), expected[position])

    run_in_threads(work)


def test_threads_compile_at_the_same_time() -> None:
    net = Net().eval()
    compiled = torch.compile(net, backend="dynaxla", fullgraph=True, dynamic=True)

    def work(index: int) -> None:
        for size in range(2, 6):
            x = torch.randn(size + index, 16)
            assert_equal(compiled(x), net(x))

    run_in_threads(work)
