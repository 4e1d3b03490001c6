"""Buffers in torch's own memory, on the CPU or on an NVIDIA GPU: programs read tensors in place, and torch takes over their results."""

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
from ..observe import metrics
from ..runtime import clients, late_checks, private, seeds, streams, transfer
from ..runtime.layout import Layout, row_major
from .addresses import exporter
from .arguments import Arguments, Parameter
from .output_plan import Buffer, Constant, Empty, FromBuffer, FromInput, Output, Storages, only_saved, plan_outputs
from .protocol import Buffers, Plain

Order = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class GraphDevice:
    """The device of a graph's tensors.

    Attributes:
        device: Torch's device.
        jax_device: The same device in JAX.
    """

    device: torch.device
    jax_device: jax.Device


class NativeBuffers(Buffers):
    """Buffers in torch's memory. No array is donated, because XLA would copy a donated buffer that torch owns, and there is no mesh.

    Args:
        interpreter: The graph.
        symbols: The values of its symbolic sizes.
        args: A call's inputs.
        static: The positions of parameters and buffers, whose addresses hardly ever change.
        phase: The graph's phase. A tensor that a forward program saves for a backward program may have other strides than in the graph.
        place: The device.
        reorders: True if results that only the backward graph reads may have any memory order.
        waits: See `AtenGraph`.
        loose: The inputs that may have any memory order; an input that has an order gets it here.
        storages: The graph's storages, if they are known.
    """

    def __init__(
        self,
        interpreter: Interpreter,
        symbols: SymbolValues,
        args: Sequence[Any],
        static: frozenset[int],
        phase: Phase,
        place: GraphDevice,
        reorders: bool,
        waits: bool = False,
        open_inputs: OpenLayouts | None = None,
        storages: Storages | None = None,
    ) -> None:
        placeholders = interpreter.placeholders
        self._output_nodes = cast("Sequence[Any]", interpreter.output_node.args[0])
        self._place, self._phase, self._static = place, phase, static
        storages = storages or Storages(interpreter.module.graph)
        self._outputs, self._buffers = plan_outputs(placeholders, self._output_nodes, storages, symbols)
        aliased = {output.position for output in self._outputs if isinstance(output, FromInput)}
        self.specs: dict[int, TensorSpec] = {
            position: symbols.spec(node.meta["val"]) for position, node in enumerate(placeholders) if _is_tensor(node.meta["val"])
        }
        if phase == "backward":
            for position in self.specs.keys() - aliased:
                if isinstance(args[position], torch.Tensor):  # autograd passes None as the gradient of an output that the loss does not use
                    self.specs[position] = _as_given(self.specs[position], args[position])
        several = {position for position, spec in self.specs.items() if len(spec.shape) > 1}
        choosable = sorted(open_inputs.positions & several - aliased) if open_inputs is not None else []
        for position in choosable:
            spec = self.specs[position]
            order = open_inputs.orders.get(position) if open_inputs is not None and open_inputs.orders is not None else None
            self.specs[position] = dataclasses.replace(spec, stride=_ordered(spec, order).strides)
        # Results that only the backward pass reads may keep the memory order in which they were computed.
        self.free = only_saved(self._outputs, self._buffers, interpreter.output_node) if phase == "forward" and reorders else []
        self.nodes: Sequence[Node] = [buffer.node for buffer in self._buffers]
        self._on_gpu = place.device.type == "cuda"
        self._guards, unguarded = self._written(interpreter.module.graph) if self._on_gpu else ({}, False)
        self._waits = waits or unguarded
        # Tensors without elements are created inside the program; those that only outputs alias are not passed to it.
        read = interpreter.needed(self.nodes) | {placeholders[position] for position in self._guards.values()}
        self._passed = [position for position, spec in self.specs.items() if 0 not in spec.shape and placeholders[position] in read]
        self._positions = self._passed + sorted(aliased - set(self._passed))
        self._draws_random = interpreter.draws_random
        # Every GPU program has this argument. It is imported last at each call, which orders the call after torch's work; see
        # runtime/streams.py.
        self._has_seed = self._draws_random or self._on_gpu
        first = 1 if self._has_seed else 0
        is_open = open_inputs is not None and open_inputs.orders is None
        self.open_inputs = {
            self._passed.index(position) + first: position for position in choosable if is_open and position in self._passed
        }
        self._laid_out: frozenset[int] = frozenset()
        self.numbers: Sequence[Node] = [output.node for output in self._outputs if isinstance(output, Constant) and output.node is not None]

    @property
    def facts(self) -> tuple[Any, ...]:
        """The properties on which a binding depends."""
        return tuple(self.specs.items()), tuple(buffer.spec.stride for buffer in self._buffers)

    def avals(self) -> list[jax.ShapeDtypeStruct]:
        seed = [jax.ShapeDtypeStruct((2,), np.int32)] if self._has_seed else []
        return seed + [jax.ShapeDtypeStruct(item.layout.packed_shape, dtypes.to_jax(item.dtype)) for item in self._parameters()]

    def unpack(self, arrays: Sequence[jax.Array]) -> tuple[list[jax.Array], jax.Array | None]:
        key = None
        if self._has_seed:
            seed, *arrays = arrays
        if self._draws_random:
            key = key_of(seed)
        unread = {position: spec for position, spec in self.specs.items() if position not in self._passed}
        inputs = {position: lax.full(spec.shape, 0, spec.jax_dtype) for position, spec in unread.items()}
        for parameter, position, array in zip(self._parameters(), self._passed, arrays, strict=True):
            inputs[position] = parameter.layout.unpack(array)
        return [inputs[position] for position in self.specs], key

    def guard(self, outputs: Sequence[jax.Array], inputs: Sequence[jax.Array], code: jax.Array, right: int) -> Sequence[jax.Array]:
        old = dict(zip(self.specs, inputs, strict=True))
        holds = lax.eq(code, np.int32(right))
        return [
            lax.select(holds, value, old[self._guards[index]]) if index in self._guards else value for index, value in enumerate(outputs)
        ]

    def pack(self, outputs: Sequence[jax.Array]) -> list[jax.Array]:
        packed = [
            value if index in self.free else buffer.pack(value)
            for index, (buffer, value) in enumerate(zip(self._buffers, outputs, strict=True))
        ]
        # A GPU program needs a result, through which torch's stream waits for the program.
        return packed or ([lax.full((), 0, np.int32)] if self._on_gpu else [])

    def results(self, values: Sequence[Any], others: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        used = {private.storage_id(tensor) for tensor in others}
        found = []
        for buffer, value in zip(self._buffers, values, strict=True):
            spec = buffer.spec
            if (value.shape, value.dtype) != (spec.shape, spec.dtype):
                given = dtypes.describe(value.dtype, tuple(value.shape))
                raise RuntimeError(f"{buffer.node.target} returned {given}, but its fake (meta) implementation promised {spec}")
            result = buffer.pack_tensor(value)
            memory = private.storage_id(result)
            if memory in used or result.untyped_storage().nbytes() != result.numel() * result.element_size():
                result = result.clone()
                memory = private.storage_id(result)
            used.add(memory)
            # A program's result is no view to autograd, so this must be none either.
            found.append(transfer.reinterpret(result, result.shape, result.stride()) if result._is_view() else result)
        return found

    def _written(self, graph: Graph) -> tuple[dict[int, int], bool]:
        """Finds the outputs that will be written to inputs.

        Returns the buffers with such values, by index, with the positions of the inputs; and True if there are other such outputs, which
        are not a buffer of the input's shape and dtype.
        """
        guards: dict[int, int] = {}
        unguarded = False
        for index, position in written_inputs(graph).items():
            output, node = self._outputs[index], self._output_nodes[index]
            if isinstance(output, FromBuffer) and self._buffers[output.buffer].node is node:
                new, old = self._buffers[output.buffer].spec, self.specs[position]
                if (new.shape, new.dtype) == (old.shape, old.dtype) and guards.setdefault(output.buffer, position) == position:
                    continue
            is_itself = isinstance(output, FromInput) and output.whole and output.position == position
            unguarded |= not is_itself and not isinstance(output, Empty)
        return guards, unguarded

    def ordered(self, orders: Mapping[int, Order]) -> NativeBuffers:
        found = object.__new__(NativeBuffers)
        found.__dict__.update(self.__dict__, _buffers=list(self._buffers), _outputs=list(self._outputs), orders=dict(orders))
        for index in self.free:
            found._order(index, _ordered(self._buffers[index].spec, orders.get(index)))
        return found

    def on(self, device: jax.Device) -> NativeBuffers:
        """Returns the same buffers for a program of another client on the same memory."""
        found = object.__new__(NativeBuffers)
        found.__dict__.update(self.__dict__, _place=dataclasses.replace(self._place, jax_device=device))
        return found

    def laid_out(self, orders: Mapping[int, Order]) -> NativeBuffers:
        found = object.__new__(NativeBuffers)
        found.__dict__.update(self.__dict__, specs=dict(self.specs), _laid_out=frozenset(self.open_inputs.values()))
        for index, position in self.open_inputs.items():
            spec = self.specs[position]
            found.specs[position] = dataclasses.replace(spec, stride=_ordered(spec, orders.get(index)).strides)
        return found

    def plain(self) -> Plain | None:
        if self._on_gpu or any(buffer.scattered or buffer.is_conj or buffer.is_neg for buffer in self._buffers):
            return None
        arguments = {position: parameter.layout for position, parameter in zip(self._passed, self._parameters(), strict=True)}
        return Plain(self.ordered({index: self._buffers[index].layout.permutation for index in self.free}), arguments)

    def _order(self, index: int, layout: Layout) -> None:
        """Gives a buffer, and the outputs that are in it, another layout."""
        spec = dataclasses.replace(self._buffers[index].spec, stride=layout.strides)
        self._buffers[index] = dataclasses.replace(self._buffers[index], spec=spec, layout=layout)
        self._outputs = [
            dataclasses.replace(output, stride=layout.strides) if isinstance(output, FromBuffer) and output.buffer == index else output
            for output in self._outputs
        ]

    def bind(self, numbers: Sequence[Any]) -> NativeBinding:
        arguments = Arguments(self._parameters(), self._place.device, self._place.jax_device)
        return NativeBinding(arguments, self._positions, self._assembler(numbers), self._place, self._draws_random, self._waits)

    def _parameters(self) -> list[Parameter]:
        result = []
        for position in self._passed:
            spec = self.specs[position]
            layout = Layout.of(spec.shape, spec.stride)
            result.append(Parameter(spec.shape, spec.stride, spec.dtype, layout, position in self._static, position in self._laid_out))
        return result

    def _assembler(self, numbers: Sequence[Any]) -> Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], list[Any]]:
        """Returns a function from the program's buffers and the inputs to the graph's outputs."""
        values = dict(zip(self.numbers, numbers, strict=True))
        return assembler(
            self._outputs, self._output_nodes, self._buffers, self.specs, self._positions, self._place.device, self._phase, values
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
    """Returns a function from a program's results, as packed tensors, and the graph's inputs to the graph's outputs.

    Args:
        outputs: The plan of the graph's outputs.
        nodes: The output nodes, one for each of `outputs`.
        buffers: The program's results.
        specs: The specs of the inputs, by position.
        positions: The positions of the inputs that the function gets.
        numbers: The values of nodes that are returned as numbers.
    """
    owners = _owners(outputs, nodes, buffers)
    buffer_specs = [_BufferView(buffer, owners.get(index)) for index, buffer in enumerate(buffers)]
    index_of = {position: index for index, position in enumerate(positions)}
    makers: list[Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], Any]] = []
    places: list[int] = []
    first_place: dict[Any, int] = {}
    may_differ = phase == "backward"
    uses = Counter(output.buffer for node, output in dict(zip(nodes, outputs, strict=True)).items() if isinstance(output, FromBuffer))
    for node, output in zip(nodes, outputs, strict=True):
        if isinstance(node, Node):
            key = (
                node,
                output if isinstance(output, FromInput) else None,
            )  # one value may both be written to an input and be returned as a tensor of its own
            places.append(first_place.setdefault(key, len(makers)))
            if places[-1] < len(makers):
                continue
        else:
            places.append(len(makers))
        is_itself = isinstance(output, FromBuffer) and owners.get(output.buffer) is output
        shared = phase if isinstance(output, FromBuffer) and uses[output.buffer] > 1 and not may_differ else None
        makers.append(_maker(output, buffer_specs, index_of, numbers, specs, device, is_itself, shared, may_differ))
    laid_out = [(index, view.laid_out) for index, view in enumerate(buffer_specs) if view.laid_out is not None]

    def assemble(buffers: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> list[Any]:
        if laid_out:
            buffers = list(buffers)
            for index, (shape, stride, offset) in laid_out:
                buffers[index] = transfer.reinterpret(buffers[index], shape, stride, offset)
        return [make(buffers, tensors) for make in makers]

    if len(makers) == len(places):
        return assemble

    def repeat(buffers: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> list[Any]:
        made = assemble(buffers, tensors)
        return [made[place] for place in places]

    return repeat


class NativeBinding:
    """See `protocol.Binding`. Owns the aliases of the tensors of its last call.

    On a GPU, XLA's stream waits for torch's before a program, and torch's current stream waits for XLA's after it; the host waits only if
    `waits` is set (see `AtenGraph`) and the program has checks.
    """

    donates_inputs = False

    def __init__(
        self,
        arguments: Arguments,
        positions: Sequence[int],
        outputs: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], list[Any]],
        place: GraphDevice,
        draws_random: bool,
        waits: bool = False,
    ) -> None:
        self.arguments = arguments
        self.positions = list(positions)
        self.outputs = outputs
        self._place = place
        self._on_gpu = place.device.type == "cuda"
        self._draws_random, self._waits = draws_random, waits
        self._exporters: list[Callable[[jax.Array], torch.Tensor]] | None = None
        self._count = len(arguments.parameters)
        self._takes_all = self.positions == list(range(len(self.positions)))
        if not draws_random and not self._on_gpu and len(self.positions) == self._count:
            self.arrays = arguments.arrays  # type: ignore[method-assign]  # nothing else is to be done at each call

    def take(self, args: list[Any]) -> list[torch.Tensor]:
        everything = self._takes_all and len(args) == len(self.positions)
        tensors = args.copy() if everything else [args[position] for position in self.positions]
        args.clear()
        return tensors

    def arrays(self, tensors: Sequence[torch.Tensor]) -> Sequence[jax.Array]:
        if self._on_gpu:
            late_checks.raise_if_failed(self._place.device)
        arrays = self.arguments.arrays(tensors if len(tensors) == self._count else tensors[: self._count])
        if not self._draws_random and not self._on_gpu:
            return arrays
        seed = seeds.seed(self._place.device) if self._draws_random else _no_seed(self._place.device)
        # The seed is imported last, so that it also waits for the copies that torch has made of other arguments.
        stream = self._streams.before() if self._on_gpu else None
        return (transfer.import_tensor(seed, self._place.jax_device, stream), *arrays)

    def export(self, results: Sequence[jax.Array], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if self._on_gpu:
            stream = self._streams.after()
            return [transfer.export_array(result, stream) for result in results]
        if self._exporters is None:
            self._exporters = self._make_exporters(results)
        if private.mode_count():  # the caller's dispatch modes must not see dynaxla's own ops
            return [transfer.export_array(result) for result in results]
        return [export(result) for export, result in zip(self._exporters, results, strict=True)]

    def _make_exporters(self, results: Sequence[jax.Array]) -> list[Callable[[jax.Array], torch.Tensor]]:
        """Returns a function for each result that converts it to a tensor.

        Results of JAX's own client may not be computed yet, so those functions do not copy.
        """
        if not clients.is_own(self._place.jax_device):
            return [transfer.export_array for _ in results]
        return [exporter(transfer.export_array(result)) for result in results]

    def abandon(self, for_memory: bool, tensors: Sequence[torch.Tensor]) -> bool:
        if not self._on_gpu:
            return False
        self._streams.settle()
        return for_memory and streams.give_back_memory(self._place.device)

    def report(self, code: torch.Tensor, checks: late_checks.Checks, name: str) -> None:
        if self._on_gpu and not self._waits:
            late_checks.of(self._place.device).add(code, checks, name)
        elif (error := late_checks.failure(int(code), checks)) is not None:
            raise error

    @functools.cached_property
    def _streams(self) -> streams.Streams:
        return streams.of(self._place.device, self._place.jax_device)


def key_of(seed: jax.Array) -> jax.Array:
    """In a program: returns the key that its first argument, the seed, represents. For programs that draw random numbers."""
    return jax.random.wrap_key_data(lax.bitcast_convert_type(seed, np.uint32), impl="threefry2x32")


@functools.cache
def _no_seed(device: torch.device) -> torch.Tensor:
    """Returns the first argument of a GPU program that draws no random numbers."""
    return torch.zeros(2, dtype=torch.int32, device=device)


def _ordered(spec: TensorSpec, order: Order | None) -> Layout:
    """Returns the dense layout of a tensor with its dimensions in this memory order, row-major by default."""
    return Layout.ordered(spec.shape, order or tuple(range(len(spec.shape))))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _as_given(spec: TensorSpec, tensor: torch.Tensor) -> TensorSpec:
    """Returns the spec of a backward graph's input with the strides that the tensor has: a tensor saved by the forward program may differ
    in them.
    """
    given = tensor.stride()
    both = Layout.of(spec.shape, spec.stride), Layout.of(spec.shape, given)
    return dataclasses.replace(spec, stride=given) if all(layout.is_whole for layout in both) else spec


class _BufferView:
    """The tensor that torch makes of a buffer: contiguous, packed, or with its owner's shape and strides.

    Attributes:
        count: The number of the buffer's elements.
        dtype: The buffer's dtype.
        laid_out: The owner's shape, stride and offset, if they differ from the buffer's; else None.
    """

    def __init__(self, buffer: Buffer, owner: FromBuffer | None) -> None:
        self.count = math.prod(buffer.shape)
        self.dtype = buffer.spec.dtype
        is_given = owner is None or _is_whole(owner, buffer)
        self.laid_out = None if owner is None or is_given else (owner.shape, owner.stride, owner.offset)


def _owners(outputs: Sequence[Output], nodes: Sequence[Any], buffers: Sequence[Buffer]) -> dict[int, FromBuffer]:
    """Returns, for each buffer by index, the output that is the buffer's own tensor.

    The other outputs in the buffer are views of that tensor, and autograd does not see that tensor as a view. It is the tensor that the
    graph created first, at whatever position among the outputs; if there is none, the first output that covers the whole buffer.
    """
    owners: dict[int, FromBuffer] = {}
    pairs = [(node, output) for node, output in zip(nodes, outputs, strict=True) if isinstance(output, FromBuffer)]
    plain = [(node, output, buffers[output.buffer]) for node, output in pairs if not output.is_conj and not output.is_neg]
    first = [output for node, output, buffer in plain if node is buffer.node]
    whole = [output for _, output, buffer in plain if output.dtype == buffer.spec.dtype and _is_whole(output, buffer)]
    for output in (*first, *whole):
        owners.setdefault(output.buffer, output)
    return owners


def _laid_out(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Returns the tensor, or, if its strides are not those of the trace (as for some gradients), a copy with the strides of the trace."""
    if tensor.stride() == spec.stride or Layout.of(tuple(tensor.shape), tensor.stride()) == Layout.of(spec.shape, spec.stride):
        return tensor
    metrics.add("input_copies")
    return torch.empty_strided(spec.shape, spec.stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor.detach())


def _maker(
    output: Output,
    buffers: Sequence[_BufferView],
    index_of: dict[int, int],
    numbers: dict[torch.fx.Node, Any],
    specs: dict[int, TensorSpec],
    device: torch.device,
    is_itself: bool,
    shared: Phase | None,
    may_differ: bool,
) -> Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], Any]:
    """Returns the function that creates one output.

    Args:
        is_itself, shared: See `_buffer_maker`.
        may_differ: True if inputs may have other strides than in the graph, as saved tensors may.
    """
    if isinstance(output, Constant):
        value = output.value if output.node is None else numbers[output.node]
        return lambda _, __: value
    if isinstance(output, Empty):
        spec, is_conj, is_neg = output.spec, output.is_conj, output.is_neg
        return lambda _, __: _flagged(torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device), is_conj, is_neg)
    if isinstance(output, FromInput):
        index = index_of[output.position]
        source = specs[output.position]
        is_apart = may_differ or output.apart
        if output.whole and may_differ:
            return lambda _, tensors: _laid_out(tensors[index], source)
        if output.whole:
            return lambda _, tensors: tensors[index]
        shape, stride, offset = output.shape, output.stride, output.offset
        is_conj, is_neg, dtype = output.is_conj, output.is_neg, output.dtype

        def view(_: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
            base = _unflagged(_laid_out(tensors[index], source))
            if base.dtype != dtype:
                return _flagged(transfer.view_as(base, dtype, shape, stride, offset), is_conj, is_neg)
            if is_apart:
                return _flagged(transfer.reinterpret(base, shape, stride, offset), is_conj, is_neg)
            # A view to autograd as well, which otherwise would not see that a write to one is a write to the other.
            return _flagged(base.as_strided(shape, stride, base.storage_offset() + offset), is_conj, is_neg)

        return view
    make = _buffer_maker(output, buffers[output.buffer], is_itself, shared)
    if output.device.type == device.type:
        return make
    return lambda results, tensors: make(results, tensors).to(output.device)


def _is_whole(output: FromBuffer, buffer: Buffer) -> bool:
    """True if an output has the shape and strides of the buffer as the program returns it."""
    is_packed = not buffer.scattered and buffer.layout.is_row_major
    # DLPack's strides are row-major; eager mode's may differ in dimensions of size 1.
    given = buffer.spec.shape, row_major(buffer.spec.shape)
    return is_packed and given == (output.shape, output.stride) and output.offset == 0


def _buffer_maker(
    output: FromBuffer, view: _BufferView, is_itself: bool, shared: Phase | None
) -> Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], torch.Tensor]:
    """Returns the function that creates an output in a buffer.

    Args:
        is_itself: True if the output is the buffer's own tensor (`_owners`); others are further tensors on the same memory.
        shared: The graph's phase if several outputs are in that memory, so that autograd must see a write to one as a write to all; else
            None. Autograd treats outputs of a forward graph as views of one another only where AOTAutograd declares them so.
    """
    index, shape, stride, offset, dtype = output.buffer, output.shape, output.stride, output.offset, output.dtype
    if is_itself:
        return lambda buffers, _: buffers[index]
    start = view.laid_out[2] if view.laid_out is not None else 0

    def make(buffers: Sequence[torch.Tensor], _: Sequence[torch.Tensor]) -> torch.Tensor:
        base = buffers[index]
        base = base.detach() if shared == "forward" else base
        is_view, skipped = True, start
        if base.dtype != dtype:
            if view.laid_out is not None:
                base, skipped = base.as_strided((view.count,), (1,), base.storage_offset() - start), 0
            base, is_view = _viewed_as(base, dtype)
        if shared is None:
            return _flagged(transfer.reinterpret(base, shape, stride, offset - skipped), output.is_conj, output.is_neg)
        made = base.as_strided(shape, stride, base.storage_offset() + offset - skipped)
        return _flagged(made if is_view else made.detach(), output.is_conj, output.is_neg)

    return make


def _viewed_as(base: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, bool]:
    """Returns a contiguous tensor reinterpreted in another dtype, and True if autograd sees a view, as it does between real and complex
    numbers.

    AOTAutograd regenerates aliases of a mutated input by replaying the chain of views of the tensor returned here, with the input as the
    first tensor of the chain. So that first tensor must have the input's dtype, or there must be no chain.
    """
    if base.is_complex() and dtype == base.dtype.to_real():
        return torch.view_as_real(base), True
    if dtype.is_complex and base.dtype == dtype.to_real():
        return torch.view_as_complex(base.view(-1, 2)), True
    return base.view(-1).view(dtype), False


def _flagged(tensor: torch.Tensor, is_conj: bool, is_neg: bool) -> torch.Tensor:
    tensor = torch._conj(tensor) if is_conj else tensor
    return torch._neg_view(tensor) if is_neg else tensor


def _unflagged(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor as it is in memory, without conjugate and negative bits."""
    tensor = torch._conj(tensor) if tensor.is_conj() else tensor
    return torch._neg_view(tensor) if tensor.is_neg() else tensor
