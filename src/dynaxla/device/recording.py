"""Lazy mode: ops are recorded, and run as one program when somebody looks at a value.

A storage holds a `Waiting` in place of an array. There is one recording for each device, whichever threads add to it. A step of it is an
op, the number of its first result, and the numbers of the values that it takes: those of results count from 0, those of arrays that were
there before are -1, -2, ... Values never change; to write to a storage is to let it have another value. So the steps say all that the
program depends on, but for which values are still wanted when it runs, and are the name that it is found by.
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

from .. import forks
from ..engine.executable import is_watched
from ..errors import ExecutionError
from ..lowering import dtypes, refusals
from ..lowering.settings import Settings
from ..observe import metrics
from ..runtime import meshes, private, user_frames
from ..runtime.layout import row_major
from . import generators, op_by_op, places, recorded, storages
from .counterparts import Form
from .memory import Place
from .one_op import ByTorch, Held, Number, Operand, Problem, Resized, traced_op
from .recorded import Known, Step

# A recording runs when it has this many ops: XLA may take tens of milliseconds for each. Training steps of large models have thousands.
MOST = 4_000
# How many traced ops are kept.
CAPACITY = 16_384

_lock = forks.lock()
_recordings: dict[int, Recording] = {}
_NOTHING = object()


class _Table(dict[Any, Any]):
    """Traced ops; and why others are torch's. With too many, the oldest goes: unlike what has not been used, it is known at no cost."""

    def put(self, key: Any, value: Any) -> None:
        self[key] = value
        while len(self) > CAPACITY:
            del self[next(iter(self))]
            metrics.add("evictions")


_ops = _Table()


class Waiting(storages.StandIn):
    """What a storage holds whose value is recorded.

    Attributes: recording (None when it has run); value (its number there); kind (shape and dtype of the array that it will be);
    before (what the storage held when the recording first wrote to it; _NOTHING for a storage that the recording has made);
    outcome (the array, or the exception that says why there is none); sharding (which the array has, as that before had it; None where
    XLA chooses).
    """

    __slots__ = ("__weakref__", "before", "kind", "outcome", "recording", "sharding", "value")

    def __init__(self, recording: Recording, value: int, kind: tuple[Any, Any], before: Any) -> None:
        self.recording: Recording | None = recording
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
                    f"this tensor on {storage.device} has no value: the recorded ops that it was to come from have failed "
                    f"({type(self.outcome).__name__}: {self.outcome})",
                    hint="compute it again; what had a value before these ops has that value",
                ) from self.outcome
            storages.replace_arrays([(storage, self, self.outcome)])
            return self.outcome

    def fail(self, error: Exception) -> None:
        self.outcome = error if self.before is _NOTHING else self.before
        self.recording = self.before = None


class Recording:
    """Ops of one device that have not run."""

    def __init__(self, index: int) -> None:
        self.device = places.jax_device(index)
        self.platform = "cuda" if self.device.platform == "gpu" else self.device.platform
        self.steps: list[Step] = []
        self.values = 0
        self.waiting: list[weakref.ref[Waiting]] = []
        self.arrays: list[jax.Array] = []
        self._known: dict[int, tuple[int, tuple[Any, Any]]] = {}
        self.is_over = False

    def value_of(self, array: jax.Array) -> tuple[int, tuple[Any, Any]]:
        """The number of an array that is there, and what it is like."""
        found = self._known.get(id(array))
        if found is None:
            self.arrays.append(array)
            found = self._known[id(array)] = -len(self.arrays), (array.shape, array.dtype)
        return found

    def wait(self, value: int, kind: tuple[Any, Any], before: Any = _NOTHING) -> Waiting:
        made = Waiting(self, value, kind, before)
        self.waiting.append(weakref.ref(made))
        return made

    def run(self) -> None:
        """Compute what somebody can still ask for, as one program.

        Raises: what the first check that failed asks for; CompilationError; ExecutionError; ForkError. Then storages hold what they held
        before the recording, and those that it made say that they have no value. If it is interrupted, nothing has happened.
        """
        with _lock:
            if self.is_over:
                return
            if forks.is_cut_off():
                raise forks.cut_off()
            while not self.is_over:
                steps, arrays = list(self.steps), list(self.arrays)
                waiting = [found for reference in self.waiting if (found := reference()) is not None and found.recording is self]
                try:
                    wanted = [(found.value, found.sharding) for found in waiting]
                    results = recorded.run(steps, arrays, wanted, self.device)
                except Exception as error:
                    for reference in self.waiting:  # those that a finalizer has added, too
                        if (found := reference()) is not None and found.recording is self:
                            found.fail(error)
                    self._end()
                    raise
                if len(steps) == len(self.steps):  # else a finalizer or a signal's handler has added to them
                    for found, array in zip(waiting, results, strict=True):
                        found.outcome = array
                        found.recording = found.before = None
                    self._end()

    def _end(self) -> None:
        self.is_over = True
        self.steps, self.arrays, self.waiting, self._known = [], [], [], {}


def run_all() -> None:
    """Run the recordings of all devices. Raises: as `Recording.run`, for the first that fails, when all have run."""
    failed: Exception | None = None
    for recording in list(_recordings.values()):
        try:
            recording.run()
        except Exception as error:
            failed = failed or error
    if failed is not None:
        raise failed


def record(form: Form, args: Sequence[Any], kwargs: Mapping[str, Any], targets: Sequence[torch.Tensor] = ()) -> Any:
    """What `op_by_op.run` does, later. Raises: as that one, for what is known of the operands; ByTorch."""
    while True:
        with _lock:
            found = _record(form, args, kwargs, targets)
        if isinstance(found, Resized):
            for target, item in zip(targets, found.made, strict=True):
                op_by_op.resize_output(target, item.shape, item.stride)
        elif isinstance(found, _Lent):  # nobody waits for a program with the lock, which its kernels of torch's may need
            storages.array_of(found.storage)
        else:
            return found


def _record(form: Form, args: Sequence[Any], kwargs: Mapping[str, Any], targets: Sequence[torch.Tensor]) -> Any:
    """The same; but what is to be done first, without the lock, is returned."""
    while True:
        notes = _Notes(form, args, kwargs, targets)
        if notes.lent is not None:
            return notes.lent
        known, taken = op_by_op.find(_ops, _known, notes.key(), notes.numbers, notes.is_unsure(), notes.problem)
        if isinstance(known, str):
            raise ByTorch(known)
        if isinstance(known, Resized):
            return known
        step = notes.step(known, taken)
        if notes.recording.is_over:  # a finalizer or a signal's handler has looked at something
            continue
        notes.recording.steps.append(step)
        if notes.write(known, step.first):
            return notes.results(known, step.first)


@dataclass(frozen=True)
class _Lent:
    """A storage whose array a compiled program has."""

    storage: torch.UntypedStorage


def _known(problem: Problem) -> Known | Resized:
    found = traced_op(problem)
    return found if isinstance(found, Resized) else Known.of(problem, found)


class _Notes:
    """One call of an op: what it is known by, and what it takes. Slots are storages, in the order in which they are met."""

    def __init__(self, form: Form, args: Sequence[Any], kwargs: Mapping[str, Any], targets: Sequence[torch.Tensor]) -> None:
        self.form, self.args, self.kwargs, self.targets = form, args, kwargs, targets
        self.parts: list[Any] = [form.op]
        self.storages: list[torch.UntypedStorage | None] = []
        self.slots: dict[int, int] = {}
        self.held: list[Any] = []
        self.values: list[int | None] = []
        self.kinds: list[tuple[Any, Any]] = []
        self.lent: _Lent | None = None
        self.numbers: list[Any] = []
        self.dtypes: set[torch.dtype] = set()
        self.generator: torch.Generator | None = None
        self.device = _device_of(form.op, args, kwargs, targets)
        recording = _recordings.get(self.device.index)
        if recording is None or recording.is_over:
            recording = _recordings[self.device.index] = Recording(self.device.index)
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
            if places.with_index(value) != self.device:
                raise op_by_op.mixed(self.form.op, self.device, value)
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
            if type(held) is Waiting and held.recording is self.recording:
                value, kind = held.value, held.kind
            elif type(held) is storages.Lent:
                self.lent = _Lent(storage)
                value, kind = None, None
            else:
                if isinstance(held, storages.StandIn):
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
        """A number of the CPU, or indices."""
        if not op_by_op.check_kind(self.form.op, tensor):
            raise op_by_op.mixed(self.form.op, tensor.device, self.device)
        value, kind = self.recording.value_of(storages.as_array(tensor, self.recording.device))
        self.values.append(value)
        self.kinds.append(kind)
        self.storages.append(None)
        self.held.append(None)
        self.dtypes.add(tensor.dtype)
        self.parts += "host", kind, tensor.dtype

    def key(self) -> Any:
        """What tells the op from all others, but for open numbers."""
        return self.recording.device.id, torch.get_default_dtype(), Settings.current(self.recording.platform), tuple(self.parts)

    def is_unsure(self) -> bool:
        return bool(self.numbers) and refusals.is_doubtful(self.form.name, self.numbers, self.dtypes)

    def problem(self) -> Problem:
        """The same call as `one_op` has it. Storages are not looked at again: other threads may have changed them."""
        return _Described(self).problem

    def step(self, known: Known, taken: Sequence[Any]) -> Step:
        seed = generators.drawn(self.generator, self.device.index) if known.draws else None
        first = self.recording.values
        self.recording.values = first + len(known.kinds)
        where, line = _where() if known.checks else "", user_frames.line() if is_watched() else ""
        return Step((known, first, *[self.values[slot] for slot in known.given]), first, taken, seed, where, line)

    def write(self, known: Known, first: int) -> bool:
        """Let the storages have what the op writes, when it is recorded.

        Gives False, and does nothing, if a compiled program has written to one of them, or writes to it, since their values were noted.
        """
        recording, changes, own = self.recording, [], []
        for index, slot in enumerate(known.written):
            held, place, kind = self.held[slot], first + index, known.kinds[index]
            if type(held) is Waiting:
                changes.append((self.storages[slot], held, held))
                own.append((held, place, kind))
            else:
                changes.append((self.storages[slot], held, recording.wait(place, kind, held)))
        if changes and not storages.replace_arrays(changes):
            return False
        for held, place, kind in own:
            held.value, held.kind = place, kind
        return True

    def results(self, known: Known, first: int) -> Any:
        """What the op returns."""
        recording, kinds = self.recording, known.kinds
        made: list[torch.Tensor | None] = []
        place = first + len(known.written)
        for item in known.made:
            if item is None:
                made.append(None)
                continue
            nbytes, shape, stride, dtype = item
            storage = storages.make_storage(nbytes, self.device, recording.wait(place, kinds[place - first]))
            made.append(storages.on(storage, shape, stride, 0, dtype))
            place += 1
        if len(recording.steps) >= MOST:
            recording.run()
        return tuple(made) if known.is_list else (made[0] if made else None)


class _Described:
    """Of a call, the Problem. (Functions that call each other would keep the call's tensors alive.)"""

    def __init__(self, notes: _Notes) -> None:
        self._notes = notes
        self._slots: list[Held] = []
        self._numbers: list[Any] = []
        self._found: dict[int, int] = {}
        opens = notes.form.numbers
        args = tuple([self._note(value, index in opens) for index, value in enumerate(notes.args)])
        kwargs = {name: self._note(value, name in opens) for name, value in notes.kwargs.items()}
        targets = tuple([self._operand(target) for target in notes.targets])
        slots, numbers = tuple(self._slots), tuple(self._numbers)
        self.problem = Problem(notes.form, args, kwargs, targets, slots, notes.recording.device, numbers)

    def _note(self, value: Any, is_open: bool) -> Any:
        if isinstance(value, torch.Tensor):
            return self._operand(value)
        if is_open and type(value) in (float, int):
            self._numbers.append(value)
            return Number(len(self._numbers) - 1, type(value))
        if isinstance(value, (list, tuple)):
            return tuple([self._note(item, False) for item in value])
        return None if isinstance(value, torch.Generator) else value

    def _operand(self, tensor: torch.Tensor) -> Operand:
        if tensor.device != self._notes.device:
            shape = tuple(tensor.shape)
            self._slots.append(Held(tensor.nbytes, shape, dtypes.to_jax(tensor.dtype)))
            return Operand(len(self._slots) - 1, Place(tensor.dtype, shape, row_major(shape)))
        storage = tensor.untyped_storage()
        slot = self._found.setdefault(private.identity_of(storage), len(self._slots))
        if slot == len(self._slots):
            sharding = storages.sharding_of_held(self._notes.held[slot]) if meshes.exist() else None
            self._slots.append(Held(storage.nbytes(), *self._notes.kinds[slot], sharding))
        return Operand(slot, Place.of(tensor))


def _where() -> str:
    """The innermost line of the user's that is being run, as a part of a sentence."""
    found = user_frames.innermost()
    return "" if found is None else f" at {found[0]}:{found[1]}, in {found[2]}"


def _device_of(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], targets: Sequence[torch.Tensor]) -> torch.device:
    """Where an op runs: where its first operand on a device "jax" is, or where it says."""
    if args and isinstance(args[0], torch.Tensor) and args[0].device.type == storages.NAME:
        return args[0].device
    for value in pytree.tree_leaves((args, kwargs, targets)):
        device = value.device if isinstance(value, torch.Tensor) else value
        if isinstance(device, torch.device) and device.type == storages.NAME:
            return places.with_index(device)
    return places.with_index(torch.device(storages.NAME))
