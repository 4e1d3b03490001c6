"""The buffers of compiled graphs on the device: a program takes the arrays in its inputs' storages, and returns arrays for new storages.

Usually no value is copied in either direction.

- Written inputs: for an input that the graph writes to, the program returns the new array of the input's storage. The old array is donated,
  so that XLA writes in place. If there are other references to the old array, a copy is donated instead.
- Views: for an input that does not fill its storage, the program takes the array of the whole storage, and the input's offset as a further
  operand.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np
import torch
from jax import lax
from jax.sharding import NamedSharding
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node

from ..buffers.device_kinds import BufferRequest, LayoutMismatch
from ..buffers.native import assembler
from ..buffers.output_plan import FromInput, NonTensor, Output, plan_outputs
from ..buffers.protocol import Buffers
from ..capture.graph import written_inputs
from ..errors import DynaxlaError
from ..lowering import SymbolValues, TensorSpec, dtypes
from ..lowering.graphs import is_tensor
from ..lowering.ops.sharding_constraints import shardings_in
from ..observe import metrics
from ..runtime import guards, late_checks, meshes, private
from ..runtime.cache import LeastRecentlyUsed
from ..runtime.layout import row_major
from . import copies, generators, storages, strided_memory
from .storages import InUseContent
from .strided_memory import StridedView

# Reference count of an array that only an `InUseContent` and one list refer to, as `sys.getrefcount(items[0])` returns it.
_UNSHARED_REFCOUNT = 3
_untyped_storage, _aval_of = torch.Tensor.untyped_storage, operator.attrgetter("aval")
# Arrays of offsets, by the offset and the device or mesh.
_offset_arrays: LeastRecentlyUsed[jax.Array] = LeastRecentlyUsed(1024)


class ViewedStorage(NamedTuple):
    """The storage of an input that does not fill it.

    Attributes:
        first_position: the position, among the graph's inputs, of the first input that is on this storage and does not fill it.
        shape: the shape of the storage's array.
        dtype: the dtype of the storage's array.
    """

    first_position: int
    shape: tuple[int, ...]
    dtype: Any


def buffers(request: BufferRequest) -> StorageBuffers:
    """See `device_kinds.DeviceKind`."""
    return StorageBuffers(request)


def layout_signature(args: Sequence[Any]) -> tuple[Any, ...]:
    """Returns for each tensor its strides, conjugate and negative bits, sharding on a mesh, and `ViewedStorage`; None for other inputs."""
    first_positions: dict[int, int] = {}
    entries: list[Any] = []
    for position, tensor in enumerate(args):
        if not isinstance(tensor, torch.Tensor):
            entries.append(None)
            continue
        sharding = (
            storages.sharding_of_storage(tensor.untyped_storage())
            if meshes.may_have_sharded_arrays() and storages.is_jax_tensor(tensor)
            else None
        )
        entries.append(
            (tuple(tensor.stride()), (tensor.is_conj(), tensor.is_neg()), sharding, _viewed_storage(tensor, position, first_positions))
        )
    return tuple(entries)


def planned_shardings(args: Sequence[Any]) -> tuple[Any, ...]:
    """See `device_kinds.DeviceKind`."""
    return tuple([_virtual_or_actual_sharding(arg) if storages.is_jax_tensor(arg) else None for arg in args])


def _virtual_or_actual_sharding(tensor: torch.Tensor) -> storages.ShapeAndSharding:
    """Returns the virtual sharding of a tensor's storage, or else its array's sharding, with the shape for it; else (None, None)."""
    storage = tensor.untyped_storage()
    for shape, sharding in (storages.virtual_sharding_of(storage), storages.shape_and_sharding(storage)):
        if sharding is not None:
            return shape, sharding
    return None, None


def outputs_without_values(binding: Any, args: list[Any], result_shardings: Sequence[tuple[tuple[int, ...], Any]]) -> list[Any]:
    """See `device_kinds.DeviceKind`."""
    return cast("StorageBinding", binding).outputs_without_values(args, result_shardings)


def are_tracers(args: Sequence[Any]) -> bool:
    """See `device_kinds.DeviceKind`."""
    return storages.any_traced_tensor(args)


def escaped_tracer_error(error: Exception) -> Exception:
    """See `device_kinds.DeviceKind`."""
    return storages.escaped_tracer_error(error)


def _viewed_storage(tensor: torch.Tensor, position: int, first_positions: dict[int, int]) -> ViewedStorage | None:
    """Returns the `ViewedStorage` of an input that does not fill its storage, else None.

    Args:
        tensor: the input.
        position: the position of the input among the graph's inputs.
        first_positions: the `first_position` of each storage so far, by the storage's identity. Updated by this function.
    """
    if not storages.is_jax_tensor(tensor) or not tensor.numel():
        return None
    storage = tensor.untyped_storage()
    if StridedView.of(tensor).fills(storage.nbytes()):
        return None
    zeros = strided_memory.unwritten_aval(storage.nbytes(), tensor.dtype)
    array = _array_or_zeros(storage, zeros.dtype, zeros.shape, storages.device_of(tensor))
    return ViewedStorage(first_positions.setdefault(private.id_of_storage(storage), position), array.shape, array.dtype)


def _input_specs(placeholders: Sequence[Node], args: Sequence[Any], symbols: SymbolValues) -> dict[int, TensorSpec]:
    """Returns the metadata of the inputs that are tensors, by position, with the strides of the arguments."""
    specs = {position: symbols.spec(node.meta["val"]) for position, node in enumerate(placeholders) if is_tensor(node)}
    for position, spec in specs.items():
        if isinstance(args[position], torch.Tensor):  # in a backward graph, None stands for an unused output's gradient
            specs[position] = dataclasses.replace(spec, stride=tuple(args[position].stride()))
    return specs


def _array_or_zeros(storage: torch.UntypedStorage, dtype: Any, shape: tuple[int, ...], device: jax.Device) -> jax.Array:
    """Returns the storage's array. A storage that nobody has written to first gets an array of zeros of this dtype and shape."""
    array = storages.array_of(storage)
    if array is None:
        array = meshes.device_put(np.zeros(shape, dtype), device)
        if not storages.compare_and_swap([(storage, None, array)]):  # another thread has written to the storage
            return _array_or_zeros(storage, dtype, shape, device)
    return array


@dataclasses.dataclass(frozen=True)
class _Input:
    """An input that the program takes.

    Attributes:
        position: the position among the graph's inputs.
        view: the tensor's metadata, with offset 0: the offset is an operand of the program.
        viewed_storage: the tensor's storage, if the tensor does not fill it; else None.
        is_on_cpu: True if the tensor is on the CPU.
        sharding: the sharding of the array on a mesh; None on one device.
        shape: the shape of the array; None if it is the `packed_shape` of the tensor's layout, or the shape in `viewed_storage`.
    """

    position: int
    view: StridedView
    viewed_storage: ViewedStorage | None
    is_on_cpu: bool
    sharding: NamedSharding | None = None
    shape: tuple[int, ...] | None = None

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        if self.viewed_storage is not None:
            return jax.ShapeDtypeStruct(self.viewed_storage.shape, self.viewed_storage.dtype, sharding=self.sharding)
        shape = self.view.layout.packed_shape if self.shape is None else self.shape
        return jax.ShapeDtypeStruct(shape, dtypes.to_jax(self.view.dtype), sharding=self.sharding)


class StorageBuffers(Buffers):
    """The buffers of a graph whose tensors are on the device. The program may donate arrays, and may run on a mesh."""

    def __init__(self, request: BufferRequest) -> None:
        interpreter, symbols, args = request.interpreter, request.symbols, request.args
        placeholders = interpreter.placeholders
        self._device, self._phase, self._reports_late = request.device, request.phase, request.reports_late
        self._output_nodes = cast("Sequence[Any]", interpreter.output_node.args[0])
        self.specs = _input_specs(placeholders, args, symbols)
        # The position of the input to which an output is written, by the output's index. Such an output is a tensor on the input's storage.
        targets = {
            index: position
            for index, position in written_inputs(interpreter.module.graph).items()
            if self._is_written(self._output_nodes[index], position, placeholders)
        }
        self._written: list[tuple[Node, int]] = [(self._output_nodes[index], position) for index, position in targets.items()]
        input_of_output = {**targets, **self._aliased_inputs(request.rederived_outputs - targets.keys(), request.storages.of_output)}
        computed = [None if index in input_of_output else node for index, node in enumerate(self._output_nodes)]
        planned, self._buffers = plan_outputs(placeholders, computed, request.storages, symbols)
        self._outputs: list[Output] = [
            self._from_input(input_of_output[index], symbols.spec(node.meta["val"]), index in targets, symbols)
            if index in input_of_output
            else output
            for index, (node, output) in enumerate(zip(self._output_nodes, planned, strict=True))
        ]
        self.nodes: Sequence[Node] = [*(node for node, _ in self._written), *(buffer.node for buffer in self._buffers)]
        aliased = {output.position for output in self._outputs if isinstance(output, FromInput)}
        read = interpreter.needed(self.nodes)
        input_positions = [
            position for position, spec in self.specs.items()
            if 0 not in spec.shape and (placeholders[position] in read or position in targets.values())
        ]  # fmt: skip
        viewed_storages = [None if item is None else item[-1] for item in layout_signature(args)]
        input_tensors = {
            position: args[position] if storages.is_jax_tensor(args[position]) else placeholders[position].meta["val"]
            for position in input_positions
        }
        self._inputs = [self._input(position, tensor, viewed_storages[position]) for position, tensor in input_tensors.items()]
        has_meshes = meshes.may_have_sharded_arrays()
        constraints = shardings_in(interpreter.module.graph) if has_meshes else []
        self._names_mesh = bool(constraints)
        if request.planned:
            self.replicated = self._shard_virtually(input_tensors, constraints)
        else:
            may_be_on_mesh = has_meshes and not storages.any_traced_tensor(args)
            self.replicated = self._move_inputs_to_mesh(input_tensors, constraints) if may_be_on_mesh else None
        self._positions = input_positions + sorted(aliased - set(input_positions))
        self._draws_random = interpreter.draws_random
        self.numbers: Sequence[Node] = [
            output.node for output in self._outputs if isinstance(output, NonTensor) and output.node is not None
        ]
        self._updated_inputs = self._inputs_to_update()
        self._donate = request.donate
        self.donated = tuple(index + self._draws_random for index in self._updated_inputs) if self._donate else ()
        # The first results are the new arrays of written inputs, with the inputs' shardings.
        self.shardings = [self._inputs[index].sharding for index in self._updated_inputs]
        if self.replicated is not None and self._phase == "forward":
            # The pass `partitionable` may choose the array shapes of new tensors, so that it need not merge sharded dimensions.
            self.free_results = range(len(self._updated_inputs), len(self._updated_inputs) + len(self._buffers))
        self._arrays: Sequence[jax.Array] = ()
        self._offsets: Sequence[jax.Array] = ()

    def _is_written(self, node: Any, position: int, placeholders: Sequence[Node]) -> bool:
        """True if the program returns a new array for an input's storage: the input is on the device, and the graph computes `node`."""
        spec = self.specs[position]
        if not isinstance(node, Node) or node in placeholders or spec.device.type != self._device.torch_device.type or 0 in spec.shape:
            return False
        value = node.meta["val"]
        return tuple(value.shape) == tuple(placeholders[position].meta["val"].shape) and value.dtype == spec.dtype

    def _aliased_inputs(self, indices: frozenset[int], storage_of: Mapping[Node, int]) -> dict[int, int]:
        """Returns the outputs that alias a written input, as a dict from the output's index to the input's position.

        AOTAutograd derives such an output from the input after the call. It uses only the sizes and strides of the tensor that the graph
        returns for the output.

        Args:
            indices: the indices of the outputs that AOTAutograd derives from inputs.
            storage_of: the storage of each node.
        """
        return {
            index: position
            for index, node in enumerate(self._output_nodes)
            if index in indices and node in storage_of
            for source, position in self._written
            if storage_of[node] == storage_of[source] and node.meta["val"].dtype == source.meta["val"].dtype
        }

    def _from_input(self, position: int, spec: TensorSpec, is_target: bool, symbols: SymbolValues) -> Output:
        """Describes an output that is a tensor on the storage of a written input.

        Args:
            position: the position of the input.
            spec: the metadata of the output.
            is_target: True if the output is the input's new value; False if it is another alias of the input.
            symbols: the values of symbolic sizes.
        """
        input_spec = self.specs[position]
        if is_target:
            return FromInput(position, input_spec.shape, input_spec.stride, 0, input_spec.dtype, False, detached=True)
        source = next(node for node, at in self._written if at == position)
        offset = spec.offset - symbols.spec(source.meta["val"]).offset
        return FromInput(position, spec.shape, spec.stride, offset, spec.dtype, False, detached=True)

    def _input(self, position: int, tensor: torch.Tensor, viewed_storage: ViewedStorage | None) -> _Input:
        """Describes an input, with the conjugate and negative bits of `tensor`. On the CPU, both are False: the copy resolves the bits."""
        spec = self.specs[position]
        is_on_cpu = spec.device.type != self._device.torch_device.type
        bits = (False, False) if is_on_cpu else (tensor.is_conj(), tensor.is_neg())
        return _Input(position, StridedView(spec.dtype, spec.shape, spec.stride, 0, *bits), viewed_storage, is_on_cpu)

    def _move_inputs_to_mesh(self, input_tensors: Mapping[int, torch.Tensor], constraints: Sequence[NamedSharding]) -> NamedSharding | None:
        """Moves all inputs to the mesh of the inputs or of the graph's sharding constraints, and adds shardings to their descriptions.

        Returns the mesh's replicated sharding, or None if there is no mesh.

        The array of an input that fills its storage is reshaped to the packed shape. In a backward pass, arrays of inputs that the graph
        does not write to keep their shapes, since the forward program has chosen these shapes (see `free_results`).

        Args:
            input_tensors: the tensors of a call, or fake tensors for inputs that are not on the device, by position.
            constraints: the shardings that the graph names.
        """
        on_device = [index for index, item in enumerate(self._inputs) if storages.is_jax_tensor(input_tensors[item.position])]
        tensors = {index: input_tensors[self._inputs[index].position] for index in on_device}
        mesh_sharding = meshes.common([*(storages.sharding_of_storage(item.untyped_storage()) for item in tensors.values()), *constraints])
        if mesh_sharding is None:
            return None
        written = {position for _, position in self._written}
        for index, item in enumerate(self._inputs):
            sharding, shape = mesh_sharding, None
            if index in tensors:
                tensor = tensors[index]
                storage = tensor.untyped_storage()
                array = storages.array_of(storage)
                if self._phase == "backward" and array is not None and array.dtype == item.aval.dtype and item.position not in written:
                    shape = array.shape
                elif item.viewed_storage is None:
                    array = copies.packed_array(tensor)
                assert array is not None
                array = array if meshes.sharding_of(array) else storages.replicate(storage, array, mesh_sharding)
                sharding = meshes.sharding_of(array) or mesh_sharding
            self._inputs[index] = dataclasses.replace(item, sharding=sharding, shape=shape)
        return mesh_sharding

    def _shard_virtually(self, input_tensors: Mapping[int, torch.Tensor], constraints: Sequence[NamedSharding]) -> NamedSharding | None:
        """Gives the inputs' descriptions the virtual or actual shardings of the inputs. No array is moved.

        Inputs without a sharding count as replicated. Returns the same as `_move_inputs_to_mesh`.
        """
        input_shardings = [
            _virtual_or_actual_sharding(input_tensors[item.position])
            if storages.is_jax_tensor(input_tensors[item.position])
            else (None, None)
            for item in self._inputs
        ]
        input_shardings = [(shape, meshes.for_compilation(sharding)) for shape, sharding in input_shardings]
        mesh_sharding = meshes.common([*(sharding for _, sharding in input_shardings), *constraints])
        for index, (item, (shape, sharding)) in enumerate(zip(self._inputs, input_shardings, strict=True)):
            # The sharding is for an array of this shape, which must be the shape that the program takes.
            applies = item.viewed_storage is None and shape is not None and math.prod(shape) == math.prod(item.aval.shape)
            applies = applies and (shape == item.aval.shape or self._phase == "backward")
            self._inputs[index] = dataclasses.replace(
                item, sharding=sharding if applies else mesh_sharding, shape=shape if applies else None
            )
        return mesh_sharding

    def _inputs_to_update(self) -> list[int]:
        """Returns the indices in `_inputs` of inputs for whose storages the program returns new arrays, one input for each storage."""
        index_of = {item.position: index for index, item in enumerate(self._inputs)}
        groups: dict[Any, int] = {}
        for _, position in self._written:
            item = self._inputs[index_of[position]]
            groups.setdefault(position if item.viewed_storage is None else ("view", item.viewed_storage.first_position), index_of[position])
        return list(groups.values())

    @property
    def facts(self) -> tuple[Any, ...]:
        return tuple(self.specs.items()), tuple(self._inputs), tuple(buffer.spec.stride for buffer in self._buffers)

    def avals(self) -> list[jax.ShapeDtypeStruct]:
        avals = [jax.ShapeDtypeStruct((2,), np.uint32, sharding=self.replicated)] if self._draws_random else []
        avals += [item.aval for item in self._inputs]
        return avals + [
            jax.ShapeDtypeStruct((), np.int64, sharding=self.replicated) for item in self._inputs if item.viewed_storage is not None
        ]

    def unpack(self, arrays: Sequence[jax.Array]) -> tuple[list[jax.Array], jax.Array | None]:
        """Reads the inputs of the graph from the storages' arrays. See `protocol.Buffers`.

        Inputs that the program does not take become zeros: empty tensors, and tensors whose values no returned node needs.
        """
        key = None
        if self._draws_random:
            key = jax.random.wrap_key_data(arrays[0], impl="threefry2x32")
            arrays = arrays[1:]
        self._arrays, offsets = arrays[: len(self._inputs)], iter(arrays[len(self._inputs) :])
        self._offsets = [next(offsets) if item.viewed_storage is not None else None for item in self._inputs]
        inputs = {
            position: lax.full(spec.shape, 0, spec.jax_dtype)
            for position, spec in self.specs.items()
        }  # fmt: skip
        for item, array, offset in zip(self._inputs, self._arrays, self._offsets, strict=True):
            inputs[item.position] = (
                strided_memory.read(array, item.view) if offset is None else strided_memory.read_at(array, item.view, offset)
            )
        return [inputs[position] for position in self.specs], key

    def protect_inputs(
        self, outputs: Sequence[jax.Array], inputs: Sequence[jax.Array], code: jax.Array, all_held: int
    ) -> Sequence[jax.Array]:
        old = dict(zip(self.specs, inputs, strict=True))
        holds = lax.eq(code, np.int32(all_held))
        guarded = list(outputs)
        for index, (_, position) in enumerate(self._written):
            guarded[index] = lax.select(holds, guarded[index], old[position])
        return guarded

    def pack(self, outputs: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the new arrays of the written inputs' storages, then the arrays of new tensors. See `protocol.Buffers`."""
        new = dict(enumerate(self._arrays))
        index_of = {item.position: index for index, item in enumerate(self._inputs)}
        updated_inputs = {
            item.viewed_storage.first_position: index
            for index, item in enumerate(self._inputs)
            if index in self._updated_inputs and item.viewed_storage is not None
        }
        for (_, position), value in zip(self._written, outputs, strict=False):
            index = index_of[position]
            item, offset = self._inputs[index], self._offsets[index]
            if item.viewed_storage is None:
                new[index] = strided_memory.write(new[index], item.view, value)
            else:
                index = updated_inputs[item.viewed_storage.first_position]
                new[index] = strided_memory.write_at(new[index], item.view, offset, value)
        self._arrays = self._offsets = ()
        packed = [buffer.pack(value) for buffer, value in zip(self._buffers, outputs[len(self._written) :], strict=True)]
        return [*(new[index] for index in self._updated_inputs), *packed]

    def bind(self, numbers: Sequence[Any]) -> StorageBinding:
        outputs = assembler(
            self._outputs, self._output_nodes, self._buffers, self.specs, self._positions, self._device.torch_device, self._phase,
            dict(zip(self.numbers, numbers, strict=True)),
        )  # fmt: skip
        new_tensors = [(buffer.shape, row_major(buffer.shape), buffer.spec.dtype) for buffer in self._buffers]
        updated_inputs = self._updated_inputs
        return StorageBinding(
            self._inputs, self._positions, updated_inputs, self._donate, new_tensors, outputs, self._device, self._draws_random,
            self.replicated, self._names_mesh, self._reports_late,
        )  # fmt: skip


class _CallTensors(list[Any]):
    """The tensors of a call: first the inputs that the program takes, then the inputs that only outputs alias.

    Attributes:
        arrays: the arrays that the program takes.
        storages: the storages of these arrays; None for an input on the CPU.
        in_use: the content of the storages that the program writes to, while it runs; else None.
    """

    arrays: list[jax.Array]
    storages: list[torch.UntypedStorage]
    in_use: InUseContent | None = None


class StorageBinding:
    """See `protocol.Binding`."""

    def __init__(
        self,
        inputs: Sequence[_Input],
        positions: Sequence[int],
        updated_inputs: Sequence[int],
        donate: bool,
        new_tensors: Sequence[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]],
        outputs: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], list[Any]],
        device: Any,
        draws_random: bool,
        mesh_sharding: NamedSharding | None,
        names_mesh: bool,
        reports_late: bool,
    ) -> None:
        """Binds the buffers of a graph to its compiled program.

        Args:
            inputs: the inputs that the program takes.
            positions: the positions of the tensors of a call among the graph's inputs: first the inputs that the program takes, then the
                inputs that only outputs alias.
            updated_inputs: the indices of the inputs for whose storages the program returns new arrays.
            donate: True if the old arrays of these storages are donated.
            new_tensors: the shape, strides and dtype of each new tensor that the program returns.
            outputs: assembles the graph's outputs from the new tensors and the tensors of the call.
            device: the `GraphDevice`.
            draws_random: True if the program takes a seed.
            mesh_sharding: the replicated sharding of the mesh on which the program runs; None for a program on one device.
            names_mesh: True if the graph itself names the mesh, so that the program runs on it even if all inputs are on one device.
            reports_late: True if calls do not wait for the program's checks.
        """
        self._inputs, self._positions, self._updated_inputs = list(inputs), list(positions), list(updated_inputs)
        self._donate, self.donates_inputs = donate, bool(updated_inputs)
        self._new_tensors, self.outputs = list(new_tensors), outputs
        self._device, self._draws_random = device, draws_random
        self._mesh_sharding, self._names_mesh, self._reports_late = mesh_sharding, names_mesh, reports_late
        self._device_or_mesh: meshes.DeviceOrMesh = mesh_sharding or device.jax_device
        self._index = device.torch_device.index or 0
        self._argument_check: guards.ArgumentCheck | None = None
        self._views = [index for index, item in enumerate(inputs) if item.viewed_storage is not None]
        self._expected = [(item.aval.shape, np.dtype(item.aval.dtype)) for item in inputs]
        # The avals of a call's arrays after the last run of `_convert_arrays`. They have the expected shapes and dtypes, so a call whose
        # arrays have equal avals needs no check of each array.
        self._checked_avals: list[Any] | None = None
        self._has_cpu_inputs = any(item.is_on_cpu for item in inputs)

    def take(self, args: list[Any]) -> list[torch.Tensor]:
        """Returns a `_CallTensors` with the tensors of a call and the arrays of their storages. See `protocol.Binding`."""
        call = _CallTensors([args[position] for position in self._positions])
        read: Sequence[torch.Tensor] = call[: len(self._inputs)]
        if not (self._argument_check is not None and self._argument_check.matches(*read)):
            self._verify(read)
        if self._has_cpu_inputs:
            input_storages = [None if item.is_on_cpu else tensor.untyped_storage() for item, tensor in zip(self._inputs, read, strict=True)]
            call.storages = cast("list[torch.UntypedStorage]", input_storages)
            call.arrays = [
                storages.array_from_cpu(tensor, self._device_or_mesh) if storage is None else cast("jax.Array", storages.array_of(storage))
                for tensor, storage in zip(read, input_storages, strict=True)
            ]
        else:
            call.storages = list(map(_untyped_storage, read))
            call.arrays = list(map(storages.array_of, call.storages))
        try:
            are_checked = list(map(_aval_of, call.arrays)) == self._checked_avals
        except AttributeError:  # an array is None, since nobody has written to its storage
            are_checked = False
        if not are_checked:
            self._convert_arrays(read, call)
        if self._views:
            self._check_views(read, call)
        if meshes.may_have_sharded_arrays() and not storages.any_tracer(call.arrays):
            self._move_to_mesh(call)
        args.clear()
        return call

    def _verify(self, tensors: Sequence[torch.Tensor]) -> None:
        """Checks the inputs' metadata against the program.

        Raises: LayoutMismatch for other strides, conjugate or negative bits than the program was compiled for; DynaxlaError for another
            shape, dtype or device.
        """
        for item, tensor in zip(self._inputs, tensors, strict=True):
            view = item.view
            wanted = torch.device("cpu") if item.is_on_cpu else self._device.torch_device
            if isinstance(tensor, FakeTensor) or (tuple(tensor.shape), tensor.dtype, tensor.device) != (view.shape, view.dtype, wanted):
                raise DynaxlaError(
                    f"a program compiled for {view.dtype}{list(view.shape)} on {wanted} "
                    f"was called with {tensor.dtype}{list(tensor.shape)} on {tensor.device}",
                    hint="call it through torch.compile, whose guards compile the function again",
                )
            if tuple(tensor.stride()) != view.stride:
                raise LayoutMismatch
            if not item.is_on_cpu and (tensor.is_conj(), tensor.is_neg()) != (view.conj, view.neg):
                raise LayoutMismatch
        self._argument_check = guards.ArgumentCheck(tensors)

    def _convert_arrays(self, tensors: Sequence[torch.Tensor], call: _CallTensors) -> None:
        """Brings the arrays of a call into the shapes and dtypes that the program takes.

        Raises: LayoutMismatch if the array of an input that does not fill its storage has another shape or dtype than the program was
            compiled for, or if an input does not fill its storage although the program was compiled for one that does.
        """
        for index, (item, tensor) in enumerate(zip(self._inputs, tensors, strict=True)):
            if item.is_on_cpu:
                continue
            storage, array = call.storages[index], call.arrays[index]
            shape, dtype = self._expected[index]
            if array is not None and (array.shape, array.dtype) == (shape, dtype):
                continue
            if item.viewed_storage is not None or not StridedView.of(tensor).fills(storage.nbytes()):
                raise LayoutMismatch
            if array is None:
                call.arrays[index] = _array_or_zeros(storage, dtype, shape, self._device.jax_device)
            else:
                metrics.add("input_copies")
                self._repack(call, index, array)
        self._checked_avals = [array.aval for array in call.arrays]

    def _move_to_mesh(self, call: _CallTensors) -> None:
        """Moves the arrays that are on one device to the program's mesh.

        Raises: LayoutMismatch if an array on a mesh has another sharding than the program takes, or if no array is on the mesh and the
            graph does not name the mesh.
        """
        arrays, on_one_device = call.arrays, []
        for index, item in enumerate(self._inputs):
            if arrays[index].sharding is item.sharding:
                continue
            sharding = meshes.sharding_of(arrays[index])
            if sharding is None and item.sharding == self._mesh_sharding is not None:
                on_one_device.append(index)
            elif sharding != item.sharding:
                raise LayoutMismatch
        if on_one_device and len(on_one_device) == len(arrays) and not self._names_mesh:
            raise LayoutMismatch
        for index in on_one_device:
            arrays[index] = storages.replicate(call.storages[index], arrays[index], cast("NamedSharding", self._mesh_sharding))

    def _check_views(self, tensors: Sequence[torch.Tensor], call: _CallTensors) -> None:
        """Checks the inputs that do not fill their storages.

        Raises: LayoutMismatch if inputs share storages in another way than when the program was compiled, or if an input that did not fill
            its storage does so now.
        """
        first_positions: dict[int, int] = {}
        for index in self._views:
            item, tensor = self._inputs[index], tensors[index]
            if _viewed_storage(tensor, item.position, first_positions) != item.viewed_storage:
                raise LayoutMismatch

    def outputs_without_values(self, args: list[Any], result_shardings: Sequence[tuple[tuple[int, ...], Any]]) -> list[Any]:
        """Returns the outputs of a call whose program does not run: tensors of unwritten memory. Inputs are unchanged.

        Args:
            args: the graph's inputs. The list is emptied.
            result_shardings: the shapes and shardings of the program's results, which become the virtual shardings of the outputs.
        """
        tensors = [args[position] for position in self._positions]
        args.clear()
        new_tensors = [storages.new_tensor(*item, self._device.torch_device) for item in self._new_tensors]
        for tensor, (shape, sharding) in zip(new_tensors, result_shardings[len(self._updated_inputs) :], strict=False):
            if isinstance(sharding, NamedSharding):
                storages.set_virtual_sharding(tensor.untyped_storage(), shape, sharding)
        return self.outputs(new_tensors, tensors)

    def arrays(self, tensors: Sequence[torch.Tensor]) -> Sequence[jax.Array]:
        """Returns the seed, the arrays and the offsets that the program takes. See `protocol.Binding`.

        Storages that the program writes to hold an `InUseContent` from now on, until `export` or `abandon` is called.
        """
        if self._reports_late:
            late_checks.raise_if_failed(self._device.torch_device)
        call = cast("_CallTensors", tensors)
        arrays = call.arrays
        if self.donates_inputs:
            updated_inputs = self._updated_inputs
            call.in_use = InUseContent()
            while not call.in_use.acquire([call.storages[index] for index in updated_inputs], [arrays[index] for index in updated_inputs]):
                self._reread_arrays(call)
            for index in updated_inputs if self._donate else ():
                if sys.getrefcount(arrays[index]) > _UNSHARED_REFCOUNT:  # XLA must not write to an array with other references
                    metrics.add("undonated")
                    arrays[index] = jax.device_put(arrays[index], may_alias=False)
        if not self._draws_random and not self._views:
            return arrays
        seed = [generators.seed_array(None, self._index, self._device_or_mesh)] if self._draws_random else []
        return [*seed, *arrays, *(_offset_array(tensors[index], self._device_or_mesh) for index in self._views)]

    def _reread_arrays(self, call: _CallTensors) -> None:
        """Reads the arrays of a call again, since another thread has written to a storage.

        A new array has the same number of bytes. It may have another shape or dtype, if the write was through another view.
        """
        for index, storage in enumerate(call.storages):
            if storage is not None:
                array = cast("jax.Array", storages.array_of(storage))
                if (array.shape, array.dtype) != self._expected[index]:
                    self._repack(call, index, array)
                else:
                    call.arrays[index] = array
                if meshes.may_have_sharded_arrays() and meshes.sharding_of(call.arrays[index]) != self._inputs[index].sharding:
                    before = cast("jax.Array", storages.array_of(storage))
                    call.arrays[index] = meshes.copy_to(call.arrays[index], self._inputs[index].sharding or self._device.jax_device)
                    storages.compare_and_swap([(storage, before, call.arrays[index])])

    def _repack(self, call: _CallTensors, index: int, array: jax.Array) -> None:
        """Reinterprets an array, which was written through a view of another shape or dtype, in the shape and dtype that the program takes.

        The storage keeps the result for the next call. A storage that other inputs of this call share keeps its old array, unless the
        program writes to it.
        """
        storage = call.storages[index]
        call.arrays[index] = copies.bitcast(array, *self._expected[index], self._device.jax_device)
        if index in self._updated_inputs or sum(other is storage for other in call.storages) == 1:
            storages.compare_and_swap([(storage, array, call.arrays[index])])

    def export(self, results: Sequence[jax.Array], tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Puts the new arrays into the storages of written inputs. Returns the new tensors, and an array with the check code, if any."""
        call, count = cast("_CallTensors", tensors), len(self._updated_inputs)
        if call.in_use is not None:
            call.in_use.succeed((call.storages[index], array) for index, array in zip(self._updated_inputs, results, strict=False))
            call.in_use = None
        device = self._device.torch_device
        new_tensors = [storages.new_tensor(*item, device, array) for item, array in zip(self._new_tensors, results[count:], strict=False)]
        return [*new_tensors, *results[count + len(new_tensors) :]]

    def abandon(self, out_of_memory: bool, tensors: Sequence[torch.Tensor]) -> bool:
        call = cast("_CallTensors", tensors)
        if call.in_use is not None:
            call.in_use.fail([(call.storages[index], tensors[index]) for index in self._updated_inputs])
            call.in_use = None
        return False

    def report(self, code: Any, checks: late_checks.Checks, name: str) -> None:
        if self._reports_late:
            late_checks.of(self._device.torch_device).add(code, checks, name)
        elif (error := late_checks.failure(int(np.asarray(code)), checks)) is not None:
            raise error


def _offset_array(tensor: torch.Tensor, device_or_mesh: meshes.DeviceOrMesh) -> jax.Array:
    """Returns the offset of a tensor in its storage, in elements, as an int64[] array on a device or a mesh."""
    key = int(tensor.storage_offset()), meshes.device_key(device_or_mesh)
    array = _offset_arrays.get(key)
    if array is None:
        array = meshes.device_put(np.int64(key[0]), device_or_mesh)
        _offset_arrays.put(key, array)
    return array
