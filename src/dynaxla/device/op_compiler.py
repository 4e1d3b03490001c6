"""Traces and compiles an op as a program, which reads operands from their storages' arrays, and returns new arrays for storages."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import math
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from jax.sharding import NamedSharding, Sharding
from torch._decomp import get_decompositions
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import _disable_current_modes

from ..capture.decompositions import decompositions
from ..engine.executable import UnboundProgram, compilation_error, execution_error, is_exhausted
from ..engine.options import options_for
from ..errors import UnsupportedOp
from ..lowering import dtypes, kernel_refusals
from ..lowering.checks import Check
from ..lowering.dynamic_scalars import GuardedInputs, ScalarTrace
from ..lowering.function import Function
from ..lowering.implementations import choose_generic, choose_without_refusable
from ..lowering.interpreter import Interpreter
from ..lowering.promotion import convert, expand
from ..lowering.registry import registry
from ..lowering.settings import Settings
from ..observe import metrics
from ..passes import pipeline
from ..runtime import devices, meshes, programs
from ..runtime.layout import Layout, row_major, storage_extent
from . import strided_memory
from .functional_ops import FunctionalOp
from .strided_memory import StridedView


class NotLowered(Exception):
    """Raised for an op, or a use of an op, that XLA does not compute. The message is the reason."""


class StorageMetadata(NamedTuple):
    """The metadata of a storage.

    Attributes:
        nbytes: the size of the storage, in bytes.
        shape: the shape of its array; None if nobody has written to the storage.
        dtype: the JAX dtype of its array, or None.
        sharding: the sharding of its array on a mesh; None on one device.
    """

    nbytes: int
    shape: tuple[int, ...] | None
    dtype: Any
    sharding: NamedSharding | None = None


class TensorOperand(NamedTuple):
    """A tensor among an op's arguments.

    Attributes:
        slot: the index of the tensor's storage among the op's storages. A tensor on the CPU has a slot of its own.
        view: the tensor's metadata in the storage.
    """

    slot: int
    view: StridedView


class NumberOperand(NamedTuple):
    """A Python number among an op's arguments that the op's program takes as an input.

    Attributes:
        position: the index of the number among the numbers that the program takes.
        number_type: float or int.
    """

    position: int
    number_type: type


@dataclass(frozen=True)
class NewTensor:
    """The metadata of a new tensor that an op returns. The strides, in elements, are the same as in torch's eager mode."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class ResizeNeeded:
    """Returned instead of a program for an op whose `out` arguments must be resized first, to the metadata in `outputs`."""

    outputs: tuple[NewTensor, ...]


@dataclass(frozen=True)
class OpProgram:
    """An op as a program.

    The program takes the arrays of `input_slots`, then a seed if it draws random numbers, then the inputs of `variant`. It returns the new
    arrays of `written_slots`, then the arrays of new tensors. If it has checks, the last result is the check code: the index of the first
    failed check, or the number of checks if none failed.

    Attributes:
        traced: the traced program; None for a compiled one.
        input_slots: the slots whose arrays the program takes, in order.
        draws_random: True if the program draws random numbers, and takes a seed (uint32[2]).
        written_slots: the slots whose new arrays the program returns, in order.
        new_outputs: the metadata of the new tensors; None or an int where the op returns None or an int.
        is_list: True if the op returns a tuple or list, else False.
        checks: the exception and the message of each check.
        variant: the conditions on the op's Python numbers under which the program is valid, and the inputs that are computed from them.
        call: the compiled program, which takes and returns lists of arrays; None for a traced one.
    """

    traced: Any
    input_slots: tuple[int, ...]
    draws_random: bool
    written_slots: tuple[int, ...]
    new_outputs: tuple[NewTensor | int | None, ...]
    is_list: bool
    checks: tuple[tuple[type[Exception], str], ...]
    variant: GuardedInputs
    call: Any = None


def _fake(view: StridedView) -> torch.Tensor:
    """Creates a tensor with this metadata on the CPU. Inside a FakeTensorMode it is a fake tensor."""
    return torch.empty_strided(view.shape, view.stride, dtype=view.dtype, device="cpu")


def _map_operands(value: Any, function: Callable[[Any], Any]) -> Any:
    """Maps `function` over the `TensorOperand`s and `NumberOperand`s among an op's arguments, and replaces devices by the CPU."""
    if isinstance(value, (TensorOperand, NumberOperand)):
        return function(value)
    if isinstance(value, (list, tuple)):
        return [_map_operands(item, function) for item in value]
    if isinstance(value, dict):
        return {name: _map_operands(item, function) for name, item in value.items()}
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _lstm_cell(input_gates: torch.Tensor, hidden_gates: torch.Tensor, cx: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    """Returns fake results of an LSTM cell. Unlike torch's own fake kernel, this one works without biases too."""
    return cx.new_empty(cx.shape), cx.new_empty(cx.shape), input_gates.new_empty(input_gates.shape)


def _gru_cell(input_gates: torch.Tensor, hidden_gates: torch.Tensor, hx: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    return hx.new_empty(hx.shape), hx.new_empty(hx.shape[0], 5 * hx.shape[1])


def _gru_cell_backward(grad_hy: torch.Tensor, workspace: torch.Tensor, has_bias: bool) -> tuple[torch.Tensor | None, ...]:
    gates = [grad_hy.new_empty(grad_hy.shape[0], 3 * grad_hy.shape[1]) for _ in range(2)]
    biases = [grad_hy.new_empty(3 * grad_hy.shape[1]) if has_bias else None for _ in range(2)]
    return *gates, grad_hy.new_empty(grad_hy.shape), *biases


def _histc(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Returns the fake result of histc, for integers too, as on GPUs.

    The library transformers counts the tokens of experts by histc of integers on all devices but the CPU.
    """
    is_integer = not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
    return torch.ops.aten.histc.default(x.double() if is_integer else x, *args, **kwargs).to(x.dtype)


def _grouped_mm(x: torch.Tensor, y: torch.Tensor, *args: Any, out_dtype: torch.dtype | None = None, **kwargs: Any) -> torch.Tensor:
    """Returns the fake result of _grouped_mm for all dtypes of torch's CPU kernel. torch's own fake kernel takes bfloat16 only.

    A row of the result takes a multiple of 16 bytes in memory.

    Source: ATen native/GroupedMMUtils.h, create_grouped_gemm_output_tensor
    """
    if x.dtype != y.dtype or x.dtype not in (torch.float32, torch.float16, torch.bfloat16) or out_dtype not in (None, x.dtype):
        return torch.ops.aten._grouped_mm.default(x, y, *args, out_dtype=out_dtype, **kwargs)
    *outer, columns = torch.ops.aten._grouped_mm.default(x.bfloat16(), y.bfloat16(), *args, **kwargs).shape
    row = -(-columns * x.itemsize // 16) * 16 // x.itemsize
    strides = [row * math.prod(outer[dim + 1 :]) for dim in range(len(outer))]
    return x.new_empty_strided((*outer, columns), (*strides, 1))


def _attention_backward(*args: Any, **kwargs: Any) -> tuple[torch.Tensor | None, ...]:
    """Returns fake results of the gradient of attention.

    torch's own fake kernel returns a gradient of the mask even if none is requested.
    """
    *grads, grad_bias = torch.ops.aten._scaled_dot_product_fused_attention_overrideable_backward.default(*args, **kwargs)
    grad_input_mask = args[5]
    return *grads, grad_bias if grad_input_mask[3] else None


# Fake kernels of ops for which torch's own fake kernels do not work on the CPU, or not for all calls. Source: ATen native/cuda/RNN.cu
_FAKES: dict[OpOverload, Callable[..., Any]] = {
    torch.ops.aten._thnn_fused_lstm_cell.default: _lstm_cell,
    torch.ops.aten._thnn_fused_gru_cell.default: _gru_cell,
    torch.ops.aten._thnn_fused_gru_cell_backward.default: _gru_cell_backward,
    torch.ops.aten.histc.default: _histc,
    torch.ops.aten._grouped_mm.default: _grouped_mm,
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable_backward.default: _attention_backward,
}


def _fake_results(mode: FakeTensorMode, op: OpOverload, args: Any, kwargs: Any) -> Any:
    """Returns an op's results for fake tensors. Raises: NotLowered if torch cannot compute them."""
    try:
        with _without_error_logs(), _disable_current_modes(), torch.no_grad(), mode:
            return _FAKES.get(op, op)(*args, **kwargs)
    except Exception as error:  # torch's CPU kernel then runs, which raises the right error for a wrong call
        raise NotLowered(f"the shape of its result is known only after it has run ({type(error).__name__})") from error


@contextlib.contextmanager
def _without_error_logs() -> Iterator[None]:
    """Suppresses the error logs of torch's fake kernels in this thread: torch's CPU kernel, which runs instead, raises these errors."""
    thread = threading.get_ident()
    logger = logging.getLogger(FakeTensorMode.__module__)

    def is_from_other_thread(record: logging.LogRecord) -> bool:
        return record.thread != thread

    logger.addFilter(is_from_other_thread)
    try:
        yield
    finally:
        logger.removeFilter(is_from_other_thread)


def _check_numbers(specialization: OpSpecialization, mode: FakeTensorMode) -> None:
    """Raises NotLowered if torch's kernel rejects the Python numbers of an op, all of which must be constants of its program."""
    assert specialization.functional_op.functional is not None
    args, kwargs = specialization.args, specialization.functional_kwargs
    operands = [operand for operand in _operands((args, kwargs, list(specialization.targets))) if isinstance(operand, TensorOperand)]
    leaves = torch.utils._pytree.tree_leaves((args, kwargs), is_leaf=lambda value: isinstance(value, TensorOperand))
    name = specialization.functional_op.functional._schema.name.removeprefix("aten::")
    if kernel_refusals.may_refuse_numbers(name, leaves, {operand.view.dtype for operand in operands}):
        with _disable_current_modes(), mode:
            fake_args, fake_kwargs = _map_operands((args, kwargs), lambda operand: _fake(operand.view))
        if refusal := kernel_refusals.refusal_of_numbers(specialization.functional_op.functional, fake_args, fake_kwargs):
            raise NotLowered(f"torch's kernel refuses it: {refusal}")


class _GraphModuleWithoutCode(GraphModule):
    """A graph module without generated Python code. Generating it costs time, and for ATen's `random.from` it is not valid Python."""

    def recompile(self) -> Any:
        return None


def build_graph(
    mode: FakeTensorMode, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], numbers: Sequence[Any] = (), platform: str = "cpu"
) -> tuple[GraphModule, list[Node | None], Any]:
    """Builds a graph of one op. An op without a lowering on the platform is decomposed.

    The graph has a placeholder for each `TensorOperand` and each `NumberOperand`, in their order among the arguments.

    Args:
        mode: the fake tensor mode.
        op: the op.
        args: the arguments, with `TensorOperand` and `NumberOperand` objects.
        kwargs: the keyword arguments, with the same objects.
        numbers: the values of the numbers, by `NumberOperand.position`.
        platform: "cpu", "cuda" or "tpu".

    Returns: the graph; the nodes of the op's results (None for a result that is no tensor); the fake results, as the op returns them.

    Raises: NotLowered if torch has no fake results for the op, or it cannot be decomposed.
    """
    graph = Graph()

    def placeholder(operand: TensorOperand | NumberOperand) -> Node:
        node = graph.placeholder(f"x{len(graph.nodes)}")
        if isinstance(operand, NumberOperand):
            node.meta["val"] = numbers[operand.position]
            return node
        with _disable_current_modes(), mode:
            node.meta["val"] = _fake(operand.view)
        return node

    node_args, node_kwargs = _map_operands((args, kwargs), placeholder)
    node = graph.call_function(op, tuple(node_args), node_kwargs)
    fake_args, fake_kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda arg_node: arg_node.meta["val"])
    fake = node.meta["val"] = _fake_results(mode, op, fake_args, fake_kwargs)
    if registry.find(op, platform) is None:
        table = {**get_decompositions([op]), **decompositions(platform)}
        if op in table:
            return *_decompose(node, table), fake
    results: list[Node | None] = [node]
    if isinstance(fake, (list, tuple)):
        results = [None] * len(fake)
        for index, value in enumerate(fake):
            if isinstance(value, torch.Tensor):
                results[index] = item = graph.call_function(operator.getitem, (node, index))
                item.meta["val"] = value
    graph.output(tuple(results))
    return _GraphModuleWithoutCode({}, graph), results, fake


def _decompose(node: Node, table: Mapping[Any, Any]) -> tuple[GraphModule, list[Node | None]]:
    """Decomposes an op by a table of decompositions. Returns the new graph, and the nodes of the op's results in it.

    Raises: NotLowered if the op takes Python numbers as inputs, or cannot be traced.
    """
    op: Any = node.target
    placeholders = node.graph.find_nodes(op="placeholder")
    operands = [placeholder.meta["val"] for placeholder in placeholders]
    if not all(isinstance(operand, torch.Tensor) for operand in operands):
        raise NotLowered("its decomposition depends on its numbers")

    def run(*tensors: torch.Tensor) -> list[Any]:
        tensor_of = dict(zip(placeholders, tensors, strict=True))
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), tensor_of.__getitem__)
        results = op(*args, **kwargs)
        return list(results) if isinstance(results, (list, tuple)) else [results]

    def trace() -> GraphModule:
        with torch.no_grad():
            return make_fx(torch.func.functionalize(run, remove="mutations"), table, _allow_non_fake_inputs=True)(*operands)

    try:
        # Traced in a new thread: in a thread that is inside a dispatch mode, torch's dispatcher skips functionalization.
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            module = thread.submit(trace).result()
    except Exception as error:  # torch's CPU kernel then runs, which raises the right error for a wrong call
        raise NotLowered(f"it cannot be decomposed ({type(error).__name__})") from error
    results = module.graph.output_node().args[0]
    if not all(result is None or isinstance(result, Node) for result in results):
        raise NotLowered("it returns a number")
    return module, list(results)


@dataclass(frozen=True)
class OpSpecialization:
    """An op to compile, for operands with this metadata.

    Attributes:
        functional_op: the op and its functional counterpart.
        args: the op's arguments, with a `TensorOperand` for each tensor and a `NumberOperand` for each number that the program takes.
        kwargs: its keyword arguments, with the same objects.
        targets: the tensors to write the results to; empty if the results are new tensors.
        slots: the metadata of the storages of all operands and targets.
        device: the device that runs the op, or a device of the mesh.
        numbers: the values of the numbers that the program takes, by `NumberOperand.position`.
        mesh_sharding: the replicated sharding of the mesh on which the arrays of all storages are; None on one device.
    """

    functional_op: FunctionalOp
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    targets: tuple[TensorOperand, ...]
    slots: tuple[StorageMetadata, ...]
    device: jax.Device
    numbers: tuple[Any, ...] = ()
    mesh_sharding: NamedSharding | None = None

    def with_constant_numbers(self) -> OpSpecialization:
        """Returns the same op with its numbers as constants of the program."""
        args, kwargs = _with_numbers((self.args, dict(self.kwargs)), self.numbers)
        return replace(self, args=args, kwargs=kwargs, numbers=())

    @property
    def functional_kwargs(self) -> dict[str, Any]:
        """The keyword arguments of the functional op."""
        named = {name: value for name, value in self.kwargs.items() if name not in self.functional_op.out_arguments}
        if self.functional_op.passes_dtype:
            named["dtype"] = self.targets[0].view.dtype
        return named


def _with_numbers(value: Any, numbers: Sequence[Any]) -> Any:
    """Replaces each `NumberOperand` in nested arguments by its number."""
    if isinstance(value, NumberOperand):
        return numbers[value.position]
    if type(value) is tuple:
        return tuple([_with_numbers(item, numbers) for item in value])
    return {name: _with_numbers(item, numbers) for name, item in value.items()} if isinstance(value, dict) else value


def compile_op(specialization: OpSpecialization) -> OpProgram | ResizeNeeded:
    """Compiles an op. Raises: the errors of `trace_op`; CompilationError; OutOfMemory."""
    program = trace_op(specialization)
    if isinstance(program, ResizeNeeded):
        return program
    with metrics.timed("compile"):
        settings, name = Settings.current(devices.platform_name(specialization.device)), specialization.functional_op.op._schema.name
        call = _compile(program.traced, name, specialization.device, settings, specialization.mesh_sharding is not None)
    return replace(program, traced=None, call=call)


def trace_op(specialization: OpSpecialization) -> OpProgram | ResizeNeeded:
    """Traces an op as a program, without compiling it.

    Raises: NotLowered; ATen's RuntimeError for a target of a wrong dtype or in overlapping memory; the errors of the lowering. With numbers
    as inputs, any exception if one of the numbers must be compiled in.
    """
    functional_op, args, targets = specialization.functional_op, specialization.args, specialization.targets
    assert functional_op.functional is not None
    kwargs = specialization.functional_kwargs
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    if not specialization.numbers:
        _check_numbers(specialization, mode)
    platform = devices.platform_name(specialization.device)
    module, nodes, fake = build_graph(mode, functional_op.functional, args, kwargs, specialization.numbers, platform)
    is_list = isinstance(fake, (list, tuple))
    values = list(fake) if is_list else [fake]
    if not all(value is None or isinstance(value, torch.Tensor) or (is_list and type(value) is int) for value in values):
        raise NotLowered("it returns a number")
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if any((value.is_conj() or value.is_neg() or value.layout != torch.strided) for value in tensors):
        raise NotLowered("it returns a conjugate, negative or non-strided tensor")
    _check_no_overlap(functional_op.name, _operands((args, kwargs)), targets)
    if functional_op.out_arguments:
        results = tuple(_new_tensor(value) for value in tensors)
        if functional_op.name in _ROW_MAJOR_OUT:
            results = tuple(NewTensor(item.shape, row_major(item.shape), item.dtype) for item in results)
        if any(item.shape != target.view.shape for item, target in zip(results, targets, strict=True)):
            return ResizeNeeded(results)
    if functional_op.written:
        _check_dtypes(functional_op, values, targets)
    if not functional_op.written or torch.Tag.pointwise in functional_op.functional.tags:
        _check_partial_overlap(_operands((args, kwargs)), targets)
    for target in targets:
        strided_memory.check_no_internal_overlap(target.view)
    if functional_op.written:  # an op that writes may reject arguments that the functional op accepts, e.g. a target of another dtype
        with _disable_current_modes(), mode:
            own_args, own_kwargs = _map_operands(
                _with_numbers((args, dict(specialization.kwargs)), specialization.numbers), lambda operand: _fake(operand.view)
            )
        _fake_results(mode, functional_op.op, own_args, own_kwargs)
    new_outputs = tuple(_new_tensor(value) if isinstance(value, torch.Tensor) else value for value in values)
    return _trace_graph(specialization, module, nodes, () if targets else new_outputs, is_list)


# Ops whose `out` argument ATen resizes to row-major strides, whatever strides the functional op returns, since ATen computes the result
# first and copies it. Source: ATen/native/BatchLinearAlgebra.cpp, cholesky_out
_ROW_MAJOR_OUT = frozenset(["cholesky"])
# Ops whose `out` argument must have exactly the dtype of the result.
# Source: ATen/native/TensorFactories.cpp, complex_check_dtype; ReduceOps.cpp, aminmax
_EXACT_DTYPE_OUT = frozenset(["complex", "polar", "aminmax"])


def _check_dtypes(functional_op: FunctionalOp, values: Sequence[torch.Tensor | None], targets: Sequence[TensorOperand]) -> None:
    """Raises ATen's RuntimeError if the dtype of a result (`values`, fake) does not allow writing it to its target."""
    for value, target in zip(values, targets, strict=False):
        if value is not None and functional_op.name in _EXACT_DTYPE_OUT and value.dtype != target.view.dtype:
            raise RuntimeError(f"Expected out tensor to have dtype {value.dtype}, but got {target.view.dtype} instead")
        if value is not None and not torch.can_cast(value.dtype, target.view.dtype):
            names = [torch.empty(0, dtype=dtype).type()[len("torch.") : -len("Tensor")] for dtype in (value.dtype, target.view.dtype)]
            raise RuntimeError("result type {} can't be cast to the desired output type {}".format(*names))


def _check_partial_overlap(operands: Sequence[TensorOperand | NumberOperand], targets: Sequence[TensorOperand]) -> None:
    """Raises RuntimeError for a target that overlaps partly with an operand, as ATen's copies and elementwise ops do.

    Source: ATen/MemoryOverlap.cpp, get_overlap_status
    """
    for target in targets:
        _refuse_overlap(operands, target, strided_memory.overlaps_partly)


# Ops for whose `out` argument ATen checks that it shares no memory with an operand.
_NO_OVERLAP_OUT = frozenset(["take", "index_select", "gather", "index", "cat"])


def _check_no_overlap(name: str, operands: Sequence[TensorOperand | NumberOperand], targets: Sequence[TensorOperand]) -> None:
    """Raises RuntimeError for a target that shares memory with an operand, or whose own elements share memory.

    Does nothing for other ops than `_NO_OVERLAP_OUT`. ATen checks this before it resizes targets.

    Source: ATen/MemoryOverlap.cpp, assert_no_overlap and assert_no_internal_overlap
    """
    for target in targets if name in _NO_OVERLAP_OUT else ():
        strided_memory.check_no_internal_overlap(target.view)
        _refuse_overlap(operands, target, strided_memory.overlaps)


def _refuse_overlap(
    operands: Sequence[TensorOperand | NumberOperand], target: TensorOperand, overlap: Callable[[StridedView, StridedView], bool]
) -> None:
    """Raises ATen's RuntimeError if `overlap` is true for the target and an operand on the same storage."""
    for operand in operands:
        if isinstance(operand, TensorOperand) and operand.slot == target.slot and overlap(operand.view, target.view):
            raise RuntimeError(
                "unsupported operation: some elements of the input tensor and the written-to tensor refer to a single memory location. "
                "Please clone() the tensor before performing the operation."
            )


def _trace_on_devices(
    specialization: OpSpecialization,
    program: Callable[..., list[jax.Array]],
    avals: Sequence[jax.ShapeDtypeStruct],
    written_slots: Sequence[int],
    new_count: int,
) -> jax.stages.Traced:
    """Traces the program of an op for its device, or for its mesh.

    Args:
        specialization: the op.
        program: the program.
        avals: the shapes, dtypes and shardings of the program's inputs.
        written_slots: the slots whose new arrays are the program's first results. These keep the slots' shardings.
        new_count: the number of new tensors, whose arrays are the next results.
    """
    with metrics.timed("trace"):
        if specialization.mesh_sharding is None:
            return _trace_program(program, avals, specialization.device)
        free_results = range(len(written_slots), len(written_slots) + new_count)
        shardings = [specialization.slots[slot].sharding for slot in written_slots]
        return _trace_program(pipeline.PARTITIONABLE(program, free_results), avals, specialization.device, shardings)


def _trace_graph(
    specialization: OpSpecialization,
    module: GraphModule,
    nodes: Sequence[Node | None],
    new_outputs: tuple[NewTensor | int | None, ...],
    is_list: bool,
) -> OpProgram:
    """Traces the graph of an op as a program on the arrays of the op's storages.

    Args:
        specialization: the op.
        module: the op's graph, from `build_graph`.
        nodes: the nodes of the op's results.
        new_outputs: the metadata of the results, if they are new tensors; empty if they are written to targets.
        is_list: True if the op returns several values.

    Raises: NotLowered; the errors of the lowering; NumberInspected if a number must be compiled in.
    """
    targets, slots, device = specialization.targets, specialization.slots, specialization.device
    number_trace = ScalarTrace(specialization.numbers)
    function = _lowered_function(specialization, module, nodes, number_trace)
    tensors = [item for item in _operands((specialization.args, specialization.functional_kwargs)) if isinstance(item, TensorOperand)]
    input_slots = tuple(index for index, metadata in enumerate(slots) if metadata.shape is not None)
    written_slots = tuple(dict.fromkeys(operand.slot for operand in targets))
    checks: list[tuple[type[Exception], str]] = []
    omitted: list[int] = []  # the results that the op's output_mask leaves out, although torch's fake kernel returns tensors for them

    def program(*arrays: jax.Array) -> list[jax.Array]:
        """The program of `OpProgram`. In a first call, without numbers, it fills `number_trace.scalar_inputs`."""
        number_trace.begin(arrays[first_number:])
        slot_arrays = _slot_arrays(specialization, tensors, iter(arrays))
        key = jax.random.wrap_key_data(arrays[first_number - 1], impl="threefry2x32") if function.draws_random else None
        results = function([strided_memory.read(slot_arrays[operand.slot], operand.view) for operand in tensors], key)
        result_values = iter(results.outputs)
        outputs = [None if node is None else next(result_values) for node in nodes]
        _write_targets(specialization, slot_arrays, outputs)
        new_values = list(zip(outputs, new_outputs, strict=True)) if new_outputs else []
        omitted[:] = [index for index, (value, item) in enumerate(new_values) if value is None and isinstance(item, NewTensor)]
        new_arrays = [_storage_array(value, item) for value, item in new_values if value is not None and isinstance(item, NewTensor)]
        checks[:] = [(check.error, check.message) for check in results.checks]
        code = [Check.first_failed(results.checks)] if results.checks else []
        return [*(slot_arrays[slot] for slot in written_slots), *new_arrays, *code]

    program.__name__ = specialization.functional_op.op._schema.name.replace("::", "_")
    sharding = meshes.as_sharding(specialization.mesh_sharding or device)
    avals = [jax.ShapeDtypeStruct(slot.shape, slot.dtype, sharding=slot.sharding or sharding) for slot in slots if slot.shape is not None]
    avals += [jax.ShapeDtypeStruct((2,), np.uint32, sharding=sharding)] if function.draws_random else []
    first_number = len(avals)  # the index of the first number among the program's inputs
    if specialization.numbers:
        with _trace_context(device):
            jax.eval_shape(program, *avals)  # fills `number_trace.scalar_inputs` with the dtypes of the number inputs
        avals += [jax.ShapeDtypeStruct((), wanted.dtype, sharding=sharding) for wanted in number_trace.scalar_inputs]
    new_count = sum(isinstance(item, NewTensor) for item in new_outputs)
    traced = _trace_on_devices(specialization, program, avals, written_slots, new_count)
    if number_trace.was_inspected or len(number_trace.scalar_inputs) != len(avals) - first_number:
        number_trace.inspect()  # raises NumberInspected
    variant = GuardedInputs(dict(number_trace.conditions), tuple(number_trace.scalar_inputs))
    new_outputs = tuple(None if index in omitted else item for index, item in enumerate(new_outputs))
    return OpProgram(traced, input_slots, function.draws_random, written_slots, new_outputs, is_list, tuple(checks), variant)


def _lowered_function(
    specialization: OpSpecialization, module: GraphModule, nodes: Sequence[Node | None], number_trace: ScalarTrace
) -> Function:
    """Returns an op as a function of its tensors. Its `NumberOperand`s become dynamic scalars of `number_trace`. Raises: NotLowered."""
    platform = devices.platform_name(specialization.device)
    try:
        interpreter = Interpreter(module, platform, kernels=False)
    except UnsupportedOp as error:
        raise NotLowered(error.message) from error
    operands = enumerate(_operands((specialization.args, specialization.functional_kwargs)))
    numbers = {index: number_trace.number(item.position) for index, item in operands if isinstance(item, NumberOperand)}
    # On the CPU, implementations other than the generic one call torch's kernels and oneDNN, which pays off in larger programs only. On a
    # mesh, XLA could not partition the calls.
    choose = choose_generic if platform == "cpu" or specialization.mesh_sharding is not None else choose_without_refusable
    outputs = [node for node in nodes if node is not None]
    return Function(interpreter, numbers=numbers, outputs=outputs, settings=Settings.current(platform), choose=choose)


def _slot_arrays(specialization: OpSpecialization, tensors: Sequence[TensorOperand], inputs: Iterator[jax.Array]) -> list[jax.Array]:
    """Returns the array of each slot: an input of the program, or zeros for a storage that nobody has written to."""
    # The dtype of the first tensor on each slot, which the zeros get.
    first_dtypes = {item.slot: item.view.dtype for item in reversed([*tensors, *specialization.targets])}
    unwritten = [
        strided_memory.unwritten_aval(slot.nbytes, first_dtypes.get(index, torch.uint8)) if slot.shape is None else None
        for index, slot in enumerate(specialization.slots)
    ]
    return [next(inputs) if aval is None else jax.numpy.zeros(aval.shape, aval.dtype) for aval in unwritten]


def _write_targets(specialization: OpSpecialization, slot_arrays: list[jax.Array], results: Sequence[Any]) -> None:
    """Replaces the arrays of the targets' slots by arrays with the op's results."""
    for target, value in zip(specialization.targets, results, strict=False):
        slot = specialization.slots[target.slot]
        array = strided_memory.write(slot_arrays[target.slot], target.view, _cast_and_expand(value, target.view))
        if slot.sharding is not None and slot.shape is not None:  # the sharding is for an array of the slot's shape
            array = strided_memory.bitcast(array, slot.shape, slot.dtype)
        slot_arrays[target.slot] = array


@contextlib.contextmanager
def _trace_context(device: jax.Device) -> Iterator[None]:
    """The context in which programs are traced and compiled: 64-bit types are enabled, and constants are on this device."""
    with programs.without_outer_frames(), jax.enable_x64(True), jax.default_device(device):
        yield


def compile_program(
    program: Any, avals: Sequence[jax.ShapeDtypeStruct], device: jax.Device, settings: Settings, shardings: Sequence[Sharding | None] = ()
) -> Any:
    """Compiles a program. Returns a callable that takes and returns lists of arrays.

    Args:
        program: a function of arrays that returns a list of arrays.
        avals: the shapes, dtypes and shardings of the inputs.
        device: the device that runs the program, or a device of the mesh.
        settings: the precision settings.
        shardings: the shardings of the first results; None where XLA chooses.

    Raises: NotLowered for an UnsupportedOp; CompilationError; OutOfMemory.
    """
    with metrics.timed("compile"):
        on_mesh = any(len(aval.sharding.device_set) > 1 for aval in avals)
        return _compile(_trace_program(program, avals, device, shardings), program.__name__, device, settings, on_mesh)


def _trace_program(
    program: Any, avals: Sequence[jax.ShapeDtypeStruct], device: jax.Device, shardings: Sequence[Sharding | None] = ()
) -> jax.stages.Traced:
    """Traces a program. See `compile_program`."""
    with _trace_context(device):
        try:
            traced = jax.jit(program, keep_unused=True).trace(*avals)
        except UnsupportedOp as error:
            raise NotLowered(error.message) from error
        return pipeline.SHARDED(traced, program.__name__, avals, shardings) if any(shardings) else traced


def _compile(traced: jax.stages.Traced, name: str, device: jax.Device, settings: Settings, on_mesh: bool) -> Any:
    """Compiles a traced program: see `compile_program`. `on_mesh`: True for a program on several devices."""
    platform = devices.platform_name(device)
    options = options_for(platform, traced.jaxpr, settings, on_mesh)
    with _trace_context(device):
        try:
            executable = programs.compile_lowered(traced.lower(), device, options, None, False)
            return UnboundProgram(name, executable) if on_mesh else executable.call
        except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
            raise (execution_error if is_exhausted(error) else compilation_error)(name, error) from error


def _operands(values: Any) -> list[TensorOperand | NumberOperand]:
    """Returns the `TensorOperand`s and `NumberOperand`s in nested arguments, in the order of `build_graph`'s placeholders."""
    if isinstance(values, (TensorOperand, NumberOperand)):
        return [values]
    if isinstance(values, (list, tuple)):
        return [operand for value in values for operand in _operands(value)]
    return [operand for value in values.values() for operand in _operands(value)] if isinstance(values, dict) else []


def _new_tensor(fake: torch.Tensor) -> NewTensor:
    return NewTensor(tuple(fake.shape), tuple(fake.stride()), fake.dtype)


def _cast_and_expand(value: jax.Array, view: StridedView) -> jax.Array:
    """Casts a result to the dtype of the target and expands it to the target's shape."""
    return expand(convert(value, dtypes.to_jax(view.dtype)), view.shape)


def _storage_array(value: jax.Array, item: NewTensor) -> jax.Array:
    """Returns the array of the storage of a new tensor with this value."""
    layout = Layout.of(item.shape, item.stride)
    if layout.dense:
        return layout.pack(value)
    extent = storage_extent(item.shape, item.stride)
    return strided_memory.write(jax.numpy.zeros(extent, value.dtype), StridedView(item.dtype, item.shape, item.stride), value)
