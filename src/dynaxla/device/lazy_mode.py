"""Lazy mode: ops are recorded, and run as one program when a value is read.

A storage holds a `DeferredContent` in place of an array. Each device has one recording, to which all threads add. A step of it is an op,
the number of the op's first result, and the numbers of the values that it takes. Results are numbered from 0; arrays from before the
recording are -1, -2, ... Values never change: a write to a storage gives the storage another value. So the steps are everything that the
program depends on, except for the set of values that are still needed when it runs, and they are its cache key.
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
from ..engine.executable import is_watched
from ..errors import ExecutionError
from ..lowering import dtypes, kernel_refusals
from ..lowering.settings import Settings
from ..observe import metrics
from ..runtime import meshes, private
from ..runtime.layout import row_major
from . import eager_mode, generators, lazy_programs, pjrt_devices, storages
from .counterparts import FunctionalOp
from .lazy_programs import RecordedOp, TracedOp
from .op_compiler import NotLowered, NumberOperand, OpSpecialization, Resized, StorageMetadata, TensorOperand, traced_op
from .strided_memory import StridedView

# A recording runs when it has this many ops, since XLA may take tens of milliseconds to compile each. Training steps of large models have
# thousands of ops.
MOST = 4_000
# The number of traced ops to keep.
CAPACITY = 16_384

_lock = forks.lock()
_recordings: dict[int, LazyRecording] = {}
_NOTHING = object()


class _Table(dict[Any, Any]):
    """A cache of traced ops, and of reasons (str) why XLA does not compute others.

    When it is full, the oldest entry goes, not the least recently used one, so that a lookup costs no bookkeeping.
    """

    def put(self, key: Any, value: Any) -> None:
        self[key] = value
        while len(self) > CAPACITY:
            del self[next(iter(self))]
            metrics.add("evictions")


_ops = _Table()


class DeferredContent(storages.StorageContent):
    """The content of a storage whose value is recorded.

    Attributes:
        recording: None once it has run.
        value: the number of the value in the recording.
        kind: the shape and the dtype of the future array.
        before: the content of the storage before the recording first wrote to it; _NOTHING for a storage that the recording created.
        outcome: the array, or the exception that made the recording fail.
        sharding: of the future array, taken from `before`; None where XLA chooses.
    """

    __slots__ = ("__weakref__", "before", "kind", "outcome", "recording", "sharding", "value")

    def __init__(self, recording: LazyRecording, value: int, kind: tuple[Any, Any], before: Any) -> None:
        self.recording: LazyRecording | None = recording
        self.value, self.kind, self.before = value, kind, before
        self.outcome: Any = None
        self.sharding = storages.sharding_of_held(before) if meshes.exist() else None

    def lies(self, storage: torch.UntypedStorage) -> storages.Lies:
        return self.kind[0], self.sharding

    def array(self, storage: torch.UntypedStorage) -> jax.Array | None:
        with _lock:
            if (recording := self.recording) is not None:
                recording.run()
            if isinstance(self.outcome, BaseException):
                raise ExecutionError(
                    f"this tensor on {storage.device} has no value: the recorded ops that compute it have failed "
                    f"({type(self.outcome).__name__}: {self.outcome})",
                    hint="compute it again; tensors that had values before these ops still have them",
                ) from self.outcome
            storages.replace_arrays([(storage, self, self.outcome)])
            return self.outcome

    def fail(self, error: Exception) -> None:
        self.outcome = error if self.before is _NOTHING else self.before
        self.recording = self.before = None


class LazyRecording:
    """The recorded ops of one device that have not run."""

    def __init__(self, index: int) -> None:
        self.device = pjrt_devices.jax_device(index)
        self.platform = "cuda" if self.device.platform == "gpu" else self.device.platform
        self.steps: list[RecordedOp] = []
        self.values = 0
        self.waiting: list[weakref.ref[DeferredContent]] = []
        self.arrays: list[jax.Array] = []
        self._known: dict[int, tuple[int, tuple[Any, Any]]] = {}
        self.is_over = False

    def value_of(self, array: jax.Array) -> tuple[int, tuple[Any, Any]]:
        """Returns the number of an array from before the recording, and its shape and dtype."""
        found = self._known.get(id(array))
        if found is None:
            self.arrays.append(array)
            found = self._known[id(array)] = -len(self.arrays), (array.shape, array.dtype)
        return found

    def wait(self, value: int, kind: tuple[Any, Any], before: Any = _NOTHING) -> DeferredContent:
        made = DeferredContent(self, value, kind, before)
        self.waiting.append(weakref.ref(made))
        return made

    def run(self) -> None:
        """Computes all values that a storage still refers to, as one program.

        Raises: the error of the first failed check; CompilationError; ExecutionError; ForkError. The storages then hold their contents from
        before the recording, and reading a storage that the recording created raises ExecutionError. If KeyboardInterrupt interrupts it,
        nothing has changed.
        """
        with _lock:
            if self.is_over:
                return
            if forks.has_lost_xla():
                raise forks.fork_error()
            while not self.is_over:
                steps, arrays = list(self.steps), list(self.arrays)
                waiting = [found for reference in self.waiting if (found := reference()) is not None and found.recording is self]
                try:
                    wanted = [(found.value, found.sharding) for found in waiting]
                    results = lazy_programs.run(steps, arrays, wanted, self.device)
                except Exception as error:
                    for reference in self.waiting:  # includes those that a finalizer has added meanwhile
                        if (found := reference()) is not None and found.recording is self:
                            found.fail(error)
                    self._end()
                    raise
                if len(steps) == len(self.steps):  # otherwise a finalizer or a signal handler has added steps
                    for found, array in zip(waiting, results, strict=True):
                        found.outcome = array
                        found.recording = found.before = None
                    self._end()

    def _end(self) -> None:
        self.is_over = True
        self.steps, self.arrays, self.waiting, self._known = [], [], [], {}


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


def record(form: FunctionalOp, args: Sequence[Any], kwargs: Mapping[str, Any], targets: Sequence[torch.Tensor] = ()) -> Any:
    """Records an op that `op_by_op.run` would compute. Raises: those errors of `run` that depend on metadata only; NotLowered."""
    while True:
        with _lock:
            found = _record(form, args, kwargs, targets)
        if isinstance(found, Resized):
            for target, item in zip(targets, found.made, strict=True):
                eager_mode.resize_output(target, item.shape, item.stride)
        elif isinstance(found, _StorageInUse):  # wait for the program without the lock, which torch kernels called by the program may need
            storages.array_of(found.storage)
        else:
            return found


def _record(form: FunctionalOp, args: Sequence[Any], kwargs: Mapping[str, Any], targets: Sequence[torch.Tensor]) -> Any:
    """Records an op and returns its results, or a `Resized` or `_StorageInUse` that the caller must handle first, without the lock."""
    while True:
        notes = _OpNotes(form, args, kwargs, targets)
        if notes.lent is not None:
            return notes.lent
        known, taken = eager_mode.find(_ops, _known, notes.key(), notes.numbers, notes.is_unsure(), notes.problem)
        if isinstance(known, str):
            raise NotLowered(known)
        if isinstance(known, Resized):
            return known
        step = notes.step(known, taken)
        if notes.recording.is_over:  # a finalizer or a signal handler has read a value
            continue
        notes.recording.steps.append(step)
        if notes.write(known, step.first):
            return notes.results(known, step.first)


@dataclass(frozen=True)
class _StorageInUse:
    """A storage whose array is in use by a running compiled program that may write to it."""

    storage: torch.UntypedStorage


def _known(problem: OpSpecialization) -> TracedOp | Resized:
    found = traced_op(problem)
    return found if isinstance(found, Resized) else TracedOp.of(problem, found)


class _OpNotes:
    """One call of an op: its cache key and its operands. Slots are storages, in the order of their first use."""

    def __init__(self, form: FunctionalOp, args: Sequence[Any], kwargs: Mapping[str, Any], targets: Sequence[torch.Tensor]) -> None:
        self.form, self.args, self.kwargs, self.targets = form, args, kwargs, targets
        self.parts: list[Any] = [form.op]
        self.storages: list[torch.UntypedStorage | None] = []
        self.slots: dict[int, int] = {}
        self.held: list[Any] = []
        self.values: list[int | None] = []
        self.kinds: list[tuple[Any, Any]] = []
        self.lent: _StorageInUse | None = None
        self.numbers: list[Any] = []
        self.dtypes: set[torch.dtype] = set()
        self.generator: torch.Generator | None = None
        self.device = _device_of(form.op, args, kwargs, targets)
        recording = _recordings.get(self.device.index)
        if recording is None or recording.is_over:
            recording = _recordings[self.device.index] = LazyRecording(self.device.index)
        self.recording = recording
        numbers = form.numbers
        for index, value in enumerate(args):
            self._note(value, index in numbers)
        for name, value in kwargs.items():
            self.parts.append(name)
            self._note(value, name in numbers)
        if targets:
            self.parts.append(len(args))
            for target in targets:
                self._tensor(target)

    def _note(self, value: Any, is_open: bool) -> None:
        kind = type(value)
        if kind is torch.Tensor or isinstance(value, torch.Tensor):
            self._tensor(value)
        elif kind is float or kind is int:
            self.parts.append(kind)
            if is_open:
                self.numbers.append(value)
            else:
                self.parts.append(value if value and value == value else repr(value))
        elif kind is list or kind is tuple:
            self.parts.append(len(value))
            if value and set(map(type, value)) == {int}:
                self.parts.append(tuple(value))
            else:
                for item in value:
                    self._note(item, False)
        elif kind is torch.Generator:
            self.generator = value
            self.parts.append(None)
        elif kind is torch.device and value.type == storages.NAME:
            if pjrt_devices.with_index(value) != self.device:
                raise eager_mode.mixed(self.form.op, self.device, value)
            self.parts.append(value)
        else:
            self.parts += kind, repr(value) if kind is complex else value

    def _tensor(self, tensor: torch.Tensor) -> None:
        if tensor.device != self.device:
            return self._host(tensor)
        storage = tensor.untyped_storage()
        parts = self.parts
        slot = self.slots.setdefault(id(storage), len(self.storages))
        if slot < len(self.storages):
            parts.append(slot)
        else:
            held = storages.held_by(storage)
            if type(held) is DeferredContent and held.recording is self.recording:
                value, kind = held.value, held.kind
            elif type(held) is storages.InUse:
                self.lent = _StorageInUse(storage)
                value, kind = None, None
            else:
                if isinstance(held, storages.StorageContent):
                    held = held.array(storage)
                value, kind = (None, None) if held is None else self.recording.value_of(held)
            self.values.append(value)
            self.kinds.append(kind or (None, None))
            parts += storage.nbytes(), kind
            if meshes.exist():
                parts.append(storages.sharding_of_held(held))
            self.storages.append(storage)
            self.held.append(held)
        dtype = tensor.dtype
        self.dtypes.add(dtype)
        parts += dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.is_conj(), tensor.is_neg()

    def _host(self, tensor: torch.Tensor) -> None:
        """Notes an operand on the CPU: of rank 0, or indices."""
        if not eager_mode.check_kind(self.form.op, tensor):
            raise eager_mode.mixed(self.form.op, tensor.device, self.device)
        value, kind = self.recording.value_of(storages.as_array(tensor, self.recording.device))
        self.values.append(value)
        self.kinds.append(kind)
        self.storages.append(None)
        self.held.append(None)
        self.dtypes.add(tensor.dtype)
        self.parts += "host", kind, tensor.dtype

    def key(self) -> Any:
        """Returns the cache key of the call, without the numbers that are inputs."""
        return self.recording.device.id, torch.get_default_dtype(), Settings.current(self.recording.platform), tuple(self.parts)

    def is_unsure(self) -> bool:
        return bool(self.numbers) and kernel_refusals.is_doubtful(self.form.name, self.numbers, self.dtypes)

    def problem(self) -> OpSpecialization:
        """Returns the call as an `OpSpecialization`. It does not read the storages again, since other threads may have changed them."""
        return _Described(self).problem

    def step(self, known: TracedOp, taken: Sequence[Any]) -> RecordedOp:
        seed = generators.drawn(self.generator, self.device.index) if known.draws else None
        first = self.recording.values
        self.recording.values = first + len(known.kinds)
        where, line = _where() if known.checks else "", user_frames.line() if is_watched() else ""
        return RecordedOp((known, first, *[self.values[slot] for slot in known.given]), first, taken, seed, where, line)

    def write(self, known: TracedOp, first: int) -> bool:
        """Gives the storages the values that the recorded op writes.

        Returns False and changes nothing if the content of a storage has changed since its value was noted.
        """
        recording, changes, own = self.recording, [], []
        for index, slot in enumerate(known.written):
            held, place, kind = self.held[slot], first + index, known.kinds[index]
            if type(held) is DeferredContent:
                changes.append((self.storages[slot], held, held))
                own.append((held, place, kind))
            else:
                changes.append((self.storages[slot], held, recording.wait(place, kind, held)))
        if changes and not storages.replace_arrays(changes):
            return False
        for held, place, kind in own:
            held.value, held.kind = place, kind
        return True

    def results(self, known: TracedOp, first: int) -> Any:
        """Creates the tensors that the op returns. Runs the recording if it has too many ops."""
        recording, kinds = self.recording, known.kinds
        made: list[torch.Tensor | int | None] = []
        place = first + len(known.written)
        for item in known.made:
            if not isinstance(item, tuple):
                made.append(item)
                continue
            nbytes, shape, stride, dtype = item
            storage = storages.make_storage(nbytes, self.device, recording.wait(place, kinds[place - first]))
            made.append(storages.on(storage, shape, stride, 0, dtype))
            place += 1
        if len(recording.steps) >= MOST:
            recording.run()
        return tuple(made) if known.is_list else (made[0] if made else None)


class _Described:
    """Builds the `OpSpecialization` of a call.

    It is a class because nested functions that call each other would keep the call's tensors alive.
    """

    def __init__(self, notes: _OpNotes) -> None:
        self._notes = notes
        self._slots: list[StorageMetadata] = []
        self._numbers: list[Any] = []
        self._found: dict[int, int] = {}
        opens = notes.form.numbers
        args = tuple([self._note(value, index in opens) for index, value in enumerate(notes.args)])
        kwargs = {name: self._note(value, name in opens) for name, value in notes.kwargs.items()}
        targets = tuple([self._operand(target) for target in notes.targets])
        slots, numbers = tuple(self._slots), tuple(self._numbers)
        self.problem = OpSpecialization(notes.form, args, kwargs, targets, slots, notes.recording.device, numbers)

    def _note(self, value: Any, is_open: bool) -> Any:
        if isinstance(value, torch.Tensor):
            return self._operand(value)
        if is_open and type(value) in (float, int):
            self._numbers.append(value)
            return NumberOperand(len(self._numbers) - 1, type(value))
        if isinstance(value, (list, tuple)):
            return tuple([self._note(item, False) for item in value])
        return None if isinstance(value, torch.Generator) else value

    def _operand(self, tensor: torch.Tensor) -> TensorOperand:
        if tensor.device != self._notes.device:
            shape = tuple(tensor.shape)
            self._slots.append(StorageMetadata(tensor.nbytes, shape, dtypes.to_jax(tensor.dtype)))
            return TensorOperand(len(self._slots) - 1, StridedView(tensor.dtype, shape, row_major(shape)))
        storage = tensor.untyped_storage()
        slot = self._found.setdefault(private.identity_of(storage), len(self._slots))
        if slot == len(self._slots):
            sharding = storages.sharding_of_held(self._notes.held[slot]) if meshes.exist() else None
            self._slots.append(StorageMetadata(storage.nbytes(), *self._notes.kinds[slot], sharding))
        return TensorOperand(slot, StridedView.of(tensor))


def _where() -> str:
    """Returns the innermost line of the user's code that runs now, as the end of a sentence."""
    found = user_frames.innermost()
    return "" if found is None else f" at {found[0]}:{found[1]}, in {found[2]}"


def _device_of(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], targets: Sequence[torch.Tensor]) -> torch.device:
    """Returns the device that runs an op: that of its first operand on a device "jax", or its `device` argument."""
    if args and isinstance(args[0], torch.Tensor) and args[0].device.type == storages.NAME:
        return args[0].device
    for value in pytree.tree_leaves((args, kwargs, targets)):
        device = value.device if isinstance(value, torch.Tensor) else value
        if isinstance(device, torch.device) and device.type == storages.NAME:
            return pjrt_devices.with_index(device)
    return pjrt_devices.with_index(torch.device(storages.NAME))
