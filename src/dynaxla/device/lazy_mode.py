"""Lazy mode: ops are recorded, and run as one program when a value is read.

A storage holds a `DeferredContent` in place of an array. Each device has one recording, to which all threads add. Each value in a recording
has an id: results of ops have the ids 0, 1, 2, ..., and arrays from before the recording have -1, -2, ... A step of the recording is an op,
the id of the op's first result, and the ids of the values that the op takes. Example: for arrays a and b, (a + b) * b is the steps
(add, 0, -1, -2) and (mul, 1, 0, -2).

Values never change: a write to a storage gives the storage another value. So on one device, the code of the program depends only on the
steps, the shapes, dtypes and shardings of the arrays, the precision settings, and the set of values that are still needed when the
recording runs. `lazy_programs.py` caches programs by these.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from .. import forks, user_frames
from ..engine.executable import is_recording_runs
from ..errors import ExecutionError
from ..lowering import dtypes, kernel_refusals
from ..lowering.settings import Settings
from ..observe import metrics
from ..runtime import devices, meshes, private
from ..runtime.layout import row_major
from . import eager_mode, generators, lazy_programs, pjrt_devices, storages
from .functional_ops import FunctionalOp
from .lazy_programs import RecordedOp, TracedOp
from .op_compiler import NotLowered, NumberOperand, OpSpecialization, ResizeNeeded, StorageMetadata, TensorOperand, trace_op
from .strided_memory import StridedView

# A recording with this many ops runs, since XLA may take tens of milliseconds to compile each op. Training steps of large models have
# thousands of ops.
MAX_OPS = 4_000
# The largest number of cached traced ops.
CAPACITY = 16_384

_lock = forks.lock()  # held while an op is recorded and while a recording runs
_recordings: dict[int, LazyRecording] = {}  # by device index
# The value of `DeferredContent.previous` for a storage that the recording created.
_CREATED = object()


class _TracedOpCache(dict[Any, Any]):
    """A cache of traced ops. For an op that XLA does not compute, the entry is the reason (str).

    A full cache evicts its oldest entry rather than the least recently used one, so that a lookup costs no bookkeeping.
    """

    def put(self, key: Any, value: Any) -> None:
        self[key] = value
        while len(self) > CAPACITY:
            del self[next(iter(self))]
            metrics.add("evictions")


# Traced ops, by the key of `_LazyCall`.
_traced_ops = _TracedOpCache()


class DeferredContent(storages.StorageContent):
    """The content of a storage whose value is recorded and not computed yet.

    Attributes:
        recording: the recording; None once it has run.
        value_id: the value's id in the recording.
        shape_dtype: the shape and the dtype of the future array.
        previous: the content of the storage before the recording first wrote to it; `_CREATED` for a storage that the recording created.
        outcome: after the run, the array. After a failure, `previous`, or the exception if the recording created the storage.
        sharding: the sharding that the future array must have, such as that of `previous`; None if XLA chooses.
    """

    __slots__ = ("__weakref__", "outcome", "previous", "recording", "shape_dtype", "sharding", "value_id")

    def __init__(self, recording: LazyRecording, value_id: int, shape_dtype: tuple[Any, Any], previous: Any) -> None:
        self.recording: LazyRecording | None = recording
        self.value_id, self.shape_dtype, self.previous = value_id, shape_dtype, previous
        self.outcome: Any = None
        self.sharding = storages.sharding_of_content(previous) if meshes.may_have_sharded_arrays() else None

    def shape_and_sharding(self, storage: torch.UntypedStorage) -> storages.ShapeAndSharding:
        return self.shape_dtype[0], self.sharding

    def array(self, storage: torch.UntypedStorage) -> jax.Array | None:
        """Runs the recording, and returns the storage's array, which becomes the content of the storage.

        Raises: the errors of `LazyRecording.run`; ExecutionError if the recording has failed earlier and had created the storage.
        """
        with _lock:
            if (recording := self.recording) is not None:
                recording.run()
            if isinstance(self.outcome, BaseException):
                raise ExecutionError(
                    f"this tensor on {storage.device} has no value: the recorded ops that compute it have failed "
                    f"({type(self.outcome).__name__}: {self.outcome})",
                    hint="compute it again; tensors that had values before these ops still have them",
                ) from self.outcome
            storages.compare_and_swap([(storage, self, self.outcome)])
            return self.outcome

    def fail(self, error: Exception) -> None:
        """Makes the previous content the outcome. For a storage that the recording created, the outcome is the error."""
        self.outcome = error if self.previous is _CREATED else self.previous
        self.recording = self.previous = None


class LazyRecording:
    """The recorded ops of one device that have not run.

    Attributes:
        steps: the ops.
        value_count: the number of values that the steps compute.
        deferred: weak references to the contents of storages whose values the recording computes.
        arrays: the arrays from before the recording, with the ids -1, -2, ...
        is_finished: True once the recording has run or failed. It then takes no more ops.
    """

    def __init__(self, index: int) -> None:
        self.device = pjrt_devices.jax_device(index)
        self.platform = devices.platform_name(self.device)
        self.steps: list[RecordedOp] = []
        self.value_count = 0
        self.deferred: list[weakref.ref[DeferredContent]] = []
        self.arrays: list[jax.Array] = []
        # The id, shape and dtype of each of these arrays, by the array's Python id.
        self._value_ids: dict[int, tuple[int, tuple[Any, Any]]] = {}
        self.is_finished = False

    def value_id_of(self, array: jax.Array) -> tuple[int, tuple[Any, Any]]:
        """Returns the id of an array from before the recording, and its shape and dtype. A new array gets the next id."""
        entry = self._value_ids.get(id(array))
        if entry is None:
            self.arrays.append(array)
            entry = self._value_ids[id(array)] = -len(self.arrays), (array.shape, array.dtype)
        return entry

    def defer(self, value_id: int, shape_dtype: tuple[Any, Any], previous: Any = _CREATED) -> DeferredContent:
        """Creates the content of a storage that gets a value of this recording."""
        content = DeferredContent(self, value_id, shape_dtype, previous)
        self.deferred.append(weakref.ref(content))
        return content

    def run(self) -> None:
        """Computes all values that a storage still refers to, as one program.

        Raises: the error of the first failed check; CompilationError; ExecutionError; DeviceMismatch; ForkError. Storages then have their
        contents from before the recording, and a read of a storage that it created raises ExecutionError. Ctrl-C changes nothing.
        """
        with _lock:
            if self.is_finished:
                return
            if forks.has_lost_xla():
                raise forks.fork_error()
            while not self.is_finished:
                steps, arrays = list(self.steps), list(self.arrays)
                deferred = [content for reference in self.deferred if (content := reference()) is not None and content.recording is self]
                try:
                    wanted = [(content.value_id, content.sharding) for content in deferred]
                    results = lazy_programs.run(steps, arrays, wanted, self.device)
                except Exception as error:
                    for reference in self.deferred:  # not `deferred`: a finalizer may have added contents meanwhile
                        if (content := reference()) is not None and content.recording is self:
                            content.fail(error)
                    self._end()
                    raise
                if len(steps) == len(self.steps):  # otherwise a finalizer or a signal handler has added steps
                    for content, array in zip(deferred, results, strict=True):
                        content.outcome = array
                        content.recording = content.previous = None
                    self._end()

    def _end(self) -> None:
        self.is_finished = True
        self.steps, self.arrays, self.deferred, self._value_ids = [], [], [], {}


def run_all() -> None:
    """Runs the recordings of all devices. Raises: the error of the first recording that failed, after all have run."""
    failed: Exception | None = None
    for recording in list(_recordings.values()):
        try:
            recording.run()
        except Exception as error:
            failed = failed or error
    if failed is not None:
        raise failed


def record(functional_op: FunctionalOp, args: Sequence[Any], kwargs: Mapping[str, Any], targets: Sequence[torch.Tensor] = ()) -> Any:
    """Records an op: `eager_mode.run` in lazy mode. Raises: NotLowered; errors of `eager_mode.run` that depend on metadata only."""
    while True:
        with _lock:
            result = _record(functional_op, args, kwargs, targets)
        if isinstance(result, ResizeNeeded):
            for target, item in zip(targets, result.outputs, strict=True):
                eager_mode.resize_output(target, item.shape, item.stride)
        elif isinstance(result, _StorageInUse):
            # Waits for the running program, without `_lock`: the program may call torch's kernels, which may need the lock.
            storages.array_of(result.storage)
        else:
            return result


def _record(functional_op: FunctionalOp, args: Sequence[Any], kwargs: Mapping[str, Any], targets: Sequence[torch.Tensor]) -> Any:
    """Records an op and returns its results.

    If the op cannot be recorded yet, returns a `ResizeNeeded` or `_StorageInUse`, which the caller must handle without the lock.
    """
    while True:
        call = _LazyCall(functional_op, args, kwargs, targets)
        if call.storage_in_use is not None:
            return call.storage_in_use
        traced, number_inputs = eager_mode.find_or_compile(
            _traced_ops, _trace, call.key(), call.numbers, call.has_doubtful_numbers(), call.specialization
        )
        if isinstance(traced, str):
            raise NotLowered(traced)
        if isinstance(traced, ResizeNeeded):
            return traced
        step = call.step(traced, number_inputs)
        if call.recording.is_finished:  # a finalizer or a signal handler has read a value
            continue
        call.recording.steps.append(step)
        if call.write(traced, step.first_value_id):
            return call.results(traced, step.first_value_id)


@dataclass(frozen=True)
class _StorageInUse:
    """A storage whose content is an `InUseContent`: a running compiled program may write to it."""

    storage: torch.UntypedStorage


def _trace(specialization: OpSpecialization) -> TracedOp | ResizeNeeded:
    program = trace_op(specialization)
    return program if isinstance(program, ResizeNeeded) else TracedOp.of(specialization, program)


class _LazyCall:
    """One call of an op: its cache key and its operands.

    A slot is the index of an operand's storage, in the order of first use. A CPU operand has a slot of its own.

    Attributes:
        key_parts: the parts of the cache key.
        storages: the storage of each slot; None for a CPU operand.
        contents: the content of each slot's storage, as this call has read it; None for a CPU operand.
        value_ids: the id of the value of each slot; None for an unwritten storage.
        shape_dtypes: the shape and the dtype of the array of each slot; (None, None) for an unwritten storage.
        storage_in_use: a storage that a running program may write to. If there is one, the call cannot be recorded yet.
        numbers: the Python numbers that the op's program may take as inputs.
        dtypes: the dtypes of all tensors.
        generator: the user's random generator, if an argument is one.
        device: the torch device that runs the op.
        recording: the recording of that device.
    """

    def __init__(
        self, functional_op: FunctionalOp, args: Sequence[Any], kwargs: Mapping[str, Any], targets: Sequence[torch.Tensor]
    ) -> None:
        self.functional_op, self.args, self.kwargs, self.targets = functional_op, args, kwargs, targets
        self.key_parts: list[Any] = [functional_op.op]
        self.storages: list[torch.UntypedStorage | None] = []
        self._slot_of_storage: dict[int, int] = {}  # by the storage's Python id
        self.contents: list[Any] = []
        self.value_ids: list[int | None] = []
        self.shape_dtypes: list[tuple[Any, Any]] = []
        self.storage_in_use: _StorageInUse | None = None
        self.numbers: list[Any] = []
        self.dtypes: set[torch.dtype] = set()
        self.generator: torch.Generator | None = None
        self.device = _device_of(functional_op.op, args, kwargs, targets)
        recording = _recordings.get(self.device.index)
        if recording is None or recording.is_finished:
            recording = _recordings[self.device.index] = LazyRecording(self.device.index)
        self.recording = recording
        numbers = functional_op.number_arguments
        for index, value in enumerate(args):
            self._add_argument(value, index in numbers)
        for name, value in kwargs.items():
            self.key_parts.append(name)
            self._add_argument(value, name in numbers)
        if targets:
            self.key_parts.append(len(args))
            for target in targets:
                self._add_tensor(target)

    def _add_argument(self, value: Any, takes_number: bool, is_item: bool = False) -> None:
        """Adds an argument to the cache key, and its tensors and numbers to the operands.

        Args:
            value: the argument.
            takes_number: True if the op's program takes a Python number here as an input, so that the number is not part of the key.
            is_item: True for an item of a list.
        """
        kind = type(value)
        if kind is torch.Tensor or isinstance(value, torch.Tensor):
            self._add_tensor(value, is_item)
        elif kind is float or kind is int:
            self.key_parts.append(kind)
            if takes_number:
                self.numbers.append(value)
            else:
                self.key_parts.append(value if value and value == value else repr(value))
        elif kind is list or kind is tuple:
            self.key_parts.append(len(value))
            if value and set(map(type, value)) == {int}:
                self.key_parts.append(tuple(value))
            else:
                for item in value:
                    self._add_argument(item, False, True)
        elif kind is torch.Generator:
            self.generator = value
            self.key_parts.append(None)
        elif kind is torch.device and value.type == storages.NAME:
            if pjrt_devices.with_index(value) != self.device:
                raise eager_mode.mixed_devices_error(self.functional_op.op, self.device, value)
            self.key_parts.append(value)
        else:
            self.key_parts += kind, repr(value) if kind is complex else value

    def _add_tensor(self, tensor: torch.Tensor, is_item: bool = False) -> None:
        """Adds a tensor's metadata to the cache key. Adds its storage to the operands, unless another operand is on the same storage."""
        if tensor.device != self.device:
            return self._add_cpu_operand(tensor, is_item)
        storage = tensor.untyped_storage()
        key_parts = self.key_parts
        slot = self._slot_of_storage.setdefault(id(storage), len(self.storages))
        if slot < len(self.storages):
            key_parts.append(slot)
        else:
            content = storages.content_of(storage)
            if type(content) is DeferredContent and content.recording is self.recording:
                value_id, shape_dtype = content.value_id, content.shape_dtype
            elif type(content) is storages.InUseContent:
                self.storage_in_use = _StorageInUse(storage)
                value_id, shape_dtype = None, None
            else:
                if isinstance(content, storages.StorageContent):
                    content = content.array(storage)
                value_id, shape_dtype = (None, None) if content is None else self.recording.value_id_of(content)
            self.value_ids.append(value_id)
            self.shape_dtypes.append(shape_dtype or (None, None))
            key_parts += storage.nbytes(), shape_dtype
            if meshes.may_have_sharded_arrays():
                key_parts.append(storages.sharding_of_content(content))
            self.storages.append(storage)
            self.contents.append(content)
        dtype = tensor.dtype
        self.dtypes.add(dtype)
        key_parts += dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.is_conj(), tensor.is_neg()

    def _add_cpu_operand(self, tensor: torch.Tensor, is_item: bool) -> None:
        """Adds an operand on the CPU, which has rank 0 or is an index."""
        if not eager_mode.is_allowed_on_cpu(self.functional_op.op, tensor, is_item):
            raise eager_mode.mixed_devices_error(self.functional_op.op, tensor.device, self.device)
        value_id, shape_dtype = self.recording.value_id_of(storages.array_from_cpu(tensor, self.recording.device))
        self.value_ids.append(value_id)
        self.shape_dtypes.append(shape_dtype)
        self.storages.append(None)
        self.contents.append(None)
        self.dtypes.add(tensor.dtype)
        self.key_parts += "host", shape_dtype, tensor.dtype

    def key(self) -> Any:
        """Returns the cache key of the call, without the numbers that are inputs."""
        return self.recording.device.id, torch.get_default_dtype(), Settings.current(self.recording.platform), tuple(self.key_parts)

    def has_doubtful_numbers(self) -> bool:
        """True if torch's kernel may reject the numbers."""
        return bool(self.numbers) and kernel_refusals.may_refuse_numbers(self.functional_op.name, self.numbers, self.dtypes)

    def specialization(self) -> OpSpecialization:
        """Returns the call as an `OpSpecialization`, without reading the storages again: other threads may have changed them."""
        return _SpecializationBuilder(self).specialization

    def step(self, traced: TracedOp, number_inputs: Sequence[Any]) -> RecordedOp:
        """Returns the call as a step of the recording, and reserves the ids of its results."""
        seed = generators.draw_seed(self.generator, self.device.index) if traced.draws_random else None
        first_value_id = self.recording.value_count
        self.recording.value_count = first_value_id + len(traced.shape_dtypes)
        location, line = user_frames.location() if traced.checks else "", user_frames.short_location() if is_recording_runs() else ""
        key = (traced, first_value_id, *[self.value_ids[slot] for slot in traced.input_slots])
        return RecordedOp(key, first_value_id, number_inputs, seed, location, line)

    def write(self, traced: TracedOp, first_value_id: int) -> bool:
        """Gives the written storages the values that the recorded op computes for them.

        Returns False and changes nothing if the content of a storage has changed since it was read.

        Args:
            traced: the op.
            first_value_id: the id of the op's first result.
        """
        recording, changes, rewritten = self.recording, [], []
        for index, slot in enumerate(traced.written_slots):
            content, value_id, shape_dtype = self.contents[slot], first_value_id + index, traced.shape_dtypes[index]
            if type(content) is DeferredContent:  # the storage keeps this content, which gets the new value below
                changes.append((self.storages[slot], content, content))
                rewritten.append((content, value_id, shape_dtype))
            else:
                changes.append((self.storages[slot], content, recording.defer(value_id, shape_dtype, content)))
        if changes and not storages.compare_and_swap(changes):
            return False
        for content, value_id, shape_dtype in rewritten:
            content.value_id, content.shape_dtype = value_id, shape_dtype
        return True

    def results(self, traced: TracedOp, first_value_id: int) -> Any:
        """Creates the tensors that the op returns. Runs the recording if it has too many ops."""
        recording, shape_dtypes = self.recording, traced.shape_dtypes
        outputs: list[torch.Tensor | int | None] = []
        value_id = first_value_id + len(traced.written_slots)
        for item in traced.new_outputs:
            if not isinstance(item, tuple):
                outputs.append(item)
                continue
            nbytes, shape, stride, dtype = item
            storage = storages.make_storage(nbytes, self.device, recording.defer(value_id, shape_dtypes[value_id - first_value_id]))
            outputs.append(storages.tensor_on(storage, shape, stride, 0, dtype))
            value_id += 1
        if len(recording.steps) >= MAX_OPS:
            recording.run()
        return tuple(outputs) if traced.is_list else (outputs[0] if outputs else None)


class _SpecializationBuilder:
    """Builds the `OpSpecialization` of a call.

    This is a class, since nested functions that call each other form a reference cycle, which would keep the call's tensors alive.
    """

    def __init__(self, call: _LazyCall) -> None:
        self._call = call
        self._slots: list[StorageMetadata] = []
        self._numbers: list[Any] = []
        self._slot_of_storage: dict[int, int] = {}
        number_arguments = call.functional_op.number_arguments
        args = tuple([self._to_operand(value, index in number_arguments) for index, value in enumerate(call.args)])
        kwargs = {name: self._to_operand(value, name in number_arguments) for name, value in call.kwargs.items()}
        targets = tuple([self._tensor_operand(target) for target in call.targets])
        slots, numbers = tuple(self._slots), tuple(self._numbers)
        self.specialization = OpSpecialization(call.functional_op, args, kwargs, targets, slots, call.recording.device, numbers)

    def _to_operand(self, value: Any, takes_number: bool) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor_operand(value)
        if takes_number and type(value) in (float, int):
            self._numbers.append(value)
            return NumberOperand(len(self._numbers) - 1, type(value))
        if isinstance(value, (list, tuple)):
            return tuple([self._to_operand(item, False) for item in value])
        return None if isinstance(value, torch.Generator) else value

    def _tensor_operand(self, tensor: torch.Tensor) -> TensorOperand:
        if tensor.device != self._call.device:
            shape = tuple(tensor.shape)
            self._slots.append(StorageMetadata(tensor.nbytes, shape, dtypes.to_jax(tensor.dtype)))
            return TensorOperand(len(self._slots) - 1, StridedView(tensor.dtype, shape, row_major(shape)))
        storage = tensor.untyped_storage()
        slot = self._slot_of_storage.setdefault(private.id_of_storage(storage), len(self._slots))
        if slot == len(self._slots):
            sharding = storages.sharding_of_content(self._call.contents[slot]) if meshes.may_have_sharded_arrays() else None
            self._slots.append(StorageMetadata(storage.nbytes(), *self._call.shape_dtypes[slot], sharding))
        return TensorOperand(slot, StridedView.of(tensor))


def _device_of(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], targets: Sequence[torch.Tensor]) -> torch.device:
    """Returns the device that runs an op: the first device "jax" among its operands and `device` argument, or else "jax:0"."""
    if args and isinstance(args[0], torch.Tensor) and args[0].device.type == storages.NAME:
        return args[0].device
    for value in pytree.tree_leaves((args, kwargs, targets)):
        device = value.device if isinstance(value, torch.Tensor) else value
        if isinstance(device, torch.device) and device.type == storages.NAME:
            return pjrt_devices.with_index(device)
    return pjrt_devices.with_index(torch.device(storages.NAME))
