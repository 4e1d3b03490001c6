"""Tests of buffers/native.py: a program's arguments and results in torch's memory, and the tensors that a call returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from jax import numpy as jnp
from torch._functorch._aot_autograd import descriptors
from torch.fx.experimental.proxy_tensor import make_fx

from dynaxla.buffers.native import GraphDevice, NativeBuffers
from dynaxla.buffers.output_plan import FromBuffer
from dynaxla.capture.graph import OpenLayouts, Phase
from dynaxla.lowering import Interpreter, SymbolValues
from dynaxla.runtime import clients
from support.comparisons.compare import check

pytestmark = pytest.mark.quick


def buffers_of(
    function: Callable[..., Any],
    inputs: list[torch.Tensor],
    phase: Phase = "inference",
    example_args: list[Any] | None = None,
    descriptions: list[Any] | None = None,
    device: str = "cpu",
) -> NativeBuffers:
    module = make_fx(function, tracing_mode="fake")(*inputs)
    if descriptions is not None:
        module.graph.output_node().meta["desc"] = descriptions
        for index, node in enumerate(module.graph.find_nodes(op="placeholder")):
            node.meta["desc"] = descriptors.PlainAOTInput(index)
    graph_device = GraphDevice(torch.device(device), clients.cpu_device())
    args = inputs if example_args is None else example_args
    return NativeBuffers(Interpreter(module, device), SymbolValues(), args, frozenset(), phase, graph_device, reorders=True)


def test_arguments_are_the_inputs_that_are_read_in_memory_order() -> None:
    inputs = [torch.zeros(2, 3).t(), torch.zeros(5), torch.zeros(0, 4), torch.zeros(7), torch.zeros(3, dtype=torch.int64)]
    buffers = buffers_of(lambda x, unread, empty, shown, y: [x * y[:, None], empty + 1, shown[1:]], inputs)
    assert [(aval.shape, str(aval.dtype)) for aval in buffers.avals()] == [((2, 3), "float32"), ((3,), "int64")]
    x, y = np.arange(6.0).reshape(2, 3), np.arange(3)
    unpacked, key = buffers.unpack([jnp.asarray(x), jnp.asarray(y)])
    assert key is None
    assert [array.shape for array in unpacked] == [(3, 2), (5,), (0, 4), (7,), (3,)]
    assert np.array_equal(unpacked[0], x.T)
    assert np.array_equal(unpacked[4], y)
    args = list(inputs)
    taken = buffers.bind(()).take(args)
    assert [id(tensor) for tensor in taken] == [id(inputs[index]) for index in (0, 4, 3)], "inputs that are only returned come last"
    assert args == [], "a caller's list must not keep tensors alive"


def test_first_argument_of_a_random_program_is_the_seed() -> None:
    x = torch.zeros(3)
    buffers = buffers_of(lambda x: [torch.rand_like(x)], [x])
    assert [(aval.shape, str(aval.dtype)) for aval in buffers.avals()] == [((2,), "int32"), ((3,), "float32")]
    binding = buffers.bind(())
    torch.manual_seed(0)
    first, second = (np.asarray(binding.arrays([x])[0]) for _ in range(2))
    torch.manual_seed(0)
    assert not np.array_equal(first, second)
    assert np.array_equal(first, np.asarray(binding.arrays([x])[0]))
    _, key = buffers.unpack([jnp.asarray(first), jnp.zeros(3)])
    assert key is not None


def test_tensors_that_a_call_returns() -> None:
    def function(x: torch.Tensor) -> list[Any]:
        y = x + 1
        return [y, y, y.view(2, 3), y.t(), x, x, x[0], None, 7, (y * 2)[:0]]

    x, result = torch.randn(2, 3), torch.randn(2, 3)
    buffers = buffers_of(function, [x])
    assert len(buffers.nodes) == 1
    y, again, viewed, transposed, same, same_again, row, none, seven, empty = buffers.bind(()).outputs([result], [x])
    assert y is again is result
    assert same is same_again is x
    assert viewed is not result, "in eager mode, these are two tensors"
    assert viewed.data_ptr() == result.data_ptr()
    assert transposed is not result
    assert transposed.data_ptr() == result.data_ptr()
    assert torch.equal(transposed, result.t())
    assert row.data_ptr() == x.data_ptr()
    assert torch.equal(row, x[0])
    assert (none, seven) == (None, 7)
    assert empty.shape == (0, 3)


def test_numbers_in_results_are_those_of_the_call() -> None:
    module = make_fx(lambda x: [x + 1, x.shape[0] * 2], tracing_mode="symbolic")(torch.zeros(5, 3))
    symbols = {size.node.expr: 4 for size in module.graph.find_nodes(op="placeholder")[0].meta["val"].shape[:1]}
    rest = {size.node.expr: 3 for size in module.graph.find_nodes(op="placeholder")[0].meta["val"].shape[1:]}
    graph_device = GraphDevice(torch.device("cpu"), clients.cpu_device())
    values = SymbolValues(symbols | rest)
    buffers = NativeBuffers(Interpreter(module, "cpu"), values, [torch.zeros(4, 3)], frozenset(), "inference", graph_device, reorders=False)
    assert [aval.shape for aval in buffers.avals()] == [(4, 3)]
    (number,) = buffers.numbers
    assert values.integer(number.meta["val"]) == 8
    result = torch.zeros(4, 3)
    assert buffers.bind((8,)).outputs([result], []) == [result, 8]


def test_saved_values_may_have_another_layout() -> None:
    saved, plain = descriptors.SavedForBackwardsAOTOutput(0), descriptors.PlainAOTOutput(0)
    buffers = buffers_of(lambda x: [x + 1, x * 2], [torch.zeros(2, 3)], "forward", descriptions=[plain, saved])
    assert list(buffers.free_results) == [1]
    ordered = buffers.with_result_orders({1: (1, 0)})
    assert [output.stride for output in ordered._outputs if isinstance(output, FromBuffer)] == [(3, 1), (1, 2)]
    assert [output.stride for output in buffers._outputs if isinstance(output, FromBuffer)] == [(3, 1), (3, 1)], "the original is unchanged"
    assert ordered.facts != buffers.facts
    value = jnp.arange(6.0).reshape(3, 2)  # as the program returns it: in the chosen order
    assert np.array_equal(ordered.pack([value.T, value])[1], value)
    result = torch.arange(6.0).view(3, 2)
    assert torch.equal(ordered.bind(()).outputs([torch.zeros(2, 3), result], [])[1], result.t())


@pytest.mark.parametrize("dense", [True, False], ids=["in another order", "with gaps"])
def test_backward_program_has_the_strides_of_its_inputs(dense: bool) -> None:
    saved_tensor = torch.randn(3, 2).t() if dense else torch.randn(2, 6)[:, ::2]
    buffers = buffers_of(
        lambda saved, gradient: [saved * 2, gradient], [torch.zeros(2, 3), torch.zeros(2, 3)], "backward", [saved_tensor, saved_tensor]
    )
    assert buffers.specs[0].stride == (saved_tensor.stride() if dense else (3, 1))
    assert buffers.specs[1].stride == (3, 1), "returned inputs have the strides of the graph"
    returned = buffers.bind(()).outputs([torch.zeros(2, 3)], [saved_tensor, saved_tensor])[1]
    assert returned.stride() == (3, 1)
    assert torch.equal(returned, saved_tensor)


def test_gpu_program_has_at_least_one_argument_and_result() -> None:
    x = torch.zeros(3)
    on_gpu, on_cpu = (buffers_of(lambda x: [x], [x], device=device) for device in ("cuda", "cpu"))
    assert [(aval.shape, str(aval.dtype)) for aval in on_gpu.avals()] == [((2,), "int32")]
    assert on_cpu.avals() == []
    assert on_gpu.unpack([jnp.zeros(2, jnp.int32)])[1] is None, "no random key"
    (only,) = on_gpu.pack([])
    assert (only.shape, str(only.dtype)) == ((), "int32")
    assert on_cpu.pack([]) == []
    with_result = buffers_of(lambda x: [x + 1], [x], device="cuda")
    assert len(with_result.pack([jnp.zeros(3)])) == 1


def _write(position: int) -> Any:
    return descriptors.InputMutationAOTOutput(descriptors.PlainAOTInput(position))


def test_failed_check_writes_the_old_value_of_an_input() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> list[Any]:
        return [x * 2, y + 1]

    inputs = [torch.zeros(2, 3).t(), torch.zeros(3)]
    plain = descriptors.PlainAOTOutput(0)
    buffers = buffers_of(function, inputs, descriptions=[_write(0), plain], device="cuda")
    new, old = [jnp.ones((3, 2)), jnp.ones(3)], [jnp.full((3, 2), 5.0), jnp.full(3, 5.0)]
    for code, written in ((2, 1), (0, 5), (1, 5)):
        results = buffers.protect_inputs(new, old, jnp.int32(code), 2)
        assert [float(array.min()) for array in results] == [written, 1]
    assert buffers.protect_inputs(new, old, jnp.int32(0), 2)[1] is new[1]
    on_cpu = buffers_of(function, inputs, descriptions=[_write(0), plain])
    assert on_cpu.protect_inputs(new, old, jnp.int32(0), 2)[0] is new[0], "on the CPU, the call reads the checks before any write"


def test_input_is_an_argument_if_only_its_old_value_is_needed() -> None:
    buffers = buffers_of(lambda x, y: [y + 1], [torch.zeros(3), torch.zeros(3)], descriptions=[_write(0)], device="cuda")
    assert len(buffers.avals()) == 3
    assert len(buffers_of(lambda x, y: [y + 1], [torch.zeros(3), torch.zeros(3)], descriptions=[_write(0)]).avals()) == 1


WRITES: dict[str, tuple[Callable[..., list[Any]], list[Any], bool]] = {
    "a buffer": (lambda x, y: [x + y], [_write(0)], False),
    "the same to two inputs": (lambda x, y: [total := x + y, total], [_write(0), _write(1)], True),
    "another input": (lambda x, y: [y], [_write(0)], True),
    "itself": (lambda x, y: [x], [_write(0)], False),
    "another shape": (lambda x, y: [(x + y)[:2]], [_write(0)], True),
    "a part of another result": (
        lambda x, y: [(total := torch.cat([x, y]))[:3], total],
        [_write(0), descriptors.PlainAOTOutput(0)],
        True,
    ),
    "nothing": (lambda x, y: [x + y], [descriptors.PlainAOTOutput(0)], False),
}


@pytest.mark.parametrize("case", WRITES)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_call_waits_if_the_program_cannot_guard_its_writes(case: str, device: str) -> None:
    function, descriptions, waits = WRITES[case]
    buffers = buffers_of(function, [torch.zeros(3), torch.zeros(3)], descriptions=descriptions, device=device)
    assert buffers.bind(())._waits_for_checks is (waits and device == "cuda")


def test_open_inputs() -> None:
    """An open input is an array of its own shape until its order is chosen. Afterwards it has the chosen order."""
    inputs = [torch.zeros(2, 3), torch.zeros(3, 4), torch.zeros(5), torch.zeros(6, 7)]
    module = make_fx(lambda x, y, z, unread: [torch.rand_like(x) + x, y + 1, z + 1], tracing_mode="fake")(*inputs)
    graph_device, open_inputs = GraphDevice(torch.device("cpu"), clients.cpu_device()), OpenLayouts([1, 2, 3])

    def new_buffers() -> NativeBuffers:
        return NativeBuffers(
            Interpreter(module, "cpu"), SymbolValues(), inputs, frozenset(), "inference", graph_device, False, open_inputs=open_inputs
        )

    buffers = new_buffers()
    assert buffers.open_inputs == {2: 1}, "after the seed and x; a vector has only one order, and the last input is not read"
    assert [aval.shape for aval in buffers.avals()[1:]] == [(2, 3), (3, 4), (5,)]
    (_, y, _) = buffers.with_input_orders({2: (1, 0)}).bind(()).arguments.parameters
    assert (y.stride, y.is_unpacked, y.array_shape_and_strides) == ((1, 3), True, ((3, 4), (1, 3)))
    open_inputs.orders = {1: (1, 0)}
    chosen = new_buffers()
    assert chosen.open_inputs == {}
    assert [aval.shape for aval in chosen.avals()[1:]] == [(2, 3), (4, 3), (5,)]


def test_views_of_another_dtype_of_a_written_input() -> None:
    """With symbolic sizes, AOTAutograd creates these views from the inputs."""

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z, numbers = x.mul_(2).view_as(x), y.mul_(2).view_as(y)
        return z.real, z.imag[1:], numbers.view(torch.int32)[1:], torch.view_as_complex(numbers.view(-1, 2))[1:]

    check(function, torch.randn(8, dtype=torch.complex64), torch.randn(8), dynamic=True, calls=1)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: torch.unsafe_split(x, 2),
        lambda x: torch.unsafe_split_with_sizes(x, [2, 2]),
        lambda x: torch.ops.aten._unsafe_view(x, [2, 6]),
    ],
)
def test_views_that_autograd_does_not_track(view: Callable[..., Any]) -> None:
    x = torch.randn(4, 3, requires_grad=True)
    with torch.no_grad():
        check(view, x)
