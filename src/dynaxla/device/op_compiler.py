"""Traces and compiles one op as a program, which reads its operands from their storages' arrays and returns the storages' new arrays."""

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
from ..lowering.dynamic_scalars import GuardedInputs, NumberTrace
from ..lowering.function import Function
from ..lowering.implementations import choose_generic, choose_without_refusable
from ..lowering.interpreter import Interpreter
from ..lowering.promotion import convert, expand
from ..lowering.registry import registry
from ..lowering.settings import Settings
from ..observe import metrics
from ..passes import pipeline
from ..runtime import meshes, programs
from ..runtime.layout import Layout, row_major, storage_extent
from . import strided_memory
from .counterparts import FunctionalOp
from .strided_memory import StridedView


class NotLowered(Exception):
    """Raised for an op, or a use of it, that XLA does not compute. The message is the reason."""


class StorageMetadata(NamedTuple):
    """The metadata of a storage.

    Attributes:
        nbytes: its size.
        shape: of its array; None if nobody has written to the storage.
        dtype: of its array, or None.
        sharding: of its array on a mesh, or None.
    """

    nbytes: int
    shape: tuple[int, ...] | None
    dtype: Any
    sharding: NamedSharding | None = None


class TensorOperand(NamedTuple):
    """A tensor among an op's arguments.

    Attributes:
        slot: the index of its storage. A tensor on the CPU has a slot of its own.
        place: its metadata in the storage.
    """

    slot: int
    place: StridedView


class NumberOperand(NamedTuple):
    """A Python number among an op's arguments that its program takes as an input.

    Attributes:
        position: its index among these numbers.
        kind: float or int.
    """

    position: int
    kind: type


@dataclass(frozen=True)
class NewTensor:
    """The metadata of a new tensor, with the strides of eager mode."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Resized:
    """An op whose `out` arguments have other shapes than its results. `made` has the metadata of the results."""

    made: tuple[NewTensor, ...]


@dataclass(frozen=True)
class Traced:
    """An op as a traced program.

    The program takes the arrays of the slots in `given`, then a seed if it draws, then the numbers. It returns the new arrays of the slots
    in `written`, then the new tensors, then the index of the first failed check if it has checks.

    Attributes:
        traced: the traced program.
        given: the slots whose arrays it takes, in order.
        draws: it draws random numbers, and takes a seed.
        written: the slots whose new arrays it returns, in order.
        made: the metadata of the new tensors; None or a number where the op returns that.
        is_list: the op returns several values.
        checks: the exception and the message of each check.
        numbers: the conditions on the numbers under which the program is valid, and the inputs that it computes from them.
    """

    traced: jax.stages.Traced
    given: tuple[int, ...]
    draws: bool
    written: tuple[int, ...]
    made: tuple[NewTensor | int | None, ...]
    is_list: bool
    checks: tuple[tuple[type[Exception], str], ...]
    numbers: GuardedInputs


@dataclass(frozen=True)
class OneOp:
    """A compiled op. `call` takes and returns lists of arrays; the other attributes are those of `Traced`."""

    call: Any
    given: tuple[int, ...]
    draws: bool
    written: tuple[int, ...]
    made: tuple[NewTensor | int | None, ...]
    is_list: bool
    checks: tuple[tuple[type[Exception], str], ...]
    numbers: GuardedInputs


def _fake(place: StridedView) -> torch.Tensor:
    return torch.empty_strided(place.shape, place.stride, dtype=place.dtype, device="cpu")


def _replace(value: Any, function: Callable[[Any], Any]) -> Any:
    """Maps `function` over the operands and numbers in an op's arguments, and replaces devices by the CPU."""
    if isinstance(value, (TensorOperand, NumberOperand)):
        return function(value)
    if isinstance(value, (list, tuple)):
        return [_replace(item, function) for item in value]
    if isinstance(value, dict):
        return {name: _replace(item, function) for name, item in value.items()}
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _lstm_cell(input_gates: torch.Tensor, hidden_gates: torch.Tensor, cx: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    """Fake results of an LSTM cell. Unlike torch's own, it works without biases too."""
    return cx.new_empty(cx.shape), cx.new_empty(cx.shape), input_gates.new_empty(input_gates.shape)


def _gru_cell(input_gates: torch.Tensor, hidden_gates: torch.Tensor, hx: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    return hx.new_empty(hx.shape), hx.new_empty(hx.shape[0], 5 * hx.shape[1])


def _gru_cell_backward(grad_hy: torch.Tensor, workspace: torch.Tensor, has_bias: bool) -> tuple[torch.Tensor | None, ...]:
    gates = [grad_hy.new_empty(grad_hy.shape[0], 3 * grad_hy.shape[1]) for _ in range(2)]
    biases = [grad_hy.new_empty(3 * grad_hy.shape[1]) if has_bias else None for _ in range(2)]
    return *gates, grad_hy.new_empty(grad_hy.shape), *biases


def _histc(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Fake result of histc, for integers too, as on GPUs: transformers counts the tokens of experts so on all devices but the CPU."""
    is_integer = not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
    return torch.ops.aten.histc.default(x.double() if is_integer else x, *args, **kwargs).to(x.dtype)


def _grouped_mm(x: torch.Tensor, y: torch.Tensor, *args: Any, out_dtype: torch.dtype | None = None, **kwargs: Any) -> torch.Tensor:
    """Fake result of _grouped_mm for every dtype that torch's CPU kernel takes, while torch's own fake kernel takes bfloat16 only.

    The length of a row in memory is a multiple of 16 bytes.

    Source: ATen native/GroupedMMUtils.h, create_grouped_gemm_output_tensor
    """
    if x.dtype != y.dtype or x.dtype not in (torch.float32, torch.float16, torch.bfloat16) or out_dtype not in (None, x.dtype):
        return torch.ops.aten._grouped_mm.default(x, y, *args, out_dtype=out_dtype, **kwargs)
    *outer, columns = torch.ops.aten._grouped_mm.default(x.bfloat16(), y.bfloat16(), *args, **kwargs).shape
    row = -(-columns * x.itemsize // 16) * 16 // x.itemsize
    strides = [row * math.prod(outer[place + 1 :]) for place in range(len(outer))]
    return x.new_empty_strided((*outer, columns), (*strides, 1))


def _attention_backward(*args: Any, **kwargs: Any) -> tuple[torch.Tensor | None, ...]:
    """Fake results of the gradient of attention. Torch's own have a gradient of the mask even if the op is not asked for it."""
    *grads, grad_bias = torch.ops.aten._scaled_dot_product_fused_attention_overrideable_backward.default(*args, **kwargs)
    grad_input_mask = args[5]
    return *grads, grad_bias if grad_input_mask[3] else None


# Fake kernels of ops for which torch has none on the CPU, or none for some calls. Source: ATen native/cuda/RNN.cu
_FAKES: dict[OpOverload, Callable[..., Any]] = {
    torch.ops.aten._thnn_fused_lstm_cell.default: _lstm_cell,
    torch.ops.aten._thnn_fused_gru_cell.default: _gru_cell,
    torch.ops.aten._thnn_fused_gru_cell_backward.default: _gru_cell_backward,
    torch.ops.aten.histc.default: _histc,
    torch.ops.aten._grouped_mm.default: _grouped_mm,
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable_backward.default: _attention_backward,
}


def _predict(mode: FakeTensorMode, op: OpOverload, args: Any, kwargs: Any) -> Any:
    """Returns an op's results for fake tensors. Raises: NotLowered if torch cannot compute them."""
    try:
        with _untold(), _disable_current_modes(), torch.no_grad(), mode:
            return _FAKES.get(op, op)(*args, **kwargs)
    except Exception as error:  # if the call is wrong, torch's own kernel raises the right error
        raise NotLowered(f"the shape of its result is known only after it has run ({type(error).__name__})") from error


@contextlib.contextmanager
def _untold() -> Iterator[None]:
    """Suppresses the error logs of torch's fake kernels in this thread, since torch's own kernel raises these errors."""
    thread = threading.get_ident()
    logger = logging.getLogger(FakeTensorMode.__module__)

    def of_others(record: logging.LogRecord) -> bool:
        return record.thread != thread

    logger.addFilter(of_others)
    try:
        yield
    finally:
        logger.removeFilter(of_others)


def _check_numbers(problem: OpSpecialization, mode: FakeTensorMode) -> None:
    """Raises NotLowered if torch's kernel rejects the numbers that are going to be compiled in."""
    assert problem.form.functional is not None
    args, kwargs = problem.args, problem.functional_kwargs
    operands = [operand for operand in _operands((args, kwargs, list(problem.targets))) if isinstance(operand, TensorOperand)]
    leaves = torch.utils._pytree.tree_leaves((args, kwargs), is_leaf=lambda value: isinstance(value, TensorOperand))
    name = problem.form.functional._schema.name.removeprefix("aten::")
    if kernel_refusals.is_doubtful(name, leaves, {operand.place.dtype for operand in operands}):
        with _disable_current_modes(), mode:
            fake_args, fake_kwargs = _replace((args, kwargs), lambda operand: _fake(operand.place))
        if refusal := kernel_refusals.refusal_of_numbers(problem.form.functional, fake_args, fake_kwargs):
            raise NotLowered(f"torch's kernel refuses it: {refusal}")


class _NeverCalled(GraphModule):
    """A graph module without generated Python code, which costs time, and which is not valid Python for ATen's `random.from`."""

    def recompile(self) -> Any:
        return None


def trace(
    mode: FakeTensorMode, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], numbers: Sequence[Any] = (), platform: str = "cpu"
) -> tuple[GraphModule, list[Node | None], Any]:
    """Builds a graph of one op, which is decomposed if it has no lowering on the platform.

    The graph has a placeholder for each operand and each number, in their order.

    Args:
        mode: for fake tensors.
        args: the arguments, with `TensorOperand` and `NumberOperand` objects.
        kwargs: the keyword arguments.
        numbers: the values of the numbers that are inputs.

    Returns: the graph, the nodes of the op's results, and the fake results in the structure in which the op returns them.

    Raises: NotLowered if torch has no fake results for the op, or it cannot be decomposed.
    """
    graph = Graph()

    def placeholder(operand: TensorOperand | NumberOperand) -> Node:
        node = graph.placeholder(f"x{len(graph.nodes)}")
        if isinstance(operand, NumberOperand):
            node.meta["val"] = numbers[operand.position]
            return node
        with _disable_current_modes(), mode:
            node.meta["val"] = _fake(operand.place)
        return node

    given, named = _replace((args, kwargs), placeholder)
    node = graph.call_function(op, tuple(given), named)
    fake_args, fake_kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda known: known.meta["val"])
    fake = node.meta["val"] = _predict(mode, op, fake_args, fake_kwargs)
    if registry.find(op, platform) is None:
        table = {**get_decompositions([op]), **decompositions(platform)}
        if op in table:
            return *_taken_apart(node, table), fake
    results: list[Node | None] = [node]
    if isinstance(fake, (list, tuple)):
        results = [None] * len(fake)
        for index, value in enumerate(fake):
            if isinstance(value, torch.Tensor):
                results[index] = item = graph.call_function(operator.getitem, (node, index))
                item.meta["val"] = value
    graph.output(tuple(results))
    return _NeverCalled({}, graph), results, fake


def _taken_apart(node: Node, table: Mapping[Any, Any]) -> tuple[GraphModule, list[Node | None]]:
    """Decomposes an op's node by a table of decompositions. Returns the graph, and the nodes of the op's results in it.

    Raises: NotLowered if the op takes Python numbers as inputs, or cannot be traced.
    """
    op: Any = node.target
    placeholders = node.graph.find_nodes(op="placeholder")
    operands = [placeholder.meta["val"] for placeholder in placeholders]
    if not all(isinstance(operand, torch.Tensor) for operand in operands):
        raise NotLowered("its decomposition depends on its numbers")

    def run(*tensors: torch.Tensor) -> list[Any]:
        given = dict(zip(placeholders, tensors, strict=True))
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), given.__getitem__)
        found = op(*args, **kwargs)
        return list(found) if isinstance(found, (list, tuple)) else [found]

    def trace() -> GraphModule:
        with torch.no_grad():
            return make_fx(torch.func.functionalize(run, remove="mutations"), table, _allow_non_fake_inputs=True)(*operands)

    try:
        # Inside a dispatch mode of the user, torch's dispatcher skips functionalization in this thread, but not in another one.
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            module = thread.submit(trace).result()
    except Exception as error:  # if the call is wrong, torch's own kernel raises the right error
        raise NotLowered(f"it cannot be decomposed ({type(error).__name__})") from error
    results = module.graph.output_node().args[0]
    if not all(result is None or isinstance(result, Node) for result in results):
        raise NotLowered("it returns a number")
    return module, list(results)


@dataclass(frozen=True)
class OpSpecialization:
    """An op to compile.

    Attributes:
        form: the op and its functional counterpart.
        args: the op's arguments, with an `TensorOperand` for each tensor.
        kwargs: its keyword arguments, in the same way.
        targets: the tensors to write the results to; empty if the results are new tensors.
        slots: the storages.
        device: where the op runs.
        numbers: the values of the numbers that are inputs.
        where: the mesh on which all arrays of the storages lie, or None.
    """

    form: FunctionalOp
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    targets: tuple[TensorOperand, ...]
    slots: tuple[StorageMetadata, ...]
    device: jax.Device
    numbers: tuple[Any, ...] = ()
    where: NamedSharding | None = None

    def closed(self) -> OpSpecialization:
        """Returns the same problem with all numbers compiled in."""
        args, kwargs = _closed((self.args, dict(self.kwargs)), self.numbers)
        return replace(self, args=args, kwargs=kwargs, numbers=())

    @property
    def functional_kwargs(self) -> dict[str, Any]:
        """The keyword arguments of the functional op."""
        named = {name: value for name, value in self.kwargs.items() if name not in self.form.dropped}
        if self.form.gives_dtype:
            named["dtype"] = self.targets[0].place.dtype
        return named


def _closed(value: Any, numbers: Sequence[Any]) -> Any:
    if isinstance(value, NumberOperand):
        return numbers[value.position]
    if type(value) is tuple:
        return tuple([_closed(item, numbers) for item in value])
    return {name: _closed(item, numbers) for name, item in value.items()} if isinstance(value, dict) else value


def build(problem: OpSpecialization) -> OneOp | Resized:
    """Compiles an op. Raises: the errors of `traced_op`; CompilationError; OutOfMemory."""
    found = traced_op(problem)
    if isinstance(found, Resized):
        return found
    with metrics.timed("compile"):
        settings = Settings.current(_platform(problem.device))
        call = _compiled(found.traced, problem.form.op._schema.name, problem.device, settings, problem.where is not None)
    return OneOp(call, found.given, found.draws, found.written, found.made, found.is_list, found.checks, found.numbers)


def traced_op(problem: OpSpecialization) -> Traced | Resized:
    """Traces an op as a program, without compiling it.

    Raises: NotLowered; RuntimeError for a target whose elements overlap; the errors of the lowering. With numbers as inputs, any
    exception, if one of them has to be compiled in.
    """
    form, args, targets = problem.form, problem.args, problem.targets
    assert form.functional is not None
    kwargs = problem.functional_kwargs
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    if not problem.numbers:
        _check_numbers(problem, mode)
    platform = _platform(problem.device)
    module, nodes, fake = trace(mode, form.functional, args, kwargs, problem.numbers, platform)
    is_list = isinstance(fake, (list, tuple))
    values = list(fake) if is_list else [fake]
    if not all(value is None or isinstance(value, torch.Tensor) or (is_list and type(value) is int) for value in values):
        raise NotLowered("it returns a number")
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if any((value.is_conj() or value.is_neg() or value.layout != torch.strided) for value in tensors):
        raise NotLowered("it returns a conjugate, negative or non-strided tensor")
    _check_operands_memory(form.name, _operands((args, kwargs)), targets)
    if form.dropped:
        fitting = tuple(_made(value) for value in tensors)
        if form.name in _COPIED:
            fitting = tuple(NewTensor(item.shape, row_major(item.shape), item.dtype) for item in fitting)
        if any(item.shape != target.place.shape for item, target in zip(fitting, targets, strict=True)):
            return Resized(fitting)
    if form.written:
        _check_dtypes(form, values, targets)
    if not form.written or torch.Tag.pointwise in form.functional.tags:
        _check_overlap(_operands((args, kwargs)), targets)
    for target in targets:
        strided_memory.refuse_shared_elements(target.place)
    if form.written:  # an op that writes may reject arguments that the functional op accepts, e.g. a result of another dtype
        with _disable_current_modes(), mode:
            own_args, own_kwargs = _replace(_closed((args, dict(problem.kwargs)), problem.numbers), lambda operand: _fake(operand.place))
        _predict(mode, form.op, own_args, own_kwargs)
    made = tuple(_made(value) if isinstance(value, torch.Tensor) else value for value in values)
    return _trace(problem, module, nodes, () if targets else made, is_list)


# Ops whose `out` argument ATen resizes to row-major strides, whatever strides the functional op returns, since ATen computes the result
# first and copies it. Source: ATen/native/BatchLinearAlgebra.cpp, cholesky_out
_COPIED = frozenset(["cholesky"])
# Ops whose `out` argument must have exactly the dtype of the result.
# Source: ATen/native/TensorFactories.cpp, complex_check_dtype; ReduceOps.cpp, aminmax
_OF_ONE_DTYPE = frozenset(["complex", "polar", "aminmax"])


def _check_dtypes(form: FunctionalOp, values: Sequence[torch.Tensor | None], targets: Sequence[TensorOperand]) -> None:
    for value, target in zip(values, targets, strict=False):
        if value is not None and form.name in _OF_ONE_DTYPE and value.dtype != target.place.dtype:
            raise RuntimeError(f"Expected out tensor to have dtype {value.dtype}, but got {target.place.dtype} instead")
        if value is not None and not torch.can_cast(value.dtype, target.place.dtype):
            names = [torch.empty(0, dtype=dtype).type()[len("torch.") : -len("Tensor")] for dtype in (value.dtype, target.place.dtype)]
            raise RuntimeError("result type {} can't be cast to the desired output type {}".format(*names))


def _check_overlap(operands: Sequence[TensorOperand | NumberOperand], targets: Sequence[TensorOperand]) -> None:
    """Raises RuntimeError for a target that overlaps partly with an operand, as ATen's copies and elementwise ops do.

    Source: ATen/MemoryOverlap.cpp, get_overlap_status
    """
    for target in targets:
        for operand in operands:
            if (
                isinstance(operand, TensorOperand)
                and operand.slot == target.slot
                and strided_memory.overlaps_partly(operand.place, target.place)
            ):
                raise RuntimeError(
                    "unsupported operation: some elements of the input tensor and the written-to tensor refer to a single memory location. "
                    "Please clone() the tensor before performing the operation."
                )


# Ops whose `out` argument must not share memory with an operand, in ATen.
_APART = frozenset(["take", "index_select", "gather", "index", "cat"])


def _check_operands_memory(name: str, operands: Sequence[TensorOperand | NumberOperand], targets: Sequence[TensorOperand]) -> None:
    """Raises RuntimeError for a target that shares memory with an operand or within itself. ATen checks this before it resizes targets.

    Source: ATen/MemoryOverlap.cpp, assert_no_overlap and assert_no_internal_overlap
    """
    for target in targets if name in _APART else ():
        strided_memory.refuse_shared_elements(target.place)
        for operand in operands:
            if isinstance(operand, TensorOperand) and operand.slot == target.slot and strided_memory.overlaps(operand.place, target.place):
                raise RuntimeError(
                    "unsupported operation: some elements of the input tensor and the written-to tensor refer to a single memory location. "
                    "Please clone() the tensor before performing the operation."
                )


def _trace(
    problem: OpSpecialization, module: GraphModule, nodes: Sequence[Node | None], made: tuple[NewTensor | int | None, ...], is_list: bool
) -> Traced:
    targets, slots, device = problem.targets, problem.slots, problem.device
    platform = _platform(device)
    try:
        interpreter = Interpreter(module, platform, kernels=False)
    except UnsupportedOp as error:
        raise NotLowered(error.message) from error
    settings = Settings.current(platform)
    watch = NumberTrace(problem.numbers)
    operands = _operands((problem.args, problem.functional_kwargs))
    open_numbers = {index: watch.number(item.position) for index, item in enumerate(operands) if isinstance(item, NumberOperand)}
    tensors = [item for item in operands if isinstance(item, TensorOperand)]
    # On the CPU, implementations call torch's kernels and oneDNN, which pays off in larger programs only. XLA cannot partition such calls.
    choose = choose_generic if platform == "cpu" or problem.where is not None else choose_without_refusable
    outputs = [node for node in nodes if node is not None]
    function = Function(interpreter, numbers=open_numbers, outputs=outputs, settings=settings, choose=choose)
    given = tuple(index for index, held in enumerate(slots) if held.shape is not None)
    views = {item.slot: item.place.dtype for item in reversed([*tensors, *targets])}  # by storage, the dtype of the first tensor on it
    written = tuple(dict.fromkeys(operand.slot for operand in targets))
    checks: list[tuple[type[Exception], str]] = []

    def program(*arrays: jax.Array) -> list[jax.Array]:
        watch.begin(arrays[count:])
        held = dict(zip(given, arrays, strict=False))
        for index, slot in enumerate(slots):
            if index not in held:
                zeros = strided_memory.unwritten(slot.nbytes, views.get(index, torch.uint8))
                held[index] = jax.numpy.zeros(zeros.shape, zeros.dtype)
        key = jax.random.wrap_key_data(arrays[count - 1], impl="threefry2x32") if interpreter.draws_random else None
        results = function([strided_memory.read(held[operand.slot], operand.place) for operand in tensors], key)
        found = iter(results.outputs)
        outputs = [None if node is None else next(found) for node in nodes]
        for operand, value in zip(targets, outputs, strict=False):
            value = _fitting(value, operand.place)
            slot = slots[operand.slot]
            held[operand.slot] = strided_memory.write(held[operand.slot], operand.place, value)
            if slot.sharding is not None and slot.shape is not None:  # the sharding is for an array of this shape
                held[operand.slot] = strided_memory.alike(held[operand.slot], slot.shape, slot.dtype)
        new = [_spread(value, item) for value, item in zip(outputs, made, strict=True) if isinstance(item, NewTensor)] if made else []
        checks[:] = [(check.error, check.message) for check in results.checks]
        code = [Check.first_failed(results.checks)] if results.checks else []
        return [*(held[slot] for slot in written), *new, *code]

    program.__name__ = problem.form.op._schema.name.replace("::", "_")
    sharding = meshes.as_sharding(problem.where or device)
    avals = [jax.ShapeDtypeStruct(slots[index].shape, slots[index].dtype, sharding=slots[index].sharding or sharding) for index in given]
    if interpreter.draws_random:
        avals.append(jax.ShapeDtypeStruct((2,), np.uint32, sharding=sharding))
    count = len(avals)
    if problem.numbers:
        with _tracing(device):
            jax.eval_shape(program, *avals)  # fills `watch.scalar_inputs` with the dtypes of the number inputs
        avals += [jax.ShapeDtypeStruct((), wanted.dtype, sharding=sharding) for wanted in watch.scalar_inputs]
    with metrics.timed("trace"):
        if problem.where is None:
            traced = _traced(program, avals, device)
        else:
            free = range(len(written), len(written) + sum(isinstance(item, NewTensor) for item in made))
            traced = _traced(pipeline.PARTITIONABLE(program, free), avals, device, [slots[slot].sharding for slot in written])
    if watch.was_inspected or len(watch.scalar_inputs) != len(avals) - count:
        raise watch.inspected()
    variant = GuardedInputs(tuple(dict.fromkeys(watch.guards)), tuple(watch.scalar_inputs))
    return Traced(traced, given, interpreter.draws_random, written, made, is_list, tuple(checks), variant)


@contextlib.contextmanager
def _tracing(device: jax.Device) -> Iterator[None]:
    with programs.below_caller(), jax.enable_x64(True), jax.default_device(device):
        yield


def compiled(
    program: Any, avals: Sequence[jax.ShapeDtypeStruct], device: jax.Device, settings: Settings, shardings: Sequence[Sharding | None] = ()
) -> Any:
    """Compiles a program and returns its call, which takes and returns lists of arrays.

    Args:
        avals: the shapes, dtypes and shardings of the inputs.
        shardings: of the first results; None where XLA chooses.

    Raises: NotLowered for an UnsupportedOp; CompilationError; OutOfMemory.
    """
    with metrics.timed("compile"):
        on_mesh = any(len(aval.sharding.device_set) > 1 for aval in avals)
        return _compiled(_traced(program, avals, device, shardings), program.__name__, device, settings, on_mesh)


def _traced(
    program: Any, avals: Sequence[jax.ShapeDtypeStruct], device: jax.Device, shardings: Sequence[Sharding | None] = ()
) -> jax.stages.Traced:
    """Traces a program. `shardings` are those of the first results; None where XLA chooses."""
    with _tracing(device):
        try:
            traced = jax.jit(program, keep_unused=True).trace(*avals)
        except UnsupportedOp as error:
            raise NotLowered(error.message) from error
        return pipeline.SHARDED(traced, program.__name__, avals, shardings) if any(shardings) else traced


def _compiled(traced: jax.stages.Traced, name: str, device: jax.Device, settings: Settings, on_mesh: bool) -> Any:
    platform = _platform(device)
    options = options_for(platform, traced.jaxpr, settings, on_mesh)
    with _tracing(device):
        try:
            compiled = programs.compile_lowered(traced.lower(), device, options, None, False)
            return UnboundProgram(name, compiled) if on_mesh else compiled.call
        except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
            raise (execution_error if is_exhausted(error) else compilation_error)(name, error) from error


def _platform(device: jax.Device) -> str:
    return "cuda" if device.platform == "gpu" else device.platform


def _operands(values: Any) -> list[TensorOperand | NumberOperand]:
    """Returns the operands and numbers in nested arguments, in the order of `trace`'s placeholders."""
    if isinstance(values, (TensorOperand, NumberOperand)):
        return [values]
    if isinstance(values, (list, tuple)):
        return [operand for value in values for operand in _operands(value)]
    return [operand for value in values.values() for operand in _operands(value)] if isinstance(values, dict) else []


def _made(fake: torch.Tensor) -> NewTensor:
    return NewTensor(tuple(fake.shape), tuple(fake.stride()), fake.dtype)


def _fitting(value: jax.Array, place: StridedView) -> jax.Array:
    """Returns a result as an op writes it: cast to the target's dtype and expanded to its shape."""
    return expand(convert(value, dtypes.to_jax(place.dtype)), place.shape)


def _spread(value: jax.Array, item: NewTensor) -> jax.Array:
    """Returns a result as the array of a new tensor's storage."""
    layout = Layout.of(item.shape, item.stride)
    if layout.dense:
        return layout.pack(value)
    extent = storage_extent(item.shape, item.stride)
    return strided_memory.write(jax.numpy.zeros(extent, value.dtype), StridedView(item.dtype, item.shape, item.stride), value)
