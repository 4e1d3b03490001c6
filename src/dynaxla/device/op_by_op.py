"""Eager mode on the device: an op is found compiled by what its operands are like, called with the arrays in their storages, and gives new
arrays for the storages that it writes to.
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
from ..engine.executable import drawing_under_trace, execution_error
from ..lowering import dtypes, refusals
from ..lowering.ops.sharding_constraints import sharding_of_call
from ..lowering.promotion import number
from ..lowering.settings import Settings
from ..observe import metrics
from ..runtime import late_checks, meshes, private
from ..runtime.cache import LeastRecentlyUsed
from ..runtime.layout import row_major
from ..torch_ops import aten
from . import generators, places, storages
from .counterparts import Form, for_numbers, form_of
from .memory import Place
from .on_the_cpu import run_on_the_cpu
from .one_op import ByTorch, Held, Number, Operand, Problem, Resized, build, traced_op

# Compiled ops; and why others are torch's.
CAPACITY = 4096
_programs: LeastRecentlyUsed[Any] = LeastRecentlyUsed(CAPACITY)
# The same, not compiled: they become part of what JAX traces.
_traced_programs: LeastRecentlyUsed[Any] = LeastRecentlyUsed(CAPACITY)
# Stands where each number has a program of its own.
CLOSED = object()
_NUMBERS = (int, float, bool, complex)
# Numbers as arrays of rank 0.
_numbers: LeastRecentlyUsed[jax.Array] = LeastRecentlyUsed(256)
# How many programs an op has for different numbers, before each number has its own.
_VARIANTS = 8
# Operands of these may be indices on the CPU, as ATen has it.
_INDICES = frozenset({"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"})


class _Call:
    """The arguments of one call: what a program is known by, and what it is called with."""

    def __init__(self, op: OpOverload) -> None:
        self.op = op
        self.device: torch.device | None = None
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.arrays: list[jax.Array | None] = []
        self.slots: list[Held] = []
        self._places: dict[int, int] = {}
        self._hosts: list[tuple[int, torch.Tensor]] = []
        self._elsewhere: torch.device | None = None
        self.generator: torch.Generator | None = None
        self.numbers: list[Any] = []
        self.dtypes: set[torch.dtype] = set()

    def note_or_open(self, value: Any) -> Any:
        """An argument as `note` has it, where the program takes numbers as inputs."""
        if type(value) is float or type(value) is int:
            self.numbers.append(value)
            return Number(len(self.numbers) - 1, type(value))
        return self.note(value)

    def note(self, value: Any) -> Any:
        """An argument with an Operand for each tensor."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, (list, tuple)):
            return tuple([self.note(item) for item in value])
        if isinstance(value, torch.Generator):
            self.generator = value
            return None
        if isinstance(value, torch.device) and value.type == storages.NAME:
            self._use(places.with_index(value))
        return value

    def _use(self, device: torch.device) -> None:
        if self.device is None:
            self.device = device
        elif self.device != device:
            raise mixed(self.op, self.device, device)

    def _tensor(self, tensor: torch.Tensor) -> Operand:
        is_host = check_kind(self.op, tensor)
        self.dtypes.add(tensor.dtype)
        if tensor.device.type != storages.NAME:
            if not is_host:
                self._elsewhere = tensor.device
            self._hosts.append((len(self.arrays), tensor))
            shape = tuple(tensor.shape)
            self._add(None, Held(tensor.nbytes, shape, dtypes.to_jax(tensor.dtype)))
            return Operand(len(self.arrays) - 1, Place(tensor.dtype, shape, row_major(shape)))
        self._use(tensor.device)
        storage = tensor.untyped_storage()
        identity = private.identity_of(storage)
        slot = self._places.get(identity)
        if slot is None:
            slot = self._places[identity] = len(self.arrays)
            array = storages.array_of(storage)
            self.storages[slot] = storage
            self._add(array, Held(storage.nbytes(), *((None, None) if array is None else (array.shape, array.dtype))))
        return Operand(slot, Place.of(tensor))

    def _add(self, array: jax.Array | None, held: Held) -> None:
        self.arrays.append(array)
        self.slots.append(held)

    def finish(self, is_traced: bool, own: NamedSharding | None) -> tuple[jax.Device, NamedSharding | None]:
        """Bring numbers of the CPU to the device, which is returned, and to the mesh, if it is one of several.
        is_traced: by JAX. own: the sharding that the op itself names.

        Raises: RuntimeError if a tensor is on another device; DeviceMismatch for two meshes.
        """
        assert self.device is not None
        if self._elsewhere is not None:
            raise mixed(self.op, self._elsewhere, self.device)
        device = places.jax_device(self.device.index)
        where = self._on_mesh(own) if meshes.exist() and not is_traced else None
        for slot, tensor in self._hosts:
            self.arrays[slot] = storages.as_array(tensor, where or device)
            self.slots[slot] = self.slots[slot]._replace(sharding=where)
        return device, where

    def _on_mesh(self, own: NamedSharding | None) -> NamedSharding | None:
        """The mesh on which an operand lies; all are on it from now on."""
        shardings = [meshes.sharding_of(array) for array in self.arrays]
        where = meshes.common([*shardings, own])
        for slot, storage in self.storages.items() if where is not None else ():
            array = self.arrays[slot]
            if array is not None and where is not None:
                if shardings[slot] is None:
                    array = self.arrays[slot] = storages.spread(storage, array, where)
                self.slots[slot] = self.slots[slot]._replace(sharding=meshes.sharding_of(array))
        return where


def check_kind(op: OpOverload, tensor: torch.Tensor) -> bool:
    """Whether an op's operand is on the CPU, and may be: it is a number or an index.

    Raises: RuntimeError, ByTorch for a tensor of a kind that cannot be on the device.
    """
    if tensor.layout != torch.strided:
        raise ByTorch(f"it takes a tensor of layout {tensor.layout}")
    if not dtypes.is_supported(tensor.dtype):
        raise RuntimeError(f"{op}: JAX has no dtype {tensor.dtype}")
    return tensor.device.type == "cpu" and (not tensor.dim() or op._schema.name in _INDICES)


def mixed(op: OpOverload, one: torch.device, other: torch.device) -> RuntimeError:
    names = " and ".join(sorted({str(one), str(other)}))
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {names}! (in {op}; move one of them with .to)"
    )


def kernel(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """What an op does on the device.

    Raises: RuntimeError for operands on several devices; ForkError; what the op's checks ask for, and then nothing has been written.
    """
    form = form_of(op)
    if positions := tuple([index for index in form.tensors if index < len(args) and type(args[index]) in _NUMBERS]):
        op = for_numbers(op, positions)
        form = form_of(op)
    if form.is_view:
        return private.by_cpu_kernel(op, *args, **kwargs)
    if form.functional is None:
        return run_on_the_cpu(op, args, kwargs, "it writes to its operands in a way of its own")
    if forks.is_cut_off():
        raise forks.cut_off()
    written = _values(op, form.written, args, kwargs)
    if any(not isinstance(target, torch.Tensor) for target in written):
        return run_on_the_cpu(op, args, kwargs, "it writes to a list of tensors")
    try:
        made = run(form, args, kwargs, written)
    except ByTorch as reason:
        return run_on_the_cpu(op, args, kwargs, str(reason))
    if not form.written:
        return made
    return written[0] if len(op._schema.returns) == 1 else (tuple(written) if op._schema.returns else None)


def _values(op: OpOverload, names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    found = []
    for name in names:
        index = _positions(op)[name]
        found.append(kwargs[name] if name in kwargs else args[index])
    return found


@functools.cache
def _positions(op: OpOverload) -> dict[str, int]:
    return {item.name: index for index, item in enumerate(op._schema.arguments)}


# What runs ops in place of `run`: see recording.py.
_instead: Callable[..., Any] | None = None


def run_by(function: Callable[..., Any] | None) -> None:
    """From now on a function of the same arguments does what `run` does; None: it does it itself."""
    global _instead
    _instead = function


def run(form: Form, args: Sequence[Any], kwargs: Mapping[str, Any], targets: Sequence[torch.Tensor] = ()) -> Any:
    """Compute an op. Its results are written to the targets, or (without targets) new tensors.

    Raises: ByTorch; and as `kernel` does.
    """
    is_traced = storages.hold_tracers(tree_leaves((args, kwargs, list(targets)))) if storages.tracers_exist() else False
    if _instead is not None and not is_traced:
        return _instead(form, args, kwargs, targets)
    call = _Call(form.op)
    noted: Any
    if form.numbers:
        noted = tuple([call.note_or_open(value) if index in form.numbers else call.note(value) for index, value in enumerate(args)])
        named = {name: call.note_or_open(value) if name in form.numbers else call.note(value) for name, value in kwargs.items()}
    else:
        noted, named = call.note(args), {name: call.note(value) for name, value in kwargs.items()}
    noted_targets = tuple([call.note(target) for target in targets])
    if call.device is None:
        call.device = places.with_index(torch.device(storages.NAME))
    device, where = call.finish(is_traced, sharding_of_call(form.op, args))
    settings = Settings.current("cuda" if device.platform == "gpu" else device.platform)
    slots = tuple(call.slots)
    key = (
        form.op, meshes.key_of(where or device), _hashable(noted), tuple([(name, _hashable(value)) for name, value in named.items()]),
        noted_targets, slots, torch.get_default_dtype(), settings,
    )  # fmt: skip
    unsure = bool(call.numbers) and refusals.is_doubtful(form.name, call.numbers, call.dtypes)
    found, taken = find(
        _traced_programs if is_traced else _programs, traced_op if is_traced else build, key, call.numbers, unsure,
        lambda: Problem(form, noted, named, noted_targets, slots, device, tuple(call.numbers), where),
    )  # fmt: skip
    if isinstance(found, str):
        raise ByTorch(found)
    if isinstance(found, Resized):
        for target, item in zip(targets, found.made, strict=True):
            resize_output(target, item.shape, item.stride)
        return run(form, args, kwargs, targets)
    arrays = [call.arrays[slot] for slot in found.given]
    if is_traced and found.draws:
        raise drawing_under_trace(str(form.op))
    if found.draws:
        arrays.append(generators.seed(call.generator, call.device.index, where or device))
    arrays += [_number(value, dtype, where or device) for value, dtype in taken]
    try:
        results = _inlined(found.traced, arrays) if is_traced else list(found.call(arrays))
    except jax.errors.JaxRuntimeError as error:
        raise execution_error(str(form.op), error) from error
    if is_traced and found.checks:
        results.pop()  # nobody can look at it
    elif found.checks and (failure := late_checks.failure(int(np.asarray(results.pop())), found.checks)) is not None:
        raise failure
    metrics.add("device_ops")
    if found.written:
        changes = [(call.storages[slot], call.arrays[slot], results.pop(0)) for slot in found.written]
        if not storages.replace_arrays(changes):
            return run(form, args, kwargs, targets)
    made = [item and storages.make(item.shape, item.stride, item.dtype, call.device, results.pop(0)) for item in found.made]
    return tuple(made) if found.is_list else (made[0] if made else None)


def _inlined(traced: jax.stages.Traced, arrays: Sequence[Any]) -> list[Any]:
    """What a program gives, as part of what JAX traces."""
    try:
        with jax.enable_x64(True):
            return list(jax.extend.core.jaxpr_as_fun(traced.jaxpr)(*arrays))
    except jax.errors.UnexpectedTracerError as error:
        raise storages.outlived(error) from error


def run_or_fall_back(op: OpOverload, args: Sequence[Any], targets: Sequence[torch.Tensor] = ()) -> Any:
    """As `run`; but what XLA does not compute, torch does. op: it writes nothing."""
    try:
        return run(form_of(op), args, {}, targets)
    except ByTorch as reason:
        result = run_on_the_cpu(op, args, {}, str(reason))
    for target, value in zip(targets, [result], strict=True) if targets else ():
        run(form_of(aten.clone.default), (value,), {}, [target])
    return result


class Cache(Protocol):
    """What `find` keeps things in."""

    def get(self, key: Any, /) -> Any: ...

    def put(self, key: Any, value: Any, /) -> None: ...


def find(
    cache: Cache, make: Callable[[Problem], Any], key: Any, numbers: Sequence[Any], unsure: bool, problem: Callable[[], Problem]
) -> tuple[Any, Sequence[tuple[Any, np.dtype]]]:
    """What `make` made of an op, a Resized, or why there is neither (a str); and the numbers that it takes, in what dtypes.

    key: without the numbers; unsure: whether torch's kernel may refuse these. Raises: as `make`.
    """
    found = _known(cache, key, numbers, unsure)
    if found is None:
        with _makers.alone((id(cache), key)):
            # Another thread may have made it meanwhile.
            found = _known(cache, key, numbers, unsure) or _made(cache, make, key, numbers, unsure, problem)
    return found


def _known(cache: Cache, key: Any, numbers: Sequence[Any], unsure: bool) -> tuple[Any, Sequence[tuple[Any, np.dtype]]] | None:
    """What `find` gives, if it is there."""
    if numbers:
        known = CLOSED if unsure else cache.get(key)
        if isinstance(known, Resized):
            return known, ()
        variants = known if isinstance(known, tuple) else ()
        for program in variants:
            if (taken := program.numbers.inputs(numbers)) is not None:
                return program, taken
        if known is not CLOSED and len(variants) < _VARIANTS:
            return None
        key = key, _hashable(tuple(numbers))
    found = cache.get(key)  # or a reason
    return None if found is None else (found, ())


def _made(
    cache: Cache, make: Callable[[Problem], Any], key: Any, numbers: Sequence[Any], unsure: bool, problem: Callable[[], Problem]
) -> Any:
    """What `find` gives, and `_known` does not know."""
    if numbers:
        known = CLOSED if unsure else cache.get(key)
        variants = known if isinstance(known, tuple) else ()
        if known is not CLOSED and len(variants) < _VARIANTS:
            try:
                made = make(problem())
            except Exception:  # the next attempt, with numbers compiled in, succeeds or says what is wrong
                cache.put(key, CLOSED)
                if (found := _known(cache, key, numbers, unsure)) is not None:
                    return found
            else:
                cache.put(key, made if isinstance(made, Resized) else (*variants, made))
                if isinstance(made, Resized):
                    return made, ()
                taken = made.numbers.inputs(numbers)
                assert taken is not None
                return made, taken
        key = key, _hashable(tuple(numbers))
    try:
        closed = make(problem().closed() if numbers else problem())
    except ByTorch as reason:
        closed = str(reason)
    cache.put(key, closed)
    return closed, ()


class _Makers:
    """Of threads that want the same new program, one makes it, and the others wait. If it fails, the next one tries."""

    def __init__(self) -> None:
        self._lock = forks.lock()
        self._waited: dict[Any, list[Any]] = {}  # by key: a lock, and how many threads have it or want it
        self._thread = threading.local()

    @contextlib.contextmanager
    def alone(self, key: Any) -> Iterator[None]:
        if getattr(self._thread, "is_making", False):  # two threads, each of which needs what the other makes, would wait for ever
            yield
            return
        with self._lock:
            waited = self._waited.setdefault(key, [forks.lock(), 0])
            waited[1] += 1
        try:
            with waited[0]:
                self._thread.is_making = True
                try:
                    yield
                finally:
                    self._thread.is_making = False
        finally:
            with self._lock:
                waited[1] -= 1
                if not waited[1]:
                    del self._waited[key]


_makers = _Makers()


def _number(value: Any, dtype: np.dtype, where: meshes.Where) -> jax.Array:
    """A Python number as an array."""
    kind = type(value)
    # The sign tells zeros apart.
    key = kind, value, math.copysign(1.0, value) if kind is float else None, dtype, meshes.key_of(where)
    array = _numbers.get(key)
    if array is None:
        with jax.enable_x64(True), jax.ensure_compile_time_eval():
            array = jax.device_put(number(value, dtype), where)
        _numbers.put(key, array)
    return array


def resize_output(target: torch.Tensor, shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    """Give what an op writes its result to (`out`) the result's shape, as torch does."""
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
    """What tells an argument from all others: 1, 1.0 and True are three, and so are 0.0 and -0.0."""
    if value is None or type(value) is Operand:
        return value
    if type(value) is tuple:
        return tuple([_hashable(item) for item in value])
    if isinstance(value, float):
        return "float", repr(value)
    if isinstance(value, (bool, int, complex)):
        return type(value), repr(value)
    return value
