"""Eager mode on the device: each op is one compiled program, cached by the metadata of its operands.

The program takes the arrays in the operands' storages. It returns new arrays for the storages that the op writes to, and for new tensors.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.extend
import numpy as np
import torch
from jax.sharding import NamedSharding
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from .. import forks
from ..engine.executable import execution_error, random_numbers_under_jit
from ..lowering import dtypes, kernel_refusals
from ..lowering.ops.sharding_constraints import sharding_of_call
from ..lowering.promotion import number
from ..lowering.settings import Settings
from ..observe import metrics
from ..runtime import devices, late_checks, meshes, private
from ..runtime.cache import LeastRecentlyUsed
from ..runtime.layout import row_major
from ..torch_ops import aten
from . import generators, pjrt_devices, storages
from .cpu_fallback import run_on_cpu
from .functional_ops import FunctionalOp, functional_op_of, overload_for_numbers
from .op_compiler import (
    NewTensor,
    NotLowered,
    NumberOperand,
    OpSpecialization,
    ResizeNeeded,
    StorageMetadata,
    TensorOperand,
    compile_op,
    trace_op,
)
from .strided_memory import StridedView

# The largest number of keys in each of the two caches of programs.
CAPACITY = 4096
# Compiled ops, by the metadata of their operands. A value is a program, a tuple of programs that take the op's numbers as inputs,
# CONSTANT_NUMBERS, a `ResizeNeeded`, or the reason (str) why XLA does not compute the op.
_programs: LeastRecentlyUsed[Any] = LeastRecentlyUsed(CAPACITY)
# Traced ops for operands that hold tracers, with the same keys and values. They become part of a function that JAX traces.
_traced_programs: LeastRecentlyUsed[Any] = LeastRecentlyUsed(CAPACITY)
# The value in these caches for an op whose numbers are compiled in. The programs then have further keys, one for each set of numbers.
CONSTANT_NUMBERS = object()
_NUMBER_TYPES = (int, float, bool, complex)
# Python numbers as arrays of rank 0.
_numbers: LeastRecentlyUsed[jax.Array] = LeastRecentlyUsed(256)
# The largest number of programs of one key that take the op's numbers as inputs. Once it is reached, other numbers are compiled in.
_MAX_PROGRAMS_WITH_NUMBER_INPUTS = 8
# Ops that accept index tensors on the CPU, as in ATen.
_CPU_INDEX_OPS = frozenset({"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"})


class _OpCall:
    """The arguments of one call, split into the metadata for the cache key and the arrays for the program.

    A slot is the index of an operand's storage, in the order of first use. A CPU operand has a slot of its own.

    Attributes:
        op: the op.
        device: the torch device of the operands; None before the first operand on the device.
        storages: the storages, by slot, without CPU operands.
        arrays: the array of each slot; None for a storage that nobody has written to, and for a CPU operand before `place_operands`.
        slot_metadata: the metadata of each slot.
        generator: the user's random generator, if an argument is one.
        numbers: the Python numbers that the program may take as inputs.
        dtypes: the dtypes of all tensors.
    """

    def __init__(self, op: OpOverload) -> None:
        self.op = op
        self.device: torch.device | None = None
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.arrays: list[jax.Array | None] = []
        self.slot_metadata: list[StorageMetadata] = []
        self._slot_of_storage: dict[int, int] = {}
        self._cpu_operands: list[tuple[int, torch.Tensor]] = []
        self._other_device: torch.device | None = None
        self.generator: torch.Generator | None = None
        self.numbers: list[Any] = []
        self.dtypes: set[torch.dtype] = set()

    def to_operands(
        self, number_arguments: frozenset[int | str], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Converts each argument by `to_operand`, or by `_to_operand_or_number` if its position or name is in `number_arguments`."""
        to_operand = self.to_operand
        if not number_arguments:
            return tuple([to_operand(value) for value in args]), {name: to_operand(value) for name, value in kwargs.items()}
        to_number = self._to_operand_or_number
        operands = tuple([(to_number if index in number_arguments else to_operand)(value) for index, value in enumerate(args)])
        return operands, {name: (to_number if name in number_arguments else to_operand)(value) for name, value in kwargs.items()}

    def _to_operand_or_number(self, value: Any) -> Any:
        """Converts an argument as `to_operand` does, but a Python number to a `NumberOperand`."""
        if type(value) is float or type(value) is int:
            self.numbers.append(value)
            return NumberOperand(len(self.numbers) - 1, type(value))
        return self.to_operand(value)

    def to_operand(self, value: Any, is_item: bool = False) -> Any:
        """Replaces each tensor in an argument by a `TensorOperand`, and stores its array. `is_item`: True for an item of a list."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value, is_item)
        if isinstance(value, (list, tuple)):
            return tuple([self.to_operand(item, True) for item in value])
        if isinstance(value, torch.Generator):
            self.generator = value
            return None
        if isinstance(value, torch.device) and value.type == storages.NAME:
            self._set_device(pjrt_devices.with_index(value))
        return value

    def _set_device(self, device: torch.device) -> None:
        if self.device is None:
            self.device = device
        elif self.device != device:
            raise mixed_devices_error(self.op, self.device, device)

    def _tensor(self, tensor: torch.Tensor, is_item: bool) -> TensorOperand:
        """Returns the operand for a tensor, and gives its storage a slot. `place_operands` adds the array of a CPU operand later."""
        is_on_cpu = is_allowed_on_cpu(self.op, tensor, is_item)
        self.dtypes.add(tensor.dtype)
        if tensor.device.type != storages.NAME:
            if not is_on_cpu:
                self._other_device = tensor.device
            self._cpu_operands.append((len(self.arrays), tensor))
            shape = tuple(tensor.shape)
            self._add(None, StorageMetadata(tensor.nbytes, shape, dtypes.to_jax(tensor.dtype)))
            return TensorOperand(len(self.arrays) - 1, StridedView(tensor.dtype, shape, row_major(shape)))
        self._set_device(tensor.device)
        storage = tensor.untyped_storage()
        identity = private.id_of_storage(storage)
        slot = self._slot_of_storage.get(identity)
        if slot is None:
            slot = self._slot_of_storage[identity] = len(self.arrays)
            array = storages.array_of(storage)
            self.storages[slot] = storage
            self._add(array, StorageMetadata(storage.nbytes(), *((None, None) if array is None else (array.shape, array.dtype))))
        return TensorOperand(slot, StridedView.of(tensor))

    def _add(self, array: jax.Array | None, metadata: StorageMetadata) -> None:
        self.arrays.append(array)
        self.slot_metadata.append(metadata)

    def place_operands(self, is_traced: bool, op_sharding: NamedSharding | None) -> tuple[jax.Device, NamedSharding | None]:
        """Copies operands on the CPU to the device or the mesh.

        Returns the device, and the replicated sharding of the operands' mesh (None without a mesh).

        Args:
            is_traced: True if an operand holds a JAX tracer.
            op_sharding: the sharding in the op's own arguments, if there is one.

        Raises: RuntimeError if a tensor is on another device; DeviceMismatch for two meshes.
        """
        assert self.device is not None
        if self._other_device is not None:
            raise mixed_devices_error(self.op, self._other_device, self.device)
        device = pjrt_devices.jax_device(self.device.index)
        mesh_sharding = self._replicate_on_mesh(op_sharding) if meshes.may_have_sharded_arrays() and not is_traced else None
        for slot, tensor in self._cpu_operands:
            self.arrays[slot] = storages.array_from_cpu(tensor, mesh_sharding or device)
            self.slot_metadata[slot] = self.slot_metadata[slot]._replace(sharding=mesh_sharding)
        return device, mesh_sharding

    def _replicate_on_mesh(self, op_sharding: NamedSharding | None) -> NamedSharding | None:
        """Replicates operands that are on one device over the mesh. Returns the mesh's replicated sharding, or None without a mesh."""
        shardings = [meshes.sharding_of(array) for array in self.arrays]
        mesh_sharding = meshes.common([*shardings, op_sharding])
        for slot, storage in self.storages.items() if mesh_sharding is not None else ():
            array = self.arrays[slot]
            if array is not None and mesh_sharding is not None:
                if shardings[slot] is None:
                    array = self.arrays[slot] = storages.replicate(storage, array, mesh_sharding)
                self.slot_metadata[slot] = self.slot_metadata[slot]._replace(sharding=meshes.sharding_of(array))
        return mesh_sharding


def is_allowed_on_cpu(op: OpOverload, tensor: torch.Tensor, is_item: bool) -> bool:
    """True if an operand is on the CPU, and ATen accepts that: the operand has rank 0, or is an index tensor of an indexing op.

    Args:
        op: the op.
        tensor: the operand.
        is_item: True if the operand is an item of a list. Ops of `_CPU_INDEX_OPS` take their index tensors, and no others, in a list.

    Raises: RuntimeError for a dtype that JAX does not have; NotLowered for another layout than strided.
    """
    if tensor.layout != torch.strided:
        raise NotLowered(f"it takes a tensor of layout {tensor.layout}")
    if not dtypes.is_supported(tensor.dtype):
        raise RuntimeError(f"{op} takes a tensor of {tensor.dtype}, and JAX has no such dtype")
    return tensor.device.type == "cpu" and (not tensor.dim() or (is_item and op._schema.name in _CPU_INDEX_OPS))


def mixed_devices_error(op: OpOverload, first: torch.device, second: torch.device) -> RuntimeError:
    """Returns the error for an op whose operands are on two devices."""
    names = " and ".join(sorted({str(first), str(second)}))
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {names}! (in {op}; move one of them with .to)"
    )


def kernel(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """The device's general kernel, which torch's dispatcher calls for each op without a kernel of its own.

    Raises: RuntimeError for operands on several devices; ForkError; the error of a failed check of the op. Nothing has been written then.
    """
    functional_op = functional_op_of(op)
    tensor_positions = functional_op.tensor_positions
    if positions := tuple([index for index in tensor_positions if index < len(args) and type(args[index]) in _NUMBER_TYPES]):
        op = overload_for_numbers(op, positions)
        functional_op = functional_op_of(op)
    if functional_op.is_view:
        return private.call_cpu_kernel(op, *args, **kwargs)
    if functional_op.functional is None:
        return run_on_cpu(op, args, kwargs, "it has no functional form")
    if forks.has_lost_xla():
        raise forks.fork_error()
    written = _written_arguments(op, functional_op.written, args, kwargs)
    if any(not isinstance(target, torch.Tensor) for target in written):
        return run_on_cpu(op, args, kwargs, "it writes to a list of tensors")
    for target in written:
        if target.device.type != storages.NAME:
            operands = [item for item in tree_leaves((args, kwargs)) if storages.is_jax_tensor(item)]
            raise mixed_devices_error(op, target.device, operands[0].device)
    try:
        results = run(functional_op, args, kwargs, written)
    except NotLowered as reason:
        return run_on_cpu(op, args, kwargs, str(reason))
    if not functional_op.written:
        return results
    return written[0] if len(op._schema.returns) == 1 else (tuple(written) if op._schema.returns else None)


def _written_arguments(op: OpOverload, names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    return [kwargs[name] if name in kwargs else args[_argument_positions(op)[name]] for name in names]


@functools.cache
def _argument_positions(op: OpOverload) -> dict[str, int]:
    return {item.name: index for index, item in enumerate(op._schema.arguments)}


# The function that records ops in lazy mode; None in eager mode.
_recorder: Callable[..., Any] | None = None


def set_recorder(function: Callable[..., Any] | None) -> None:
    """Sets the function that `run` calls, with the arguments of `run`, instead of computing the op. None turns this off."""
    global _recorder
    _recorder = function


def run(functional_op: FunctionalOp, args: Sequence[Any], kwargs: Mapping[str, Any], targets: Sequence[torch.Tensor] = ()) -> Any:
    """Computes an op, or records it in lazy mode. Writes the results to the targets. Without targets, returns them as new tensors.

    Raises: NotLowered; the errors of `kernel`.
    """
    is_traced = storages.any_traced_tensor(tree_leaves((args, kwargs, list(targets)))) if storages.tracer_checks_enabled() else False
    if _recorder is not None and not is_traced:
        return _recorder(functional_op, args, kwargs, targets)
    call = _OpCall(functional_op.op)
    operands, named_operands = call.to_operands(functional_op.number_arguments, args, kwargs)
    target_operands = tuple([call.to_operand(target) for target in targets])
    call.device = call.device or pjrt_devices.with_index(torch.device(storages.NAME))
    device, mesh_sharding = call.place_operands(is_traced, sharding_of_call(functional_op.op, args))
    settings = Settings.current(devices.platform_name(device))
    slots = tuple(call.slot_metadata)
    key = (
        functional_op.op, meshes.device_key(mesh_sharding or device), _hashable(operands),
        tuple([(name, _hashable(value)) for name, value in named_operands.items()]),
        target_operands, slots, torch.get_default_dtype(), settings,
    )  # fmt: skip
    is_doubtful = bool(call.numbers) and kernel_refusals.may_refuse_numbers(functional_op.name, call.numbers, call.dtypes)
    program, number_inputs = find_or_compile(
        _traced_programs if is_traced else _programs, trace_op if is_traced else compile_op, key, call.numbers, is_doubtful,
        lambda: OpSpecialization(
            functional_op, operands, named_operands, target_operands, slots, device, tuple(call.numbers), mesh_sharding
        ),
    )  # fmt: skip
    if isinstance(program, str):
        raise NotLowered(program)
    if isinstance(program, ResizeNeeded):
        for target, item in zip(targets, program.outputs, strict=True):
            resize_output(target, item.shape, item.stride)
        return run(functional_op, args, kwargs, targets)
    arrays = [call.arrays[slot] for slot in program.input_slots]
    if is_traced and program.draws_random:
        raise random_numbers_under_jit(str(functional_op.op))
    if program.draws_random:
        arrays.append(generators.seed_array(call.generator, call.device.index, mesh_sharding or device))
    arrays += [_number_array(value, dtype, mesh_sharding or device) for value, dtype in number_inputs]
    try:
        results = _inline(program.traced, arrays) if is_traced else list(program.call(arrays))
    except jax.errors.JaxRuntimeError as error:
        raise execution_error(str(functional_op.op), error) from error
    if is_traced and program.checks:
        results.pop()  # the check code is a tracer, whose value is not known here
    elif program.checks and (failure := late_checks.failure(int(np.asarray(results.pop())), program.checks)) is not None:
        raise failure
    metrics.add("device_ops")
    if program.written_slots:
        changes = [(call.storages[slot], call.arrays[slot], results.pop(0)) for slot in program.written_slots]
        if not storages.compare_and_swap(changes):  # another thread has written to one of the storages
            return run(functional_op, args, kwargs, targets)
    outputs = [
        storages.new_tensor(item.shape, item.stride, item.dtype, call.device, results.pop(0)) if isinstance(item, NewTensor) else item
        for item in program.new_outputs
    ]
    return tuple(outputs) if program.is_list else (outputs[0] if outputs else None)


def _inline(traced: jax.stages.Traced, arrays: Sequence[Any]) -> list[Any]:
    """Inlines a traced program into the function that JAX traces, and returns its results."""
    try:
        with jax.enable_x64(True):
            return list(jax.extend.core.jaxpr_as_fun(traced.jaxpr)(*arrays))
    except jax.errors.UnexpectedTracerError as error:
        raise storages.escaped_tracer_error(error) from error


def run_or_fall_back(op: OpOverload, args: Sequence[Any], targets: Sequence[torch.Tensor] = ()) -> Any:
    """Computes a functional op as `run` does, or by torch's CPU kernel if XLA does not compute the op."""
    try:
        return run(functional_op_of(op), args, {}, targets)
    except NotLowered as reason:
        result = run_on_cpu(op, args, {}, str(reason))
    for target, value in zip(targets, [result], strict=True) if targets else ():
        run(functional_op_of(aten.clone.default), (value,), {}, [target])
    return result


class Cache(Protocol):
    """A cache that `find_or_compile` can use."""

    def get(self, key: Any, /) -> Any: ...

    def put(self, key: Any, value: Any, /) -> None: ...


def find_or_compile(
    cache: Cache,
    compile_fn: Callable[[OpSpecialization], Any],
    key: Any,
    numbers: Sequence[Any],
    is_doubtful: bool,
    specialization: Callable[[], OpSpecialization],
) -> tuple[Any, Sequence[tuple[Any, np.dtype]]]:
    """Returns the program of an op, and the numbers that the program takes as inputs, with their dtypes.

    In place of the program, returns a `ResizeNeeded` if the targets must be resized first, or the reason (str) why XLA cannot compute the
    op.

    Args:
        cache: the cache of programs.
        compile_fn: compiles or traces an op.
        key: identifies the call, without its numbers.
        numbers: the Python numbers that the program may take as inputs.
        is_doubtful: True if torch's kernel may reject these numbers. They are then compiled in, and `compile_fn` checks them.
        specialization: returns the op to compile. Called only if the cache has no program.

    Raises: the errors of `compile_fn`.
    """
    found = _look_up(cache, key, numbers, is_doubtful)
    if found is None:
        with _compile_locks.exclusive((id(cache), key)):
            # Another thread may have stored the program meanwhile.
            found = _look_up(cache, key, numbers, is_doubtful) or _compile_and_store(
                cache, compile_fn, key, numbers, is_doubtful, specialization
            )
    return found


def _look_up(cache: Cache, key: Any, numbers: Sequence[Any], is_doubtful: bool) -> tuple[Any, Sequence[tuple[Any, np.dtype]]] | None:
    """Returns the result of `find_or_compile` if it is in the cache, else None."""
    if numbers:
        cached = CONSTANT_NUMBERS if is_doubtful else cache.get(key)
        if isinstance(cached, ResizeNeeded):
            return cached, ()
        variants = cached if isinstance(cached, tuple) else ()
        for program in variants:
            if (number_inputs := program.variant.inputs(numbers)) is not None:
                return program, number_inputs
        if cached is not CONSTANT_NUMBERS and len(variants) < _MAX_PROGRAMS_WITH_NUMBER_INPUTS:
            return None
        key = key, _hashable(tuple(numbers))
    found = cache.get(key)  # a program, or the reason (str) why there is none
    return None if found is None else (found, ())


def _compile_and_store(
    cache: Cache,
    compile_fn: Callable[[OpSpecialization], Any],
    key: Any,
    numbers: Sequence[Any],
    is_doubtful: bool,
    specialization: Callable[[], OpSpecialization],
) -> Any:
    """Compiles a program that is not in the cache, and stores it there. Returns the result of `find_or_compile`."""
    if numbers:
        cached = CONSTANT_NUMBERS if is_doubtful else cache.get(key)
        variants = cached if isinstance(cached, tuple) else ()
        if cached is not CONSTANT_NUMBERS and len(variants) < _MAX_PROGRAMS_WITH_NUMBER_INPUTS:
            try:
                program = compile_fn(specialization())
            except Exception:  # the next attempt, with the numbers compiled in, succeeds or raises the right error
                cache.put(key, CONSTANT_NUMBERS)
                if (found := _look_up(cache, key, numbers, is_doubtful)) is not None:
                    return found
            else:
                cache.put(key, program if isinstance(program, ResizeNeeded) else (*variants, program))
                if isinstance(program, ResizeNeeded):
                    return program, ()
                number_inputs = program.variant.inputs(numbers)
                assert number_inputs is not None
                return program, number_inputs
        key = key, _hashable(tuple(numbers))
    try:
        program = compile_fn(specialization().with_constant_numbers() if numbers else specialization())
    except NotLowered as reason:
        program = str(reason)
    cache.put(key, program)
    return program, ()


class _KeyedLocks:
    """A lock for each key. If several threads need the same new program, one thread compiles it while the others wait.

    If the compilation fails, the next of the waiting threads compiles the program.
    """

    def __init__(self) -> None:
        self._lock = forks.lock()
        self._locks: dict[Any, list[Any]] = {}  # by key: a lock, and the number of threads that hold it or wait for it
        self._thread = threading.local()

    @contextlib.contextmanager
    def exclusive(self, key: Any) -> Iterator[None]:
        """Holds the lock of a key inside the block, unless this thread already holds the lock of another key."""
        if getattr(self._thread, "is_compiling", False):  # two threads that need each other's program would wait forever
            yield
            return
        with self._lock:
            entry = self._locks.setdefault(key, [forks.lock(), 0])
            entry[1] += 1
        try:
            with entry[0]:
                self._thread.is_compiling = True
                try:
                    yield
                finally:
                    self._thread.is_compiling = False
        finally:
            with self._lock:
                entry[1] -= 1
                if not entry[1]:
                    del self._locks[key]


_compile_locks = _KeyedLocks()


def _number_array(value: Any, dtype: np.dtype, device_or_mesh: meshes.DeviceOrMesh) -> jax.Array:
    """Returns a Python number as an array of rank 0 on a device or mesh."""
    kind = type(value)
    # The sign distinguishes 0.0 from -0.0.
    key = kind, value, math.copysign(1.0, value) if kind is float else None, dtype, meshes.device_key(device_or_mesh)
    array = _numbers.get(key)
    if array is None:
        array = meshes.device_put(number(value, dtype), device_or_mesh)
        _numbers.put(key, array)
    return array


def resize_output(target: torch.Tensor, shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    """Resizes an `out` argument to the shape of the result. Warns as torch does, if the argument has elements."""
    if tuple(target.shape) == shape:
        return
    if target.numel():
        warnings.warn(
            f"An output with one or more elements was resized since it had shape {list(target.shape)}, which does not match the required "
            f"output shape {list(shape)}. Reuse it with an explicit out.resize_(0) before.",
            stacklevel=2,
        )
    storages.resize(target, shape, stride)


def _hashable(value: Any) -> Any:
    """Returns a hashable key of an argument. 1, 1.0 and True have different keys, and so have 0.0 and -0.0."""
    if value is None or type(value) is TensorOperand:
        return value
    if type(value) is tuple:
        return tuple([_hashable(item) for item in value])
    if isinstance(value, float):
        return "float", repr(value)
    if isinstance(value, (bool, int, complex)):
        return type(value), repr(value)
    return value
