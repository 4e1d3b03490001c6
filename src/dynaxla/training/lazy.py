"""A step whose Python runs at every call, while its ATen ops wait to be run together, as lazy tensors do.

Each op is compared with what earlier calls have recorded (see traces.py), and is not run. Its results are ordinary tensors without memory;
they get it when a part of the step is run, as one program: at the end, and wherever Python or an op outside of XLA needs a value. So
whatever the step does in Python happens once per call, in its order, with the values that it would find in eager mode.

What torch itself runs at once: views (they compute nothing), arithmetic on numbers that it has already (0-dim tensors on the CPU, such as
step counts), and draws of random numbers (so they are eager mode's).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ..errors import CaptureError
from ..lowering.asynchronous import COLLECTIVES, NAMESPACES, WAIT
from ..observe import metrics
from ..runtime import devices, hollow, private
from ..runtime.layout import ORDINARY
from ..torch_ops import aten
from . import writing_collectives
from .arrays import copied, is_same_data
from .contents import LARGE, same
from .exposure import Exposure
from .kinds import NEEDS_OWN_FORWARD, Kind, drops, functional_of, is_group, kind_of, tensors_in, unwraps, with_tensors, written_by
from .likenesses import bare, detached, hollow_like, op_before
from .prediction import Unpredictable, predict
from .shadows import as_written
from .shared_memory import is_foreign
from .torch_state import without_cached_casts
from .traces import Geometry, Given, New, OpNode, Ref, Traces, View, extent, geometry, is_free_kind, number_arguments


class _Outside(Exception):
    """An op that no program can hold."""


class _Conflict(_Outside):
    """An op that the part cannot hold, but the next one can: it writes to one of two inputs that lie in the same memory, but not in the
    same way, or it reads memory that Python has written to since the part has read it."""


def run(
    traces: Traces, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], exposed: dict[int, torch.Tensor]
) -> Any:
    """The function's result, its tensors detached. What it changes it has changed when this returns, or raises.

    exposed: tensors whose memory Python may read and write without torch, by their storages' ids; those that the step exposes are added.
    Raises: what the function raises, after what it did before; ExecutionError and others of dynaxla's if a program fails: then what that
    program would have written is as it was, and new tensors that it would have given hold NaN.
    """
    session = Session(traces, exposed)
    with torch.autograd.set_multithreading_enabled(False), as_written(), without_cached_casts(), session.waiting():
        try:
            result = function(*args, **kwargs)
            # Detached before the last part is run: what autograd has saved for results alone need not be computed.
            result = detached(result)
        except BaseException:
            session.flush_after_failure()
            raise
        session.flush()
    metrics.add("lazy_steps")
    return result


class Session(TorchDispatchMode):
    """One call of a step. What is known of storages holds for one part."""

    def __init__(self, traces: Traces, exposed: dict[int, torch.Tensor]) -> None:
        super().__init__()
        self._traces = traces
        self._failed: BaseException | None = None
        self._functions = Exposure(self.flush, self._expose)
        # By its storage's id: a tensor in memory that Python can write to and read at any time.
        self._foreign = exposed
        self._start()

    def _start(self) -> None:
        self._node: OpNode = self._traces.root
        self._version = 0
        self._slots: dict[int, int] = {}
        self._geometries: list[set[Geometry]] = []
        # For each slot: a weak reference to the storage of a tensor without memory, or None for one that was there before.
        self._lazy: list[StorageWeakRef | None] = []
        self._made: dict[int, New] = {}
        self._inputs: list[torch.Tensor] = []
        self._roots: set[tuple[int, Geometry]] = set()
        self._written: set[int] = set()
        self._numbers: list[float] = []
        self._views: dict[tuple[int, Geometry], tuple[View, torch.Tensor | None]] = {}
        self._undo: list[tuple[torch.Tensor, torch.Tensor]] = []
        # What the part reads of foreign memory, as it was: by the storage's id and the geometry.
        self._copies: dict[tuple[int, Geometry], torch.Tensor] = {}
        self._device: torch.device | None = None
        self._has_collectives = False

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, this thread's ops are noted instead of run."""
        with self._functions, self:
            yield

    # What ops come to

    def __torch_dispatch__(self, op: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self._failed is not None:
            raise CaptureError("a step goes on after one of its programs has failed") from self._failed
        if any(kind not in ORDINARY and unwraps(kind) for kind in types):
            return NotImplemented  # its class says what ops it comes to, and these come here
        if op.namespace == "c10d":
            with self:
                found = writing_collectives.note(op, args)
            if found is not NotImplemented:
                return found
        kind = kind_of(op)
        if kind == Kind.NATIVE:
            return op(*args, **kwargs)
        if kind == Kind.VIEW:
            return self._view(op, args, kwargs)
        if kind == Kind.RANDOM:
            return self._random(op, args, kwargs)
        if kind == Kind.RECORD and not self._is_at_hand(op, args, kwargs):
            try:
                return self._attempt(op, args, kwargs)
            except _Conflict:
                self.flush()
                with contextlib.suppress(_Outside):
                    return self._attempt(op, args, kwargs)
            except _Outside:
                pass
        return self._outside(op, args, kwargs)

    def _attempt(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Record an op. Raises: _Outside, with all as it was."""
        mark = len(self._lazy)
        new_roots: list[tuple[int, Geometry, torch.Tensor]] = []
        try:
            return self._record(op, args, kwargs, new_roots)
        except _Outside:
            self._forget(mark, new_roots)
            raise

    def _view(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        source = args[0]
        if not isinstance(source, torch.Tensor) or source.layout != torch.strided:
            return self._outside(op, args, kwargs)
        storage, before = private.storage_id(source), geometry(source)
        result = op(*args, **kwargs)
        if op is aten.lift_fresh.default and storage not in self._slots and is_foreign(source):
            self._foreign[storage] = result
        if op is aten.as_strided.default or op is aten.as_strided_.default or op is aten.lift_fresh.default:
            return result  # it may leave what the source reads; resolved by its geometry
        kept = None if self._is_lazy(storage) else source
        name, rest = op, tuple(args[1:])
        if result is source:
            if (functional := functional_of(op)) is None:
                return result
            name, kept = functional, None if kept is None else op_before(source, before)
        items = result if isinstance(result, (list, tuple)) else [result]
        for index, item in enumerate(items):
            after = geometry(item)
            if private.storage_id(item) == storage and not self._comes_from(storage, before, after):
                place = index if isinstance(result, (list, tuple)) else None
                self._views.setdefault((storage, after), (View(name, rest, kwargs, before, place), kept))
        return result

    def _comes_from(self, storage: int, view: Geometry, source: Geometry) -> bool:
        """Whether a view is the source, or was made of it by way of others."""
        while view != source:
            entry = self._views.get((storage, view))
            if entry is None:
                return False
            view = entry[0].source
        return True

    def _random(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Numbers that torch draws, into memory of their own; what they are to be written to, or be like, need not be computed."""
        target = args[0] if args else None
        if op._schema.is_mutable and isinstance(target, torch.Tensor) and self._is_pending(target):
            if any(isinstance(item, torch.Tensor) for item in [*args[1:], *kwargs.values()]):
                return self._outside(op, args, kwargs)
            drawn = op(torch.empty_like(hollow_like(target)), *args[1:], **kwargs)
            return self._attempt(aten.copy_.default, (target, drawn), {})
        if op._schema.name.endswith("_like") and isinstance(target, torch.Tensor) and self._is_pending(target):
            return op(hollow_like(target), *args[1:], **kwargs)
        return self._outside(op, args, kwargs)

    def _is_at_hand(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether an op computes with nothing but 0-dim tensors on the CPU whose values are known. A collective is to be where other
        processes have it, who may have recorded the step."""
        if op._schema.name in COLLECTIVES:
            return False
        found = False
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor):
                if value.dim() or value.device.type != "cpu" or self._is_pending(value):
                    return False
                found = True
            elif isinstance(value, (list, tuple)) and any(isinstance(item, torch.Tensor) for item in value):
                return False
        if found and op._schema.is_mutable:
            written = written_by(op, args, kwargs)
            if any(private.storage_id(tensor) in self._slots for tensor in written):
                return False
            self._undo += [(tensor, tensor.clone()) for tensor in written]
        return found

    def _outside(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Let torch run an op now, and before it all that it depends on."""
        if isinstance(op, torch._ops.OpOverload) and op.namespace in NAMESPACES:
            if op._schema.name == WAIT and self._is_pending(args[0]):
                return args[0]  # the part that has the collective waits for it
            if self._has_collectives:
                self.flush()  # all processes have one order
        if op in NEEDS_OWN_FORWARD:
            raise CaptureError("a step takes a backward pass apart", op=str(op), hint="please report this, with the step")
        tensors = list(tensors_in((args, kwargs)))
        written = written_by(op, args, kwargs) if isinstance(op, torch._ops.OpOverload) else tensors
        used = any(private.storage_id(tensor) in self._slots for tensor in written if tensor.layout == torch.strided)
        if used or any(self._is_pending(tensor) for tensor in tensors):
            self.flush()
        metrics.add("outside_ops")
        return op(*args, **kwargs)

    def _expose(self, tensor: torch.Tensor) -> None:
        """From now on Python may write to a tensor's memory, and read it."""
        if tensor.layout == torch.strided:
            self._foreign[private.storage_id(tensor)] = tensor

    def _is_lazy(self, storage: int) -> bool:
        slot = self._slots.get(storage)
        return slot is not None and self._lazy[slot] is not None

    def _is_pending(self, tensor: torch.Tensor) -> bool:
        """Whether its values are not in its memory yet."""
        if tensor.layout != torch.strided:
            return False
        slot = self._slots.get(private.storage_id(tensor))
        return slot is not None and (self._lazy[slot] is not None or slot in self._written)

    # Recording, and finding what was recorded

    def _record(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], new_roots: list[tuple[int, Geometry, torch.Tensor]]) -> Any:
        """new_roots: is filled with the inputs that the part meets here. Raises: _Outside; then these are to be forgotten."""
        tensors: list[torch.Tensor] = []
        numbers: list[float] = []
        kinds = number_arguments(op)
        kwargs = self._placed(args, kwargs)
        for tensor in tensors_in((args, kwargs)):
            if type(tensor) not in ORDINARY or tensor.layout != torch.strided:
                raise _Outside
        for tensor in written_by(op, args, kwargs):
            # AOTAutograd gives a value that was written to through its conjugate back as a conjugate, or fails (torch 2.13).
            if private.storage_id(tensor) in self._foreign or tensor.is_conj():
                raise _Outside
        if op._schema.name.startswith("aten::_scaled_dot_product") and drops(op, args, kwargs):
            raise _Outside
        key_args = tuple([self._key(value, index in kinds, tensors, numbers, new_roots) for index, value in enumerate(args)])
        key_kwargs = tuple([(name, self._key(value, name in kinds, tensors, numbers, new_roots)) for name, value in kwargs.items()])
        self._check_overlap(op, args, kwargs, new_roots)
        alike = (op, key_args, key_kwargs, torch.get_default_dtype())
        key = (alike, tuple([(type(number), number if number == number and number else repr(number)) for number in numbers]))
        child = self._node.children.get(key)
        if child is None:
            child = self._generalised(alike, numbers, op, tensors)
        if child is None:
            child = self._new_node(op, args, kwargs, key, alike, tensors, tuple(numbers), new_roots)
        if child.is_loose:
            raise _Outside
        for slot, shape, root in new_roots:
            self._roots.add((slot, shape))
            self._inputs.append(root)
        self._node = child
        self._has_collectives |= op._schema.name in COLLECTIVES
        self._version += len(child.free)
        self._numbers += [numbers[position] for position in sorted(child.free)]
        self._written.update(self._slots[private.storage_id(tensor)] for tensor in written_by(op, args, kwargs))
        return self._results(child.result, tensors)

    def _check_overlap(
        self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], new_roots: Sequence[tuple[int, Geometry, torch.Tensor]]
    ) -> None:
        """Raises: _Conflict. AOTAutograd misses some such inputs (torch 2.13: a block of rows and columns, beside the whole)."""
        written = {self._slots[private.storage_id(tensor)] for tensor in written_by(op, args, kwargs)}
        for slot in written | ({slot for slot, _, _ in new_roots} & self._written):
            found = [shape for known, shape in self._roots if known == slot] + [shape for known, shape, _ in new_roots if known == slot]
            if len(found) > 1:
                extents = sorted(map(extent, found))
                if any(after < before for (_, before), (after, _) in itertools.pairwise(extents)):
                    raise _Conflict

    def _forget(self, mark: int, new_roots: Sequence[tuple[int, Geometry, torch.Tensor]]) -> None:
        """mark: the number of slots before those of an op that was not recorded."""
        for slot, shape, root in new_roots:
            if slot >= mark:
                self._slots.pop(private.storage_id(root), None)
            else:
                self._geometries[slot].discard(shape)
        del self._lazy[mark:], self._geometries[mark:]

    def _key(self, value: Any, is_number: bool, tensors: list[torch.Tensor], numbers: list[float], new_roots: list[Any]) -> Any:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            return self._place(value, new_roots)
        if isinstance(value, (list, tuple)):
            return tuple([self._key(item, is_number, tensors, numbers, new_roots) for item in value])
        if is_number and is_free_kind(value):
            numbers.append(value)
            return type(value)
        if isinstance(value, (float, complex)):
            return type(value), repr(value)
        if value is None or isinstance(value, (bool, int, str, torch.dtype, torch.device, torch.layout, torch.memory_format)):
            return type(value), value
        if is_group(value):
            return same(value)
        raise _Outside

    def _place(self, tensor: torch.Tensor, new_roots: list[Any]) -> Any:
        """A tensor's slot and geometry; for an input of the part, also what it is like."""
        storage, shape = private.storage_id(tensor), geometry(tensor)
        slot = self._slots.get(storage)
        if slot is not None and shape in self._geometries[slot]:
            if storage in self._foreign:
                self._check_copy(storage, *self._root(storage, shape, tensor))
            return slot, shape
        root_shape, root = self._root(storage, shape, tensor)
        if storage in self._foreign:
            self._check_copy(storage, root_shape, root)
        if slot is None:
            slot = self._slots[storage] = len(self._lazy)
            self._lazy.append(None)
            self._geometries.append(set())
        self._geometries[slot].add(shape)
        if self._lazy[slot] is not None or (slot, root_shape) in self._roots or any(item[:2] == (slot, root_shape) for item in new_roots):
            return slot, shape
        self._geometries[slot].add(root_shape)
        item = bare(root)
        if storage in self._foreign:
            item = self._copies[storage, root_shape] = copied(item)
        new_roots.append((slot, root_shape, item))
        return slot, shape, root_shape, root.device

    def _check_copy(self, storage: int, shape: Geometry, root: torch.Tensor) -> None:
        """Raises: _Conflict if foreign memory has changed since the part has read it; _Outside if it is too large to be copied."""
        if root.nbytes > LARGE:
            raise _Outside
        copy = self._copies.get((storage, shape))
        if copy is not None and not is_same_data(copy, bare(root)):
            raise _Conflict

    def _root(self, storage: int, shape: Geometry, tensor: torch.Tensor) -> tuple[Geometry, torch.Tensor]:
        """The tensor that another one is a view of, as far as the step has made the view."""
        while (entry := self._views.get((storage, shape))) is not None:
            view, source = entry
            if source is None:
                break
            shape, tensor = view.source, source
        return shape, tensor

    def _generalised(self, alike: Any, numbers: Sequence[float], op: Any, tensors: Sequence[torch.Tensor]) -> OpNode | None:
        """A recorded op that differs in nothing but numbers, which become inputs."""
        child = self._node.alike.get(alike)
        if child is None:
            return None
        differing = {
            index
            for index, (now, before) in enumerate(zip(numbers, child.numbers, strict=True))
            if index not in child.free
            and not (type(now) is type(before) and ((now == before and str(now) == str(before)) or now != now != before))
        }
        if differing and not all(tensor.is_floating_point() for tensor in tensors):
            return None
        child.free |= differing
        return child

    def _new_node(
        self,
        op: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        key: Any,
        alike: Any,
        tensors: Sequence[torch.Tensor],
        numbers: tuple[float, ...],
        new_roots: Sequence[tuple[int, Geometry, torch.Tensor]],
    ) -> OpNode:
        node = self._node
        child = OpNode(node, op, numbers=numbers)
        written = frozenset((self._slots[private.storage_id(tensor)], geometry(tensor)) for tensor in written_by(op, args, kwargs))
        if node.is_followed_by_too_many(op, alike, written):
            child.is_loose = True
        else:
            child.args, child.kwargs = with_tensors((tuple(args), dict(kwargs)), self._reference)
            child.roots = [(slot, shape) for slot, shape, _ in new_roots]
            child.views = self._views_of(tensors)
            try:
                child.result, made = predict(op, args, kwargs, tensors)
            except Unpredictable as error:
                raise _Outside from error
            child.made = list(range(len(self._lazy), len(self._lazy) + made))
        node.children[key] = child
        if not child.is_loose:
            node.alike.setdefault(alike, child)
        self._traces.add(child)
        return child

    def _reference(self, tensor: torch.Tensor) -> Ref:
        return Ref(self._slots[private.storage_id(tensor)], geometry(tensor))

    def _views_of(self, tensors: Sequence[torch.Tensor]) -> dict[tuple[int, Geometry], View]:
        found = {}
        for tensor in tensors:
            storage, shape = private.storage_id(tensor), geometry(tensor)
            slot = self._slots[storage]
            while (entry := self._views.get((storage, shape))) is not None:
                if (slot, shape) in self._roots or (slot, shape) in found:
                    break
                found[slot, shape] = entry[0]
                shape = entry[0].source
        return found

    def _results(self, result: Any, tensors: Sequence[torch.Tensor]) -> Any:
        if isinstance(result, New):
            return self._make(result)
        if isinstance(result, Given):
            return tensors[result.position]
        if isinstance(result, list):
            return [self._results(item, tensors) for item in result]
        return result

    def _make(self, new: New) -> torch.Tensor:
        """A tensor without memory."""
        shape, stride, _, dtype, *_ = new.geometry
        tensor, reference = hollow.make(shape, stride, dtype, new.device, new.nbytes)
        slot = len(self._lazy)
        self._slots[reference.cdata] = slot
        self._lazy.append(reference)
        self._made[slot] = new
        self._geometries.append({new.geometry})
        return tensor

    def _placed(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """kwargs, with the GPU that is meant: torch may have another current one later. A part has one device; 0-dim tensors on the CPU may
        stand beside it."""
        for tensor in tensors_in((args, kwargs)):
            if tensor.device.type == "cpu" and not tensor.dim():
                continue
            if tensor.device.type not in ("cpu", "cuda"):
                raise _Outside
            self._device = self._device or tensor.device
            if tensor.device != self._device:
                raise _Outside
        if kwargs.get("device") is None:
            return kwargs
        wanted = devices.with_index(torch.device(kwargs["device"]))
        self._device = self._device or wanted
        if wanted != self._device:
            raise _Outside
        return {**kwargs, "device": wanted}

    # Running what was recorded

    def flush(self) -> None:
        """Run what waits. Tensors that are still alive then have their values."""
        if self._failed is not None:
            raise self._failed
        node = self._node
        if node is self._traces.root:
            self._start()
            return
        live = [slot for slot, reference in enumerate(self._lazy) if reference is not None and not reference.expired()]
        references, made = self._lazy, self._made
        try:
            with (
                _disable_current_modes(),
                private.without_torch_function(),
                torch.no_grad(),
                private.without_autocast(),
                torch._guards.tracing(None),
            ):
                part = node.program(live, self._version)
                if part is None:
                    part = node.compile(live, self._version, self._inputs, self._numbers, self._traces.options)
                results = part.run([*self._inputs, *self._numbers])
                taken: dict[int, torch.UntypedStorage | None] = {private.storage_id(tensor): None for tensor in self._inputs}
                for slot, result in zip(part.slots, results, strict=True):
                    reference = references[slot]
                    if reference is not None and not reference.expired():
                        shape, stride, _, dtype, *_ = made[slot].geometry
                        if (result.shape, result.dtype) != (shape, dtype):
                            raise CaptureError(f"a program gives {result.dtype}{list(result.shape)} for {dtype}{list(shape)}")
                        hollow.fill(reference, result, stride, made[slot].nbytes, taken)
        except BaseException as error:
            self._failed = error
            with _disable_current_modes(), torch.no_grad():
                for tensor, before in reversed(self._undo):
                    tensor.copy_(before)
                for slot in live:
                    if (reference := references[slot]) is not None:
                        hollow.spoil(reference, made[slot].nbytes)
            raise
        metrics.add("parts")
        self._traces.used(node)
        self._start()

    def flush_after_failure(self) -> None:
        """The step has raised: what it did before is done, as in eager mode."""
        if self._failed is None:
            self.flush()
