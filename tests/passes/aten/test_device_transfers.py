"""Tests of passes/aten/device_transfers.py: the programs of graphs with tensors on several devices, and the results of these programs."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from dynaxla.capture.graph import AtenGraph
from dynaxla.config import Options
from dynaxla.engine.scheduler import Scheduler
from dynaxla.errors import UnsupportedOp
from dynaxla.passes.aten.device_transfers import has_several_devices, remove_detours
from support.comparisons.compare import assert_equal
from support.fakes.several_devices import CPU, CUDA, Devices, built, parts_of, to_device, traced

aten = torch.ops.aten


def both_directions(x: torch.Tensor, a: torch.Tensor) -> list[torch.Tensor]:
    """x is on the GPU, a on the CPU. Values are copied in both directions."""
    on_gpu = to_device(a + 1, "cuda:0") @ x
    on_cpu = to_device(on_gpu.sum(0), "cpu")
    returned = to_device(on_cpu * a.sum() + a[0], "cuda:0")
    return [returned + x, on_cpu, on_gpu.sin(), a.cos(), x, a[1:], a]


def scalars(x: torch.Tensor, a: torch.Tensor) -> list[torch.Tensor]:
    return [x * (a.sum() + 1), a * to_device(x.sum(), "cpu"), to_device(x.max(), "cpu") + 1]


def both_gpus(x: torch.Tensor, a: torch.Tensor) -> list[torch.Tensor]:
    return [to_device(to_device(x * 2, "cuda:1").sin(), "cuda:0") + x, to_device(a, "cuda:1").exp()]


def draws_on_cpu(x: torch.Tensor, a: torch.Tensor) -> list[torch.Tensor]:
    return [x + to_device(torch.rand(3), "cuda:0") * 0 + 1, a]


def several_results(x: torch.Tensor, a: torch.Tensor) -> list[torch.Tensor]:
    values, indices = to_device(a, "cuda:0").sort()
    return [values + x, to_device(indices, "cpu") * 2]


FUNCTIONS = [both_directions, scalars, both_gpus, draws_on_cpu, several_results]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "dynamic"])
def test_parts_compute_the_same_as_the_graph(function: Any, dynamic: bool) -> None:
    x, a = torch.randn(3, 3), torch.randn(3, 3)
    module = traced(function, x, a, on=[CUDA, CPU], dynamic=dynamic)
    assert_equal(Devices().run(module, x, a), function(x, a), tolerance=(1e-5, 1e-5))


def test_each_program_has_one_device() -> None:
    x = torch.randn(3, 3)
    assert parts_of(traced(both_directions, x, x.clone(), on=[CUDA, CPU])) == [
        ("cpu", ["add", "sum", "select", "cos", "slice"]),
        ("torch", ["_to_copy"]),
        ("cuda:0", ["mm", "sum", "sin"]),
        ("torch", ["_to_copy"]),
        ("cpu", ["mul", "add"]),
        ("torch", ["_to_copy"]),
        ("cuda:0", ["add"]),
    ]
    assert [device for device, _ in parts_of(traced(both_gpus, x, x.clone(), on=[CUDA, CPU]))] == [
        "torch", "cuda:0", "torch", "cuda:1", "torch", "cuda:0",
    ]  # fmt: skip


def test_cpu_scalars_do_not_split_programs() -> None:
    """Scalars of CPU tensors are computed on the CPU. Scalars that are copied from a GPU are computed in the GPU's program."""
    x = torch.randn(3, 3)
    assert parts_of(traced(scalars, x, x.clone(), on=[CUDA, CPU])) == [
        ("cpu", ["sum", "add"]),
        ("cuda:0", ["mul", "sum", "_to_copy", "max", "_to_copy", "add"]),
        ("cpu", ["mul"]),
    ]


def mask(x: torch.Tensor) -> list[torch.Tensor]:
    mask = torch.triu(torch.ones(x.shape[0], 3), 1).bool()
    return [x.masked_fill(to_device(mask, "cuda:0"), -1.0)]


def constant(x: torch.Tensor) -> list[torch.Tensor]:
    return [x + to_device(torch.tensor([1.0, 2.0, 3.0]), "cuda:0")]


def numbered(x: torch.Tensor) -> list[torch.Tensor]:
    numbers = torch.arange(x.shape[0])
    return [x[numbers] + to_device(numbers, "cuda:0"), x[torch.tensor([0, 2])]]


@pytest.mark.parametrize("function", [mask, constant, numbered], ids=lambda function: function.__name__)
@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "dynamic"])
def test_constants_are_created_on_the_device_that_reads_them(function: Any, dynamic: bool) -> None:
    x = torch.randn(3, 3)
    ((device, _),) = parts_of(traced(function, x, on=[CUDA], dynamic=dynamic))
    assert device == "cuda:0"
    assert_equal(Devices().run(traced(function, x, on=[CUDA], dynamic=dynamic), x), function(x))


def test_moved_constants_have_the_new_device() -> None:
    module = traced(mask, torch.randn(3, 3), on=[CUDA])
    remove_detours(module.graph)
    assert not has_several_devices(module)
    ones = next(node for node in module.graph.nodes if node.target is aten.ones.default)
    assert ones.kwargs["device"] == CUDA
    assert not ones.kwargs["pin_memory"]
    assert {node.meta["val"].device for node in module.graph.nodes if node.op == "call_function"} == {CUDA}


def test_random_ops_run_on_eager_modes_device() -> None:
    x = torch.randn(3, 3)
    assert [device for device, ops in parts_of(traced(draws_on_cpu, x, x.clone(), on=[CUDA, CPU])) if "rand" in ops] == ["cpu"]


def indexed(x: torch.Tensor, indices: torch.Tensor) -> list[torch.Tensor]:
    return [x[indices], x.index_put((indices,), torch.zeros(()), accumulate=True)]


def test_cpu_index_is_copied_to_gpu() -> None:
    x, indices = torch.randn(4, 3), torch.tensor([2, 0])
    assert [device for device, _ in parts_of(traced(indexed, x, indices, on=[CUDA, CPU]))] == ["torch", "cuda:0"]
    assert_equal(Devices().run(traced(indexed, x, indices, on=[CUDA, CPU]), x, indices), indexed(x, indices))


def test_gpu_index_is_not_copied_to_cpu() -> None:
    """torch runs the ops, and raises."""
    x, indices = torch.randn(4, 3), torch.tensor([2, 0])
    parts = parts_of(traced(indexed, x, indices, on=[CPU, CUDA]))
    assert [op for device, ops in parts if device == "torch" for op in ops] == ["index", "index_put"]


def test_source_of_copy_is_moved_to_destination() -> None:
    def function(x: torch.Tensor, a: torch.Tensor) -> list[torch.Tensor]:
        return [aten.copy.default(x * 2, a), aten.copy.default(a, x)]

    x, a = torch.randn(3, 3), torch.randn(3, 3)
    module = traced(function, x, a, on=[CUDA, CPU])
    assert [device for device, ops in parts_of(module) if "copy" in ops] == ["cpu", "cuda:0"]
    assert_equal(Devices().run(traced(function, x, a, on=[CUDA, CPU]), x, a), function(x, a))


def test_copy_to_cpu_blocks() -> None:
    """Either AOTAutograd's wrapper or a program reads the copy. A copy to a GPU need not block: its stream waits."""

    def function(x: torch.Tensor, a: torch.Tensor) -> list[torch.Tensor]:
        return [to_device(x, "cpu", True) + a, to_device(a, "cuda:0", True) + x]

    x = torch.randn(3)
    module = traced(function, x, x.clone(), on=[CUDA, CPU])
    remove_detours(module.graph)
    copies = [node for node in module.graph.nodes if node.target is aten._to_copy.default]
    assert [(node.kwargs["device"], node.kwargs["non_blocking"]) for node in copies] == [(CPU, False), (CUDA, True)]


def test_op_on_several_devices_is_left_to_torch() -> None:
    graph, (x, a), call = built(((3,), CUDA), ((3,), CPU))
    graph.output((call(aten.add.Tensor, x, a, like=((3,), CUDA)),))
    module = GraphModule(torch.nn.Module(), graph)
    assert parts_of(module) == [("torch", ["add"])]
    with pytest.raises(UnsupportedOp, match="several devices"):
        Scheduler(Devices(), Options(fallback="error")).runner(AtenGraph("graph", module))


def test_copy_is_not_a_fallback() -> None:
    x = torch.randn(3, 3)
    options = Options(fallback="error")
    assert parts_of(traced(both_directions, x, x.clone(), on=[CUDA, CPU]), options) == parts_of(
        traced(both_directions, x, x.clone(), on=[CUDA, CPU])
    )


def test_effects_token_has_no_device() -> None:
    graph, (token, x), call = built(((0,), CPU), ((3,), CUDA))
    effects = call(torch.ops.higher_order.with_effects, token, aten._assert_async.msg, x, "no", like=((0,), CPU))
    graph.output((call(operator.getitem, effects, 0, like=((0,), CPU)), x))
    assert not has_several_devices(GraphModule(torch.nn.Module(), graph))


def test_writes_to_inputs_keep_their_position() -> None:
    """A write to an input runs after all earlier reads of the input, on each device."""

    def function(x: torch.Tensor, a: torch.Tensor) -> list[torch.Tensor]:
        before = to_device(x * 2, "cpu") + a
        a.copy_(torch.ones(3))
        return [to_device(a, "cuda:0") + x, a * 2, before]

    x, a = torch.randn(3), torch.randn(3)
    mine, theirs = a.clone(), a.clone()
    module = traced(function, x, mine.clone(), on=[CUDA, CPU])
    order = [op for _, ops in parts_of(module) for op in ops]
    assert order == ["ones", "mul", "_to_copy", "add", "copy_", "_to_copy", "mul", "add"]
    assert_equal(Devices().run(traced(function, x, a, on=[CUDA, CPU]), x, mine), function(x, theirs))
    assert_equal(mine, theirs)
