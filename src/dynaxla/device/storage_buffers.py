"""The buffers of compiled graphs on the device: a program takes the arrays in its inputs' storages, and returns arrays for new storages.

Nothing is copied in either direction. For an input that the graph writes to, the program returns the new array of the input's storage. The
old array is donated, so that XLA writes in place, unless something else refers to it. An input need not fill its storage: the program reads
and writes it as a view, at an offset that is an input of the program.
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

from ..buffers.device_kinds import LayoutMismatch, Request
from ..buffers.native import assembler
from ..buffers.output_plan import Constant, FromInput, Output, plan_outputs
from ..buffers.protocol import Buffers
from ..capture.graph import written_inputs
from ..errors import DynaxlaError
from ..lowering import SymbolValues, TensorSpec, dtypes
from ..lowering.ops.sharding_constraints import shardings_in
from ..observe import metrics
from ..runtime import guards, late_checks, meshes, private
from ..runtime.cache import LeastRecentlyUsed
from ..runtime.layout import row_major
from . import copies, generators, storages, strided_memory
from .storages import InUse
from .strided_memory import StridedView

# Reference count of an array that only a `InUse` and one list refer to, as `sys.getrefcount(items[0])` returns it.
_ALONE = 3
_untyped_storage, _aval_of = torch.Tensor.untyped_storage, operator.attrgetter("aval")
# Offsets as arrays, by value and device or mesh.
_offsets: LeastRecentlyUsed[jax.Array] = LeastRecentlyUsed(1024)


class ViewedStorage(NamedTuple):
    """The storage of an input that is only a view of it.

    Attributes:
        group: the position of the first input on that storage.
        shape: of the storage's array.
        dtype: of the storage's array.
    """

    group: int
    shape: tuple[int, ...]
    dtype: Any


def buffers(request: Request) -> StorageBuffers:
    """See `device_kinds.DeviceKind`."""
    return StorageBuffers(request)


def signature(args: Sequence[Any]) -> tuple[Any, ...]:
    """Returns for each input its strides, conjugate and negative bits, sharding on a mesh, and `ViewedStorage`; None for no tensor."""
    first: dict[int, int] = {}
    found: list[Any] = []
    for position, tensor in enumerate(args):
        if not isinstance(tensor, torch.Tensor):
            found.append(None)
            continue
        sharding = storages.sharding_in(tensor.untyped_storage()) if meshes.exist() and storages.is_ours(tensor) else None
        found.append((tuple(tensor.stride()), (tensor.is_conj(), tensor.is_neg()), sharding, _held(tensor, position, first)))
    return tuple(found)


def plans(args: Sequence[Any]) -> tuple[Any, ...]:
    """See `device_kinds.DeviceKind`."""
    return tuple([_plan_of(arg) if storages.is_ours(arg) else None for arg in args])


def _plan_of(tensor: torch.Tensor) -> storages.Lies:
    storage = tensor.untyped_storage()
    return next((plan for plan in (storages.plan_of(storage), storages.lies(storage)) if plan[1] is not None), (None, None))


def blank(binding: Any, args: list[Any], lie: Sequence[tuple[tuple[int, ...], Any]]) -> list[Any]:
    """See `device_kinds.DeviceKind`."""
    return cast("StorageBinding", binding).blank(args, lie)


def are_traced(args: Sequence[Any]) -> bool:
    """See `device_kinds.DeviceKind`."""
    return storages.hold_tracers(args)


def outlived(error: Exception) -> Exception:
    """See `device_kinds.DeviceKind`."""
    return storages.outlived(error)


def _held(tensor: torch.Tensor, position: int, first: dict[int, int]) -> ViewedStorage | None:
    """Returns the `ViewedStorage` of an input that does not fill its storage, else None.

    Args:
        position: of the input.
        first: by storage, the position of the first input that does not fill it; updated here.
    """
    if not storages.is_ours(tensor) or not tensor.numel():
        return None
    storage = tensor.untyped_storage()
    if StridedView.of(tensor).fills(storage.nbytes()):
        return None
    zeros = strided_memory.unwritten(storage.nbytes(), tensor.dtype)
    array = _array_in(storage, zeros.dtype, zeros.shape, storages.device_of(tensor))
    return ViewedStorage(first.setdefault(private.identity_of(storage), position), array.shape, array.dtype)


def _array_in(storage: torch.UntypedStorage, dtype: Any, shape: tuple[int, ...], device: jax.Device) -> jax.Array:
    """Returns the storage's array. If nobody has written to the storage, it gets zeros of this dtype and shape first."""
    array = storages.array_of(storage)
    if array is None:
        with jax.enable_x64(True), jax.ensure_compile_time_eval():
            array = jax.device_put(np.zeros(shape, dtype), device)
        if not storages.replace_arrays([(storage, None, array)]):  # another thread has written to the storage
            return _array_in(storage, dtype, shape, device)
    return array


@dataclasses.dataclass(frozen=True)
class _Input:
    """An input that the program takes.

    Attributes:
        position: among the graph's inputs.
        place: its metadata, with offset 0.
        held: its storage if it is only a view of it; None if it fills its storage.
        is_host: it is on the CPU.
        sharding: of the array on a mesh; None on one device.
        shape: of the array of a storage that it fills; None for its packed shape.
    """

    position: int
    place: StridedView
    held: ViewedStorage | None
    is_host: bool
    sharding: NamedSharding | None = None
    shape: tuple[int, ...] | None = None

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        if self.held is not None:
            return jax.ShapeDtypeStruct(self.held.shape, self.held.dtype, sharding=self.sharding)
        shape = self.place.layout.packed_shape if self.shape is None else self.shape
        return jax.ShapeDtypeStruct(shape, dtypes.to_jax(self.place.dtype), sharding=self.sharding)


class StorageBuffers(Buffers):
    """Buffers in storages that XLA's arrays fill. A program may donate arrays, and may run on a mesh."""

    def __init__(self, request: Request) -> None:
        interpreter, symbols, args = request.interpreter, request.symbols, request.args
        placeholders = interpreter.placeholders
        self._place, self._phase, self._reports_late = request.place, request.phase, request.reports_late
        self._output_nodes = cast("Sequence[Any]", interpreter.output_node.args[0])
        self.specs: dict[int, TensorSpec] = {
            position: symbols.spec(node.meta["val"]) for position, node in enumerate(placeholders) if _is_tensor(node.meta["val"])
        }
        for position, spec in self.specs.items():
            if isinstance(args[position], torch.Tensor):  # the gradient of an output that the loss does not use is None
                self.specs[position] = dataclasses.replace(spec, stride=tuple(args[position].stride()))
        # By index of an output that is written to an input: the input's position. Such an output is a tensor on the input's storage.
        targets = {
            index: position
            for index, position in written_inputs(interpreter.module.graph).items()
            if self._is_written(self._output_nodes[index], position, placeholders)
        }
        self._written: list[tuple[Node, int]] = [(self._output_nodes[index], position) for index, position in targets.items()]
        in_inputs = dict(targets)
        # AOTAutograd derives an alias of a written input from the input later; it uses only the sizes and strides of this output.
        storage_of = request.storages.of
        for index, node in enumerate(self._output_nodes):
            for source, position in self._written if index in request.rederived_outputs - targets.keys() and node in storage_of else ():
                if storage_of[node] == storage_of[source] and node.meta["val"].dtype == source.meta["val"].dtype:
                    in_inputs[index] = position
        computed = [None if index in in_inputs else node for index, node in enumerate(self._output_nodes)]
        planned, self._buffers = plan_outputs(placeholders, computed, request.storages, symbols)
        self._outputs: list[Output] = [
            self._in_input(in_inputs[index], symbols.spec(node.meta["val"]), index in targets, symbols) if index in in_inputs else output
            for index, (node, output) in enumerate(zip(self._output_nodes, planned, strict=True))
        ]
        self.nodes: Sequence[Node] = [*(node for node, _ in self._written), *(buffer.node for buffer in self._buffers)]
        aliased = {output.position for output in self._outputs if isinstance(output, FromInput)}
        read = interpreter.needed(self.nodes)
        passed = [
            position for position, spec in self.specs.items()
            if 0 not in spec.shape and (placeholders[position] in read or position in targets.values())
        ]  # fmt: skip
        held = [None if item is None else item[-1] for item in signature(args)]
        given = {
            position: args[position] if storages.is_ours(args[position]) else placeholders[position].meta["val"] for position in passed
        }
        self._inputs = [self._input(position, tensor, held[position]) for position, tensor in given.items()]
        constraints = shardings_in(interpreter.module.graph) if meshes.exist() else []
        self._names_mesh = bool(constraints)
        if request.planned:
            self.where = self._planned(given, constraints)
        else:
            self.where = self._on_mesh(given, constraints) if meshes.exist() and not storages.hold_tracers(args) else None
        self._positions = passed + sorted(aliased - set(passed))
        self._draws_random = interpreter.draws_random
        self.numbers: Sequence[Node] = [output.node for output in self._outputs if isinstance(output, Constant) and output.node is not None]
        self._slots = self._written_slots()
        self._donate = request.donate
        self.donated = tuple(slot + self._draws_random for slot in self._slots) if self._donate else ()
        # The first results are the new arrays of written inputs, with the inputs' shardings.
        self.shardings = [self._inputs[slot].sharding for slot in self._slots]
        if self.where is not None and self._phase == "forward":
            # XLA's partitioner may choose the shapes of new tensors: some have one dimension in place of several sharded ones.
            self.free = range(len(self._slots), len(self._slots) + len(self._buffers))
        self._arrays: Sequence[jax.Array] = ()
        self._offsets: Sequence[jax.Array] = ()

    def _is_written(self, node: Any, position: int, placeholders: Sequence[Node]) -> bool:
        """True if the program returns a new array for the input's storage: the input is on the device, and the graph computes its value."""
        spec = self.specs[position]
        if not isinstance(node, Node) or node in placeholders or spec.device.type != self._place.device.type or 0 in spec.shape:
            return False
        value = node.meta["val"]
        return tuple(value.shape) == tuple(placeholders[position].meta["val"].shape) and value.dtype == spec.dtype

    def _in_input(self, position: int, spec: TensorSpec, is_target: bool, symbols: SymbolValues) -> Output:
        own = self.specs[position]
        if is_target:
            return FromInput(position, own.shape, own.stride, 0, own.dtype, False, apart=True)
        source = next(node for node, at in self._written if at == position)
        offset = spec.offset - symbols.spec(source.meta["val"]).offset
        return FromInput(position, spec.shape, spec.stride, offset, spec.dtype, False, apart=True)

    def _input(self, position: int, like: torch.Tensor, held: ViewedStorage | None) -> _Input:
        """Describes an input. `like` has its conjugate and negative bits; a tensor on the CPU is copied without them."""
        spec = self.specs[position]
        is_host = spec.device.type != self._place.device.type
        bits = (False, False) if is_host else (like.is_conj(), like.is_neg())
        return _Input(position, StridedView(spec.dtype, spec.shape, spec.stride, 0, *bits), held, is_host)

    def _on_mesh(self, given: Mapping[int, torch.Tensor], constraints: Sequence[NamedSharding]) -> NamedSharding | None:
        """Returns the mesh on which an input lies or that the graph names, or None, and moves all inputs to it.

        Arrays of inputs that fill their storages are brought into their packed shape, as the program takes them. Exceptions are the arrays
        that a backward pass gets from a forward pass (see `free`).
        """
        ours = [index for index, item in enumerate(self._inputs) if storages.is_ours(given[item.position])]
        tensors = {index: given[self._inputs[index].position] for index in ours}
        where = meshes.common([*(storages.sharding_in(tensor.untyped_storage()) for tensor in tensors.values()), *constraints])
        if where is None:
            return None
        written = {position for _, position in self._written}
        for index, item in enumerate(self._inputs):
            sharding, shape = where, None
            if index in tensors:
                tensor = tensors[index]
                storage = tensor.untyped_storage()
                array = storages.array_of(storage)
                if self._phase == "backward" and array is not None and array.dtype == item.aval.dtype and item.position not in written:
                    shape = array.shape
                elif item.held is None:
                    array = copies.packed_array(tensor)
                assert array is not None
                sharding = meshes.sharding_of(array) or meshes.sharding_of(storages.spread(storage, array, where)) or where
            self._inputs[index] = dataclasses.replace(item, sharding=sharding, shape=shape)
        return where

    def _planned(self, given: Mapping[int, torch.Tensor], constraints: Sequence[NamedSharding]) -> NamedSharding | None:
        """Returns the mesh on which inputs lie or are planned to lie, as `_on_mesh` does, without moving them.

        Inputs without a sharding of their own are replicated.
        """
        plans = [_plan_of(given[item.position]) if storages.is_ours(given[item.position]) else (None, None) for item in self._inputs]
        where = meshes.common([*(sharding for _, sharding in plans), *constraints])
        for index, (item, (shape, sharding)) in enumerate(zip(self._inputs, plans, strict=True)):
            fits = item.held is None and shape is not None and math.prod(shape) == math.prod(item.aval.shape)
            fits = fits and (shape == item.aval.shape or self._phase == "backward")
            self._inputs[index] = dataclasses.replace(item, sharding=sharding if fits else where, shape=shape if fits else None)
        return where

    def _written_slots(self) -> list[int]:
        """Returns the indices of the inputs for whose storages the program returns new arrays: one input for each storage."""
        index_of = {item.position: index for index, item in enumerate(self._inputs)}
        groups: dict[Any, int] = {}
        for _, position in self._written:
            item = self._inputs[index_of[position]]
            groups.setdefault(position if item.held is None else ("view", item.held.group), index_of[position])
        return list(groups.values())

    @property
    def facts(self) -> tuple[Any, ...]:
        return tuple(self.specs.items()), tuple(self._inputs), tuple(buffer.spec.stride for buffer in self._buffers)

    def avals(self) -> list[jax.ShapeDtypeStruct]:
        found = [jax.ShapeDtypeStruct((2,), np.uint32, sharding=self.where)] if self._draws_random else []
        found += [item.aval for item in self._inputs]
        return found + [jax.ShapeDtypeStruct((), np.int64, sharding=self.where) for item in self._inputs if item.held is not None]

    def unpack(self, arrays: Sequence[jax.Array]) -> tuple[list[jax.Array], jax.Array | None]:
        key = None
        if self._draws_random:
            key = jax.random.wrap_key_data(arrays[0], impl="threefry2x32")
            arrays = arrays[1:]
        self._arrays, offsets = arrays[: len(self._inputs)], iter(arrays[len(self._inputs) :])
        self._offsets = [next(offsets) if item.held is not None else None for item in self._inputs]
        inputs = {
            position: lax.full(spec.shape, 0, spec.jax_dtype)
            for position, spec in self.specs.items()
        }  # fmt: skip
        for item, array, offset in zip(self._inputs, self._arrays, self._offsets, strict=True):
            inputs[item.position] = (
                strided_memory.read(array, item.place) if offset is None else strided_memory.read_at(array, item.place, offset)
            )
        return [inputs[position] for position in self.specs], key

    def guard(self, outputs: Sequence[jax.Array], inputs: Sequence[jax.Array], code: jax.Array, right: int) -> Sequence[jax.Array]:
        old = dict(zip(self.specs, inputs, strict=True))
        holds = lax.eq(code, np.int32(right))
        found = list(outputs)
        for index, (_, position) in enumerate(self._written):
            found[index] = lax.select(holds, found[index], old[position])
        return found

    def pack(self, outputs: Sequence[jax.Array]) -> list[jax.Array]:
        new = dict(enumerate(self._arrays))
        index_of = {item.position: index for index, item in enumerate(self._inputs)}
        slots = {item.held.group: index for index, item in enumerate(self._inputs) if index in self._slots and item.held is not None}
        for (_, position), value in zip(self._written, outputs, strict=False):
            index = index_of[position]
            item, offset = self._inputs[index], self._offsets[index]
            if item.held is None:
                new[index] = strided_memory.write(new[index], item.place, value)
            else:
                slot = slots[item.held.group]
                new[slot] = strided_memory.write_at(new[slot], item.place, offset, value)
        self._arrays = self._offsets = ()
        packed = [buffer.pack(value) for buffer, value in zip(self._buffers, outputs[len(self._written) :], strict=True)]
        return [*(new[slot] for slot in self._slots), *packed]

    def bind(self, numbers: Sequence[Any]) -> StorageBinding:
        outputs = assembler(
            self._outputs, self._output_nodes, self._buffers, self.specs, self._positions, self._place.device, self._phase,
            dict(zip(self.numbers, numbers, strict=True)),
        )  # fmt: skip
        made = [(buffer.shape, row_major(buffer.shape), buffer.spec.dtype) for buffer in self._buffers]
        slots = self._slots
        return StorageBinding(
            self._inputs, self._positions, slots, self._donate, made, outputs, self._place, self._draws_random, self.where,
            self._names_mesh, self._reports_late,
        )  # fmt: skip


class _Taken(list[Any]):
    """The tensors of a call.

    Attributes:
        arrays: the arrays that the program reads.
        storages: the storages of these arrays; None for an input on the CPU.
        lent: the content of the storages that the program writes to, while it runs.
    """

    arrays: list[jax.Array]
    storages: list[torch.UntypedStorage]
    lent: InUse | None = None


class StorageBinding:
    """See `protocol.Binding`."""

    def __init__(
        self,
        inputs: Sequence[_Input],
        positions: Sequence[int],
        slots: Sequence[int],
        donate: bool,
        made: Sequence[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]],
        outputs: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], list[Any]],
        place: Any,
        draws_random: bool,
        mesh: NamedSharding | None,
        names_mesh: bool,
        reports_late: bool,
    ) -> None:
        """Binds the buffers of a graph to its compiled program.

        Args:
            inputs: the inputs that the program takes.
            positions: of the tensors of a call among the graph's inputs: first those that the program takes, then those that only outputs
                alias.
            slots: the indices of the inputs for whose storages the program returns new arrays.
            donate: the old arrays of these storages are donated.
            made: shape, strides and dtype of each new tensor that the program returns.
            outputs: assembles the graph's outputs from the new tensors and the tensors of the call.
            place: the device.
            draws_random: the program takes a seed.
            mesh: the mesh on which the program runs, or None.
            names_mesh: the graph itself names the mesh, so the program runs on it even if all inputs are on one device.
            reports_late: calls do not wait for the program's checks.
        """
        self._inputs, self._positions, self._slots = list(inputs), list(positions), list(slots)
        self._donate, self.donates_inputs = donate, bool(slots)
        self._made, self.outputs = list(made), outputs
        self._place, self._draws_random = place, draws_random
        self._mesh, self._names_mesh, self._reports_late = mesh, names_mesh, reports_late
        self._where: meshes.DeviceOrMesh = mesh or place.jax_device
        self._index = place.device.index or 0
        self._check: guards.ArgumentCheck | None = None
        self._views = [index for index, item in enumerate(inputs) if item.held is not None]
        self._expected = [(item.aval.shape, np.dtype(item.aval.dtype)) for item in inputs]
        # The avals of the arrays of an earlier call, which had the expected shapes and dtypes.
        self._known: list[Any] | None = None
        self._hosts = any(item.is_host for item in inputs)

    def take(self, args: list[Any]) -> list[torch.Tensor]:
        taken = _Taken([args[position] for position in self._positions])
        read: Sequence[torch.Tensor] = taken[: len(self._inputs)]
        if not (self._check is not None and self._check.matches(*read)):
            self._verify(read)
        if self._hosts:
            found = [None if item.is_host else tensor.untyped_storage() for item, tensor in zip(self._inputs, read, strict=True)]
            taken.storages = cast("list[torch.UntypedStorage]", found)
            taken.arrays = [
                storages.as_array(tensor, self._where) if storage is None else cast("jax.Array", storages.array_of(storage))
                for tensor, storage in zip(read, found, strict=True)
            ]
        else:
            taken.storages = list(map(_untyped_storage, read))
            taken.arrays = list(map(storages.array_of, taken.storages))
        try:
            is_known = list(map(_aval_of, taken.arrays)) == self._known
        except AttributeError:  # an array is None, since nobody has written to its storage
            is_known = False
        if not is_known:
            self._look(read, taken)
        if self._views:
            self._check_views(read, taken)
        if meshes.exist() and not storages.any_tracer(taken.arrays):
            self._match(taken)
        args.clear()
        return taken

    def _verify(self, tensors: Sequence[torch.Tensor]) -> None:
        """Checks the metadata of the inputs.

        Raises: LayoutMismatch for other strides or bits; DynaxlaError for another shape, dtype or device than the program was compiled for.
        """
        for item, tensor in zip(self._inputs, tensors, strict=True):
            place = item.place
            wanted = torch.device("cpu") if item.is_host else self._place.device
            if isinstance(tensor, FakeTensor) or (tuple(tensor.shape), tensor.dtype, tensor.device) != (place.shape, place.dtype, wanted):
                raise DynaxlaError(
                    f"a program compiled for {place.dtype}{list(place.shape)} on {wanted} "
                    f"was called with {tensor.dtype}{list(tensor.shape)} on {tensor.device}",
                    hint="call it through torch.compile, whose guards compile the function again",
                )
            if tuple(tensor.stride()) != place.stride:
                raise LayoutMismatch
            if not item.is_host and (tensor.is_conj(), tensor.is_neg()) != (place.conj, place.neg):
                raise LayoutMismatch
        self._check = guards.ArgumentCheck(tensors)

    def _look(self, tensors: Sequence[torch.Tensor], taken: _Taken) -> None:
        """Brings the arrays into the shapes and dtypes that the program takes.

        Raises: LayoutMismatch where an input does not fill its storage, or has another array than the program was compiled for.
        """
        for index, (item, tensor) in enumerate(zip(self._inputs, tensors, strict=True)):
            if item.is_host:
                continue
            storage, array = taken.storages[index], taken.arrays[index]
            shape, dtype = self._expected[index]
            if array is not None and (array.shape, array.dtype) == (shape, dtype):
                continue
            if item.held is not None or not StridedView.of(tensor).fills(storage.nbytes()):
                raise LayoutMismatch
            if array is None:
                taken.arrays[index] = _array_in(storage, dtype, shape, self._place.jax_device)
            else:
                metrics.add("input_copies")
                self._repack(taken, index, array)
        self._known = [array.aval for array in taken.arrays]

    def _match(self, taken: _Taken) -> None:
        """Moves arrays on one device to the program's mesh.

        Raises: LayoutMismatch if an array then has another sharding than the program takes.
        """
        arrays, alone = taken.arrays, []
        for index, item in enumerate(self._inputs):
            if arrays[index].sharding is item.sharding:
                continue
            found = meshes.sharding_of(arrays[index])
            if found is None and item.sharding == self._mesh is not None:
                alone.append(index)
            elif found != item.sharding:
                raise LayoutMismatch
        if alone and len(alone) == len(arrays) and not self._names_mesh:
            raise LayoutMismatch
        for index in alone:
            arrays[index] = storages.spread(taken.storages[index], arrays[index], cast("NamedSharding", self._mesh))

    def _check_views(self, tensors: Sequence[torch.Tensor], taken: _Taken) -> None:
        """Raises LayoutMismatch if other inputs share storages than when the program was compiled, or a view fills its storage now."""
        first: dict[int, int] = {}
        for index in self._views:
            item, tensor = self._inputs[index], tensors[index]
            if _held(tensor, item.position, first) != item.held:
                raise LayoutMismatch

    def blank(self, args: list[Any], lie: Sequence[tuple[tuple[int, ...], Any]]) -> list[Any]:
        """Returns the outputs of a call whose program does not run: tensors without values. Inputs are unchanged. Empties `args`.

        Args:
            lie: the shapes and shardings of the program's results, which are set as plans on the outputs.
        """
        taken = [args[position] for position in self._positions]
        args.clear()
        made = [storages.make(*item, self._place.device) for item in self._made]
        for tensor, (shape, sharding) in zip(made, lie[len(self._slots) :], strict=False):
            if isinstance(sharding, NamedSharding):
                storages.plan(tensor.untyped_storage(), shape, sharding)
        return self.outputs(made, taken)

    def arrays(self, tensors: Sequence[torch.Tensor]) -> Sequence[jax.Array]:
        if self._reports_late:
            late_checks.raise_if_failed(self._place.device)
        taken = cast("_Taken", tensors)
        arrays = taken.arrays
        if self.donates_inputs:
            slots = self._slots
            taken.lent = InUse()
            while not taken.lent.lend([taken.storages[slot] for slot in slots], [arrays[slot] for slot in slots]):
                self._take_again(taken)
            for slot in slots if self._donate else ():
                if sys.getrefcount(arrays[slot]) > _ALONE:  # XLA must not write to an array with other references
                    metrics.add("undonated")
                    arrays[slot] = jax.device_put(arrays[slot], may_alias=False)
        if not self._draws_random and not self._views:
            return arrays
        seed = [generators.seed(None, self._index, self._where)] if self._draws_random else []
        return [*seed, *arrays, *(_offset(tensors[index], self._where) for index in self._views)]

    def _take_again(self, taken: _Taken) -> None:
        """Reads the arrays again after another thread has written to a storage.

        A new array may have another shape or dtype, if the write was through another view, but it has the same number of bytes.
        """
        for index, storage in enumerate(taken.storages):
            if storage is not None:
                array = cast("jax.Array", storages.array_of(storage))
                if (array.shape, array.dtype) != self._expected[index]:
                    self._repack(taken, index, array)
                else:
                    taken.arrays[index] = array
                if meshes.exist() and meshes.sharding_of(taken.arrays[index]) != self._inputs[index].sharding:
                    before = cast("jax.Array", storages.array_of(storage))
                    taken.arrays[index] = meshes.copied_to(taken.arrays[index], self._inputs[index].sharding or self._place.jax_device)
                    storages.replace_arrays([(storage, before, taken.arrays[index])])

    def _repack(self, taken: _Taken, index: int, array: jax.Array) -> None:
        """Reinterprets an array that was written through a view of another shape or dtype as the program takes it.

        The storage keeps the result, so that the next call need not do this again. A storage that other inputs of this call share keeps its
        array, unless the program writes to it.
        """
        storage = taken.storages[index]
        taken.arrays[index] = copies.packed(array, *self._expected[index], self._place.jax_device)
        if index in self._slots or sum(other is storage for other in taken.storages) == 1:
            storages.replace_arrays([(storage, array, taken.arrays[index])])

    def export(self, results: Sequence[jax.Array], tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Puts the new arrays into the storages of written inputs, and returns the other results, with new tensors for arrays."""
        taken, count = cast("_Taken", tensors), len(self._slots)
        if taken.lent is not None:
            taken.lent.succeed((taken.storages[slot], array) for slot, array in zip(self._slots, results, strict=False))
            taken.lent = None
        device = self._place.device
        made = [storages.make(*item, device, array) for item, array in zip(self._made, results[count:], strict=False)]
        return [*made, *results[count + len(made) :]]

    def abandon(self, for_memory: bool, tensors: Sequence[torch.Tensor]) -> bool:
        taken = cast("_Taken", tensors)
        if taken.lent is not None:
            taken.lent.fail([(taken.storages[slot], tensors[slot]) for slot in self._slots])
            taken.lent = None
        return False

    def report(self, code: Any, checks: late_checks.Checks, name: str) -> None:
        if self._reports_late:
            late_checks.of(self._place.device).add(code, checks, name)
        elif (error := late_checks.failure(int(np.asarray(code)), checks)) is not None:
            raise error


def _offset(tensor: torch.Tensor, where: meshes.DeviceOrMesh) -> jax.Array:
    """Returns the offset of a tensor in its storage, in elements, as an int64[] array."""
    key = int(tensor.storage_offset()), meshes.key_of(where)
    array = _offsets.get(key)
    if array is None:
        with jax.enable_x64(True), jax.ensure_compile_time_eval():
            array = jax.device_put(np.int64(key[0]), where)
        _offsets.put(key, array)
    return array


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
