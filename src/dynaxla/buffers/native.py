"""Buffers in torch's own memory, on the CPU or on an NVIDIA GPU.

Programs read the tensors where they are in memory, and torch takes over the memory of the results.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
import torch
from jax import lax
from torch.fx import Graph, Node

from ..capture.graph import OpenLayouts, Phase, written_inputs
from ..lowering import Interpreter, SymbolValues, TensorSpec, dtypes
from ..lowering.graphs import is_tensor
from ..observe import metrics
from ..runtime import clients, late_checks, private, seeds, streams, transfer
from ..runtime.layout import Layout, row_major
from .addresses import exporter
from .arguments import Arguments, ExpectedInput
from .output_plan import Buffer, Empty, FromBuffer, FromInput, NonTensor, Output, Storages, only_saved, plan_outputs
from .protocol import Buffers, SegmentBuffers

Order = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class GraphDevice:
    """The device of a graph's tensors.

    Attributes:
        torch_device: Torch's device.
        jax_device: The same device in JAX.
    """

    torch_device: torch.device
    jax_device: jax.Device


class NativeBuffers(Buffers):
    """The implementation of `Buffers` for torch's own memory, on one device.

    Nothing is donated, because XLA would copy a donated buffer that torch owns.

    Args:
        interpreter: The graph's interpreter.
        symbols: The values of the graph's symbolic sizes.
        args: The inputs of a call for which the program is compiled.
        static: The positions of parameters and buffers of modules, whose addresses hardly ever change.
        phase: The pass that the graph computes; "inference" if the graph has no backward graph. A tensor that a forward program saves for a
            backward program may have other strides than in the graph.
        device: The device, for torch and for JAX.
        reorders: True if the program chooses the memory order of results that only the backward graph reads (see `Buffers.free_results`).
        waits_for_checks: See `AtenGraph`.
        open_inputs: The inputs whose memory orders XLA chooses, and the orders if XLA has chosen them for an earlier program.
        storages: The graph's storages; computed from the graph if None.
    """

    def __init__(
        self,
        interpreter: Interpreter,
        symbols: SymbolValues,
        args: Sequence[Any],
        static: frozenset[int],
        phase: Phase,
        device: GraphDevice,
        reorders: bool,
        waits_for_checks: bool = False,
        open_inputs: OpenLayouts | None = None,
        storages: Storages | None = None,
    ) -> None:
        placeholders = interpreter.placeholders
        self._output_nodes = cast("Sequence[Any]", interpreter.output_node.args[0])
        self._device, self._phase, self._static = device, phase, static
        storages = storages or Storages(interpreter.module.graph)
        self._outputs, self._buffers = plan_outputs(placeholders, self._output_nodes, storages, symbols)
        aliased = {output.position for output in self._outputs if isinstance(output, FromInput)}
        self.specs: dict[int, TensorSpec] = {
            position: symbols.spec(node.meta["val"]) for position, node in enumerate(placeholders) if is_tensor(node)
        }
        if phase == "backward":
            for position in self.specs.keys() - aliased:
                if isinstance(args[position], torch.Tensor):  # autograd passes None as the gradient of an output that the loss does not use
                    self.specs[position] = _with_strides_of(args[position], self.specs[position])
        multidimensional = {position for position, spec in self.specs.items() if len(spec.shape) > 1}
        open_positions = sorted(open_inputs.positions & multidimensional - aliased) if open_inputs is not None else []
        for position in open_positions:
            spec = self.specs[position]
            order = open_inputs.orders.get(position) if open_inputs is not None and open_inputs.orders is not None else None
            self.specs[position] = dataclasses.replace(spec, stride=_dense_layout(spec, order).strides)
        # A result that only the backward graph reads may keep the memory order in which the program has computed it.
        self.free_results = only_saved(self._outputs, self._buffers, interpreter.output_node) if phase == "forward" and reorders else []
        self.nodes: Sequence[Node] = [buffer.node for buffer in self._buffers]
        self._on_gpu = device.torch_device.type == "cuda"
        # `_protected`: by a buffer's index, the position of the input to which the caller will copy the buffer (see `protect_inputs`).
        self._protected, has_unprotected = self._written(interpreter.module.graph) if self._on_gpu else ({}, False)
        self._waits_for_checks = waits_for_checks or has_unprotected
        # The positions of the program's arguments. Inputs without elements are created inside the program. An input that the program does
        # not read, but in whose memory an output lies, is not an argument.
        read = interpreter.needed(self.nodes) | {placeholders[position] for position in self._protected.values()}
        self._arguments = [position for position, spec in self.specs.items() if 0 not in spec.shape and placeholders[position] in read]
        self._positions = self._arguments + sorted(aliased - set(self._arguments))
        self._draws_random = interpreter.draws_random
        # Every GPU program has a seed as its first argument, even if it draws no random numbers. The seed is imported after the other
        # arguments at each call, with a stream that waits for torch's work (runtime/streams.py).
        self._has_seed = self._draws_random or self._on_gpu
        first = 1 if self._has_seed else 0
        is_open = open_inputs is not None and open_inputs.orders is None
        self.open_inputs = {
            self._arguments.index(position) + first: position for position in open_positions if is_open and position in self._arguments
        }
        self._taken_unpacked: frozenset[int] = frozenset()  # the positions of the inputs whose memory orders XLA has chosen
        self.numbers: Sequence[Node] = [
            output.node for output in self._outputs if isinstance(output, NonTensor) and output.node is not None
        ]

    @property
    def facts(self) -> tuple[Any, ...]:
        return tuple(self.specs.items()), tuple(buffer.spec.stride for buffer in self._buffers)

    def avals(self) -> list[jax.ShapeDtypeStruct]:
        seed = [jax.ShapeDtypeStruct((2,), np.int32)] if self._has_seed else []
        return seed + [jax.ShapeDtypeStruct(item.layout.packed_shape, dtypes.to_jax(item.dtype)) for item in self._expected_arguments()]

    def unpack(self, arrays: Sequence[jax.Array]) -> tuple[list[jax.Array], jax.Array | None]:
        key = None
        if self._has_seed:
            seed, *arrays = arrays
        if self._draws_random:
            key = random_key(seed)
        unread = {position: spec for position, spec in self.specs.items() if position not in self._arguments}
        inputs = {position: lax.full(spec.shape, 0, spec.jax_dtype) for position, spec in unread.items()}
        for parameter, position, array in zip(self._expected_arguments(), self._arguments, arrays, strict=True):
            inputs[position] = parameter.layout.unpack(array)
        return [inputs[position] for position in self.specs], key

    def protect_inputs(
        self, outputs: Sequence[jax.Array], inputs: Sequence[jax.Array], code: jax.Array, all_held: int
    ) -> Sequence[jax.Array]:
        old = dict(zip(self.specs, inputs, strict=True))
        holds = lax.eq(code, np.int32(all_held))
        return [
            lax.select(holds, value, old[self._protected[index]]) if index in self._protected else value
            for index, value in enumerate(outputs)
        ]

    def pack(self, outputs: Sequence[jax.Array]) -> list[jax.Array]:
        packed = [
            value if index in self.free_results else buffer.pack(value)
            for index, (buffer, value) in enumerate(zip(self._buffers, outputs, strict=True))
        ]
        # A GPU program needs at least one result, because torch's stream waits for the program when a result is exported.
        return packed or ([lax.full((), 0, np.int32)] if self._on_gpu else [])

    def results(self, values: Sequence[Any], no_alias_of: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        used_storages = {private.storage_id(tensor) for tensor in no_alias_of}
        results = []
        for buffer, value in zip(self._buffers, values, strict=True):
            spec = buffer.spec
            if (value.shape, value.dtype) != (spec.shape, spec.dtype):
                given = dtypes.describe(value.dtype, tuple(value.shape))
                raise RuntimeError(f"{buffer.node.target} returned {given}, but its fake (meta) implementation declared {spec}")
            result = buffer.pack_tensor(value)
            storage = private.storage_id(result)
            if storage in used_storages or result.untyped_storage().nbytes() != result.numel() * result.element_size():
                result = result.clone()
                storage = private.storage_id(result)
            used_storages.add(storage)
            # To autograd, a program's result is not a view. So this result, which torch has computed, must not be a view either.
            results.append(transfer.reinterpret(result, result.shape, result.stride()) if private.base_of(result) is not None else result)
        return results

    def _written(self, graph: Graph) -> tuple[dict[int, int], bool]:
        """Finds the outputs that AOTAutograd copies to inputs after the call.

        Returns:
            protected: The position of an input, by the index of the buffer that is exactly the input's new value.
            has_unprotected: True if other outputs are copied to inputs, too. `protect_inputs` cannot protect these inputs, because no
                buffer of the input's shape and dtype is for one input alone and has its new value.
        """
        protected: dict[int, int] = {}
        has_unprotected = False
        for index, position in written_inputs(graph).items():
            output, node = self._outputs[index], self._output_nodes[index]
            if isinstance(output, FromBuffer) and self._buffers[output.buffer].node is node:
                new, old = self._buffers[output.buffer].spec, self.specs[position]
                if (new.shape, new.dtype) == (old.shape, old.dtype) and protected.setdefault(output.buffer, position) == position:
                    continue
            is_unchanged = isinstance(output, FromInput) and output.is_input and output.position == position
            has_unprotected |= not is_unchanged and not isinstance(output, Empty)
        return protected, has_unprotected

    def with_result_orders(self, orders: Mapping[int, Order]) -> NativeBuffers:
        copy = object.__new__(NativeBuffers)
        copy.__dict__.update(self.__dict__, _buffers=list(self._buffers), _outputs=list(self._outputs), orders=dict(orders))
        for index in self.free_results:
            copy._set_layout(index, _dense_layout(self._buffers[index].spec, orders.get(index)))
        return copy

    def on(self, device: jax.Device) -> NativeBuffers:
        """Returns the same buffers for a program on another JAX device with the same memory, such as the CPU of another PJRT client."""
        copy = object.__new__(NativeBuffers)
        copy.__dict__.update(self.__dict__, _device=dataclasses.replace(self._device, jax_device=device))
        return copy

    def with_input_orders(self, orders: Mapping[int, Order]) -> NativeBuffers:
        copy = object.__new__(NativeBuffers)
        copy.__dict__.update(self.__dict__, specs=dict(self.specs), _taken_unpacked=frozenset(self.open_inputs.values()))
        for index, position in self.open_inputs.items():
            spec = self.specs[position]
            copy.specs[position] = dataclasses.replace(spec, stride=_dense_layout(spec, orders.get(index)).strides)
        return copy

    def for_segments(self) -> SegmentBuffers | None:
        if self._on_gpu or any(buffer.scattered or buffer.is_conj or buffer.is_neg for buffer in self._buffers):
            return None
        arguments = {position: parameter.layout for position, parameter in zip(self._arguments, self._expected_arguments(), strict=True)}
        return SegmentBuffers(
            self.with_result_orders({index: self._buffers[index].layout.permutation for index in self.free_results}), arguments
        )

    def _set_layout(self, index: int, layout: Layout) -> None:
        """Changes the layout of a buffer, and the strides of the outputs in the buffer."""
        spec = dataclasses.replace(self._buffers[index].spec, stride=layout.strides)
        self._buffers[index] = dataclasses.replace(self._buffers[index], spec=spec, layout=layout)
        self._outputs = [
            dataclasses.replace(output, stride=layout.strides) if isinstance(output, FromBuffer) and output.buffer == index else output
            for output in self._outputs
        ]

    def bind(self, numbers: Sequence[Any]) -> NativeBinding:
        arguments = Arguments(self._expected_arguments(), self._device.torch_device, self._device.jax_device)
        return NativeBinding(arguments, self._positions, self._assembler(numbers), self._device, self._draws_random, self._waits_for_checks)

    def _expected_arguments(self) -> list[ExpectedInput]:
        """Returns the program's arguments, without the seed."""
        result = []
        for position in self._arguments:
            spec = self.specs[position]
            layout = Layout.of(spec.shape, spec.stride)
            result.append(
                ExpectedInput(spec.shape, spec.stride, spec.dtype, layout, position in self._static, position in self._taken_unpacked)
            )
        return result

    def _assembler(self, numbers: Sequence[Any]) -> Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], list[Any]]:
        """See the function `assembler`."""
        values = dict(zip(self.numbers, numbers, strict=True))
        return assembler(
            self._outputs, self._output_nodes, self._buffers, self.specs, self._positions, self._device.torch_device, self._phase, values
        )


def assembler(
    outputs: Sequence[Output],
    nodes: Sequence[Any],
    buffers: Sequence[Buffer],
    specs: dict[int, TensorSpec],
    positions: Sequence[int],
    device: torch.device,
    phase: Phase,
    numbers: dict[Node, Any],
) -> Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], list[Any]]:
    """Returns a function of the program's results (as packed tensors) and of input tensors that assembles the graph's outputs.

    Args:
        outputs: The plan of the graph's outputs.
        nodes: The graph's outputs: a node or a constant for each of `outputs`.
        buffers: The program's results.
        specs: The specs of the inputs, by position.
        positions: The positions, among the graph's inputs, of the input tensors that the function gets.
        device: The graph's device.
        phase: The pass that the graph computes.
        numbers: The values of the nodes that the graph returns as numbers.
    """
    owners = _owners(outputs, nodes, buffers)
    buffer_views = [_SharedBuffer(buffer, owners.get(index)) for index, buffer in enumerate(buffers)]
    index_of = {position: index for index, position in enumerate(positions)}
    makers: list[Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], Any]] = []  # one for each distinct output
    maker_of_output: list[int] = []  # the index of each output's maker
    maker_by_key: dict[Any, int] = {}
    is_backward = phase == "backward"
    uses = Counter(output.buffer for node, output in dict(zip(nodes, outputs, strict=True)).items() if isinstance(output, FromBuffer))
    for node, output in zip(nodes, outputs, strict=True):
        if isinstance(node, Node):
            # A node that is returned twice gives the same tensor twice, unless an output is in an input's memory, and the other one is not,
            # or has another plan (device "jax").
            key = node, output if isinstance(output, FromInput) else None
            maker_of_output.append(maker_by_key.setdefault(key, len(makers)))
            if maker_of_output[-1] < len(makers):
                continue
        else:
            maker_of_output.append(len(makers))
        is_owner = isinstance(output, FromBuffer) and owners.get(output.buffer) is output
        shared_in = phase if isinstance(output, FromBuffer) and uses[output.buffer] > 1 and not is_backward else None
        makers.append(_maker(output, buffer_views, index_of, numbers, specs, device, is_owner, shared_in, is_backward))
    owner_views = [(index, view.owner_view) for index, view in enumerate(buffer_views) if view.owner_view is not None]

    def assemble(buffers: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> list[Any]:
        if owner_views:
            buffers = list(buffers)
            for index, (shape, stride, offset) in owner_views:
                buffers[index] = transfer.reinterpret(buffers[index], shape, stride, offset)
        return [make(buffers, tensors) for make in makers]

    if len(makers) == len(maker_of_output):
        return assemble

    def assemble_repeated(buffers: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> list[Any]:
        distinct = assemble(buffers, tensors)
        return [distinct[index] for index in maker_of_output]

    return assemble_repeated


class NativeBinding:
    """The implementation of `protocol.Binding` for torch's memory. It keeps the aliases of its last call's tensors (see `Arguments`).

    On a GPU, XLA's stream waits for torch's stream before a program runs, and torch's current stream waits for XLA's stream afterwards. The
    host waits only if `waits_for_checks` is true and the program has checks.

    Args:
        arguments: Imports the program's arguments.
        positions: The positions of a call's tensors among the graph's inputs: the program's arguments, then the inputs that
            the program does not read, but in whose memory an output lies.
        outputs: The function that assembles the graph's outputs (see `assembler`).
        device: The device, for torch and for JAX.
        draws_random: True if the program draws random numbers, so that each call needs a new seed.
        waits_for_checks: See `AtenGraph`.
    """

    donates_inputs = False

    def __init__(
        self,
        arguments: Arguments,
        positions: Sequence[int],
        outputs: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], list[Any]],
        device: GraphDevice,
        draws_random: bool,
        waits_for_checks: bool = False,
    ) -> None:
        self.arguments = arguments
        self.positions = list(positions)
        self.outputs = outputs
        self._device = device
        self._on_gpu = device.torch_device.type == "cuda"
        self._draws_random, self._waits_for_checks = draws_random, waits_for_checks
        self._exporters: list[Callable[[jax.Array], torch.Tensor]] | None = None
        self._count = len(arguments.parameters)
        self._takes_all = self.positions == list(range(len(self.positions)))
        if not draws_random and not self._on_gpu and len(self.positions) == self._count:
            self.arrays = arguments.arrays  # type: ignore[method-assign]  # one Python call less: the method would only forward

    def take(self, args: list[Any]) -> list[torch.Tensor]:
        takes_all = self._takes_all and len(args) == len(self.positions)
        tensors = args.copy() if takes_all else [args[position] for position in self.positions]
        args.clear()
        return tensors

    def arrays(self, tensors: Sequence[torch.Tensor]) -> Sequence[jax.Array]:
        if self._on_gpu:
            late_checks.raise_if_failed(self._device.torch_device)
        arrays = self.arguments.arrays(tensors if len(tensors) == self._count else tensors[: self._count])
        if not self._draws_random and not self._on_gpu:
            return arrays
        seed = seeds.seed(self._device.torch_device) if self._draws_random else _unused_seed(self._device.torch_device)
        # The seed is imported last, so that the program also waits for the copies that torch has made of other arguments.
        stream = self._streams.stream_for_import() if self._on_gpu else None
        return (transfer.import_tensor(seed, self._device.jax_device, stream), *arrays)

    def export(self, results: Sequence[jax.Array], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if self._on_gpu:
            stream = self._streams.stream_for_export()
            return [transfer.export_array(result, stream) for result in results]
        if self._exporters is None:
            self._exporters = self._make_exporters(results)
        if private.mode_count():  # the caller's dispatch modes must not see dynaxla's own ops
            return [transfer.export_array(result) for result in results]
        return [export(result) for export, result in zip(self._exporters, results, strict=True)]

    def _make_exporters(self, results: Sequence[jax.Array]) -> list[Callable[[jax.Array], torch.Tensor]]:
        """Returns, for each result, a function that converts it to a tensor.

        A program on JAX's own client may still be running, so its results are not copied (see `exporter`).
        """
        if not clients.is_own(self._device.jax_device):
            return [transfer.export_array for _ in results]
        return [exporter(transfer.export_array(result)) for result in results]

    def abandon(self, out_of_memory: bool, tensors: Sequence[torch.Tensor]) -> bool:
        if not self._on_gpu:
            return False
        self._streams.wait_until_idle()
        return out_of_memory and streams.give_back_memory(self._device.torch_device)

    def report(self, code: torch.Tensor, checks: late_checks.Checks, name: str) -> None:
        if self._on_gpu and not self._waits_for_checks:
            late_checks.of(self._device.torch_device).add(code, checks, name)
        elif (error := late_checks.failure(int(code), checks)) is not None:
            raise error

    @functools.cached_property
    def _streams(self) -> streams.Streams:
        return streams.of(self._device.torch_device, self._device.jax_device)


def random_key(seed: jax.Array) -> jax.Array:
    """Under jit: converts the seed, which is the program's first argument (int32[2]), to a JAX random key."""
    return jax.random.wrap_key_data(lax.bitcast_convert_type(seed, np.uint32), impl="threefry2x32")


@functools.cache
def _unused_seed(device: torch.device) -> torch.Tensor:
    """Returns the seed argument of a GPU program that draws no random numbers."""
    return torch.zeros(2, dtype=torch.int32, device=device)


def _dense_layout(spec: TensorSpec, order: Order | None) -> Layout:
    """Returns the dense layout of a tensor with its dimensions in this memory order; row-major if the order is None."""
    return Layout.ordered(spec.shape, order or tuple(range(len(spec.shape))))


def _with_strides_of(tensor: torch.Tensor, spec: TensorSpec) -> TensorSpec:
    """Returns the spec of a backward graph's input, with the strides of the tensor that the call passes.

    The strides differ if the forward program has chosen another memory order for a saved tensor. The spec is returned unchanged unless the
    tensor and the spec are both non-overlapping and dense.
    """
    layouts = Layout.of(spec.shape, spec.stride), Layout.of(spec.shape, tensor.stride())
    is_dense = all(layout.is_non_overlapping_and_dense for layout in layouts)
    return dataclasses.replace(spec, stride=tensor.stride()) if is_dense else spec


class _SharedBuffer:
    """How a buffer's tensor looks to the outputs in it: with the shape and strides of the owner (see `_owners`), or else as exported.

    Attributes:
        count: The number of the buffer's elements.
        owner_view: The owner's shape, strides and offset, if they differ from those of the exported result; else None.
    """

    def __init__(self, buffer: Buffer, owner: FromBuffer | None) -> None:
        self.count = math.prod(buffer.shape)
        is_as_exported = owner is None or _is_as_exported(owner, buffer)
        self.owner_view = None if owner is None or is_as_exported else (owner.shape, owner.stride, owner.offset)


def _owners(outputs: Sequence[Output], nodes: Sequence[Any], buffers: Sequence[Buffer]) -> dict[int, FromBuffer]:
    """Returns the owner of each buffer, by the buffer's index. A buffer may have no owner.

    The *owner* is the output that autograd does not see as a view. The other outputs in the buffer are views of the owner. The owner is the
    first output of the node whose value the buffer holds. If there is none, it is the first output that has the dtype of the buffer, and
    the shape and strides of the exported result. Outputs with a conjugate or negative bit are never owners.
    """
    owners: dict[int, FromBuffer] = {}
    pairs = [(node, output) for node, output in zip(nodes, outputs, strict=True) if isinstance(output, FromBuffer)]
    without_bits = [(node, output, buffers[output.buffer]) for node, output in pairs if not output.is_conj and not output.is_neg]
    first = [output for node, output, buffer in without_bits if node is buffer.node]
    whole = [output for _, output, buffer in without_bits if output.dtype == buffer.spec.dtype and _is_as_exported(output, buffer)]
    for output in (*first, *whole):
        owners.setdefault(output.buffer, output)
    return owners


def _with_spec_strides(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Returns the tensor itself if it has the strides of the spec, else a copy with these strides. (Gradients may have other strides.)"""
    if tensor.stride() == spec.stride or Layout.of(tuple(tensor.shape), tensor.stride()) == Layout.of(spec.shape, spec.stride):
        return tensor
    metrics.add("input_copies")
    return torch.empty_strided(spec.shape, spec.stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor.detach())


def _maker(
    output: Output,
    buffers: Sequence[_SharedBuffer],
    index_of: dict[int, int],
    numbers: dict[torch.fx.Node, Any],
    specs: dict[int, TensorSpec],
    device: torch.device,
    is_owner: bool,
    shared_in: Phase | None,
    is_backward: bool,
) -> Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], Any]:
    """Returns a function of the program's results (as packed tensors) and of the input tensors that creates one output.

    Args:
        output: The plan of the output.
        buffers: The program's results, as the outputs in them see them.
        index_of: By an input's position among the graph's inputs, its index among the input tensors.
        numbers: The values of the nodes that the graph returns as numbers.
        specs: The specs of the inputs, by position.
        device: The graph's device.
        is_owner, shared_in: See `_buffer_maker`.
        is_backward: True in a backward graph, whose inputs (gradients and saved tensors) may have other strides than in the graph.
    """
    if isinstance(output, NonTensor):
        value = output.value if output.node is None else numbers[output.node]
        return lambda _, __: value
    if isinstance(output, Empty):
        spec, is_conj, is_neg = output.spec, output.is_conj, output.is_neg
        return lambda _, __: _with_bits(torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device), is_conj, is_neg)
    if isinstance(output, FromInput):
        index = index_of[output.position]
        source = specs[output.position]
        is_detached = is_backward or output.detached
        if output.is_input and is_backward:
            return lambda _, tensors: _with_spec_strides(tensors[index], source)
        if output.is_input:
            return lambda _, tensors: tensors[index]
        shape, stride, offset = output.shape, output.stride, output.offset
        is_conj, is_neg, dtype = output.is_conj, output.is_neg, output.dtype

        def view(_: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
            base = _without_bits(_with_spec_strides(tensors[index], source))
            if base.dtype != dtype:
                return _with_bits(transfer.view_as(base, dtype, shape, stride, offset), is_conj, is_neg)
            if is_detached:
                return _with_bits(transfer.reinterpret(base, shape, stride, offset), is_conj, is_neg)
            # The output must be a view to autograd, too. Otherwise autograd would not see that a write to it is a write to the input.
            return _with_bits(base.as_strided(shape, stride, base.storage_offset() + offset), is_conj, is_neg)

        return view
    make = _buffer_maker(output, buffers[output.buffer], is_owner, shared_in)
    if output.device.type == device.type:
        return make
    return lambda results, tensors: make(results, tensors).to(output.device)


def _is_as_exported(output: FromBuffer, buffer: Buffer) -> bool:
    """True if an output has the shape and strides that the buffer has when it is exported."""
    is_packed = not buffer.scattered and buffer.layout.is_row_major
    # The strides of an exported result are row-major. The output's strides are eager mode's, and may differ in dimensions of size 1.
    exported = buffer.spec.shape, row_major(buffer.spec.shape)
    return is_packed and exported == (output.shape, output.stride) and output.offset == 0


def _buffer_maker(
    output: FromBuffer, view: _SharedBuffer, is_owner: bool, shared_in: Phase | None
) -> Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], torch.Tensor]:
    """Returns a function that creates an output in a buffer.

    Args:
        output: The plan of the output.
        view: The shape and strides of the buffer's owner.
        is_owner: True if the output is the buffer's owner (see `_owners`). Other outputs are further tensors on the same memory.
        shared_in: The graph's phase if several outputs are in the buffer, else None. In an inference graph, autograd must see a write to
            one output as a write to all of them. In a forward graph, each output has its own base, because AOTAutograd itself declares
            which outputs are views of one another. None in a backward graph.
    """
    index, shape, stride, offset, dtype = output.buffer, output.shape, output.stride, output.offset, output.dtype
    if is_owner:
        return lambda buffers, _: buffers[index]
    owner_offset = view.owner_view[2] if view.owner_view is not None else 0

    def make(buffers: Sequence[torch.Tensor], _: Sequence[torch.Tensor]) -> torch.Tensor:
        base = buffers[index]
        base = base.detach() if shared_in == "forward" else base
        is_view, base_offset = True, owner_offset
        if base.dtype != dtype:
            if view.owner_view is not None:
                base, base_offset = base.as_strided((view.count,), (1,), base.storage_offset() - owner_offset), 0
            base, is_view = _viewed_as(base, dtype)
        if shared_in is None:
            return _with_bits(transfer.reinterpret(base, shape, stride, offset - base_offset), output.is_conj, output.is_neg)
        tensor = base.as_strided(shape, stride, base.storage_offset() + offset - base_offset)
        return _with_bits(tensor if is_view else tensor.detach(), output.is_conj, output.is_neg)

    return make


def _viewed_as(base: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, bool]:
    """Reinterprets a contiguous tensor in another dtype, in a shape that may differ. Returns it, and True if autograd sees it as a view.

    Autograd sees a view between real and complex numbers. Between other dtypes, it must not see one: AOTAutograd regenerates an alias of a
    mutated input by replaying the alias's chain of views on the input. So the first tensor of the chain must have the input's dtype, or
    there must be no chain.
    """
    if base.is_complex() and dtype == base.dtype.to_real():
        return torch.view_as_real(base), True
    if dtype.is_complex and base.dtype == dtype.to_real():
        return torch.view_as_complex(base.view(-1, 2)), True
    return base.view(-1).view(dtype), False


def _with_bits(tensor: torch.Tensor, is_conj: bool, is_neg: bool) -> torch.Tensor:
    """Returns a view of the tensor with torch's conjugate and negative bits toggled where requested. The memory is unchanged."""
    tensor = torch._conj(tensor) if is_conj else tensor
    return torch._neg_view(tensor) if is_neg else tensor


def _without_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor as it is in memory, without conjugate and negative bits."""
    tensor = torch._conj(tensor) if tensor.is_conj() else tensor
    return torch._neg_view(tensor) if tensor.is_neg() else tensor
