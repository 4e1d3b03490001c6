"""Eager mode on the device: each op is one compiled program, cached by the metadata of its operands.

The program takes the arrays in the operands' storages, and returns new arrays for the storages that the op writes to.
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
from ..lowering import dtypes, kernel_refusals
from ..lowering.ops.sharding_constraints import sharding_of_call
from ..lowering.promotion import number
from ..lowering.settings import Settings
from ..observe import metrics
from ..runtime import late_checks, meshes, private
from ..runtime.cache import LeastRecentlyUsed
from ..runtime.layout import row_major
from ..torch_ops import aten
from . import generators, pjrt_devices, storages
from .counterparts import FunctionalOp, for_numbers, form_of
from .cpu_fallback import run_on_the_cpu
from .op_compiler import NewTensor, NotLowered, NumberOperand, OpSpecialization, Resized, StorageMetadata, TensorOperand, build, traced_op
from .strided_memory import StridedView

# Compiled ops, by the metadata of their operands. For an op that XLA does not compute, the reason (str).
CAPACITY = 4096
_programs: LeastRecentlyUsed[Any] = LeastRecentlyUsed(CAPACITY)
# The same for traced programs, which become part of a function that JAX traces.
_traced_programs: LeastRecentlyUsed[Any] = LeastRecentlyUsed(CAPACITY)
# A cache value: each Python number of this op needs a program of its own.
CLOSED = object()
_NUMBERS = (int, float, bool, complex)
# Python numbers as arrays of rank 0.
_numbers: LeastRecentlyUsed[jax.Array] = LeastRecentlyUsed(256)
# The largest number of programs for different sets of numbers. Beyond it, each new number is compiled into a program of its own.
_VARIANTS = 8
# Ops whose operands may include indices on the CPU, as in ATen.
_INDICES = frozenset({"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"})


class _OpCall:
    """The arguments of one call, split into the metadata for the cache key and the arrays for the program."""

    def __init__(self, op: OpOverload) -> None:
        self.op = op
        self.device: torch.device | None = None
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.arrays: list[jax.Array | None] = []
        self.slots: list[StorageMetadata] = []
        self._places: dict[int, int] = {}
        self._hosts: list[tuple[int, torch.Tensor]] = []
        self._elsewhere: torch.device | None = None
        self.generator: torch.Generator | None = None
        self.numbers: list[Any] = []
        self.dtypes: set[torch.dtype] = set()

    def note_or_open(self, value: Any) -> Any:
        """Replaces an argument as `note` does, and also a Python number by a `NumberOperand`, if the program takes it as an input."""
        if type(value) is float or type(value) is int:
            self.numbers.append(value)
            return NumberOperand(len(self.numbers) - 1, type(value))
        return self.note(value)

    def note(self, value: Any) -> Any:
        """Replaces each tensor in an argument by an `TensorOperand`, and stores its array."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, (list, tuple)):
            return tuple([self.note(item) for item in value])
        if isinstance(value, torch.Generator):
            self.generator = value
            return None
        if isinstance(value, torch.device) and value.type == storages.NAME:
            self._use(pjrt_devices.with_index(value))
        return value

    def _use(self, device: torch.device) -> None:
        if self.device is None:
            self.device = device
        elif self.device != device:
            raise mixed(self.op, self.device, device)

    def _tensor(self, tensor: torch.Tensor) -> TensorOperand:
        is_host = check_kind(self.op, tensor)
        self.dtypes.add(tensor.dtype)
        if tensor.device.type != storages.NAME:
            if not is_host:
                self._elsewhere = tensor.device
            self._hosts.append((len(self.arrays), tensor))
            shape = tuple(tensor.shape)
            self._add(None, StorageMetadata(tensor.nbytes, shape, dtypes.to_jax(tensor.dtype)))
            return TensorOperand(len(self.arrays) - 1, StridedView(tensor.dtype, shape, row_major(shape)))
        self._use(tensor.device)
        storage = tensor.untyped_storage()
        identity = private.identity_of(storage)
        slot = self._places.get(identity)
        if slot is None:
            slot = self._places[identity] = len(self.arrays)
            array = storages.array_of(storage)
            self.storages[slot] = storage
            self._add(array, StorageMetadata(storage.nbytes(), *((None, None) if array is None else (array.shape, array.dtype))))
        return TensorOperand(slot, StridedView.of(tensor))

    def _add(self, array: jax.Array | None, held: StorageMetadata) -> None:
        self.arrays.append(array)
        self.slots.append(held)

    def finish(self, is_traced: bool, own: NamedSharding | None) -> tuple[jax.Device, NamedSharding | None]:
        """Copies operands on the CPU to the device or the mesh, and returns the device, and the mesh if an operand is on one.

        Args:
            is_traced: an operand holds a JAX tracer.
            own: the sharding in the op's own arguments, if it has one.

        Raises: RuntimeError if a tensor is on another device; DeviceMismatch for two meshes.
        """
        assert self.device is not None
        if self._elsewhere is not None:
            raise mixed(self.op, self._elsewhere, self.device)
        device = pjrt_devices.jax_device(self.device.index)
        where = self._on_mesh(own) if meshes.exist() and not is_traced else None
        for slot, tensor in self._hosts:
            self.arrays[slot] = storages.as_array(tensor, where or device)
            self.slots[slot] = self.slots[slot]._replace(sharding=where)
        return device, where

    def _on_mesh(self, own: NamedSharding | None) -> NamedSharding | None:
        """Returns the mesh on which an operand lies, or None, and replicates all operands on one device over that mesh."""
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
    """True if an operand is on the CPU and may be, as it has rank 0 or may be an index.

    Raises: RuntimeError or NotLowered for a dtype or layout that the device does not have.
    """
    if tensor.layout != torch.strided:
        raise NotLowered(f"it takes a tensor of layout {tensor.layout}")
    if not dtypes.is_supported(tensor.dtype):
        raise RuntimeError(f"{op} takes a tensor of {tensor.dtype}, and JAX has no such dtype")
    return tensor.device.type == "cpu" and (not tensor.dim() or op._schema.name in _INDICES)


def mixed(op: OpOverload, one: torch.device, other: torch.device) -> RuntimeError:
    names = " and ".join(sorted({str(one), str(other)}))
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {names}! (in {op}; move one of them with .to)"
    )


def kernel(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Runs an op on the device. This is the fallback kernel that torch's dispatcher calls.

    Raises: RuntimeError for operands on several devices; ForkError; the error of a failed check of the op. In these cases nothing has been
    written.
    """
    form = form_of(op)
    if positions := tuple([index for index in form.tensors if index < len(args) and type(args[index]) in _NUMBERS]):
        op = for_numbers(op, positions)
        form = form_of(op)
    if form.is_view:
        return private.by_cpu_kernel(op, *args, **kwargs)
    if form.functional is None:
        return run_on_the_cpu(op, args, kwargs, "it has no functional form")
    if forks.has_lost_xla():
        raise forks.fork_error()
    written = _values(op, form.written, args, kwargs)
    if any(not isinstance(target, torch.Tensor) for target in written):
        return run_on_the_cpu(op, args, kwargs, "it writes to a list of tensors")
    try:
        made = run(form, args, kwargs, written)
    except NotLowered as reason:
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


# The function that runs ops in place of `run`, in lazy mode: see lazy_mode.py.
_instead: Callable[..., Any] | None = None


def run_by(function: Callable[..., Any] | None) -> None:
    """Makes `run` call a function with its arguments from now on; None: `run` computes the op itself."""
    global _instead
    _instead = function


def run(form: FunctionalOp, args: Sequence[Any], kwargs: Mapping[str, Any], targets: Sequence[torch.Tensor] = ()) -> Any:
    """Computes an op. Its results are written to the targets; without targets they are new tensors.

    Raises: NotLowered; the errors of `kernel`.
    """
    is_traced = storages.hold_tracers(tree_leaves((args, kwargs, list(targets)))) if storages.tracers_exist() else False
    if _instead is not None and not is_traced:
        return _instead(form, args, kwargs, targets)
    call = _OpCall(form.op)
    noted: Any
    if form.numbers:
        noted = tuple([call.note_or_open(value) if index in form.numbers else call.note(value) for index, value in enumerate(args)])
        named = {name: call.note_or_open(value) if name in form.numbers else call.note(value) for name, value in kwargs.items()}
    else:
        noted, named = call.note(args), {name: call.note(value) for name, value in kwargs.items()}
    noted_targets = tuple([call.note(target) for target in targets])
    if call.device is None:
        call.device = pjrt_devices.with_index(torch.device(storages.NAME))
    device, where = call.finish(is_traced, sharding_of_call(form.op, args))
    settings = Settings.current("cuda" if device.platform == "gpu" else device.platform)
    slots = tuple(call.slots)
    key = (
        form.op, meshes.key_of(where or device), _hashable(noted), tuple([(name, _hashable(value)) for name, value in named.items()]),
        noted_targets, slots, torch.get_default_dtype(), settings,
    )  # fmt: skip
    unsure = bool(call.numbers) and kernel_refusals.is_doubtful(form.name, call.numbers, call.dtypes)
    found, taken = find(
        _traced_programs if is_traced else _programs, traced_op if is_traced else build, key, call.numbers, unsure,
        lambda: OpSpecialization(form, noted, named, noted_targets, slots, device, tuple(call.numbers), where),
    )  # fmt: skip
    if isinstance(found, str):
        raise NotLowered(found)
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
        results.pop()  # the code of the checks is a tracer, whose value is not known here
    elif found.checks and (failure := late_checks.failure(int(np.asarray(results.pop())), found.checks)) is not None:
        raise failure
    metrics.add("device_ops")
    if found.written:
        changes = [(call.storages[slot], call.arrays[slot], results.pop(0)) for slot in found.written]
        if not storages.replace_arrays(changes):
            return run(form, args, kwargs, targets)
    made = [
        storages.make(item.shape, item.stride, item.dtype, call.device, results.pop(0)) if isinstance(item, NewTensor) else item
        for item in found.made
    ]
    return tuple(made) if found.is_list else (made[0] if made else None)


def _inlined(traced: jax.stages.Traced, arrays: Sequence[Any]) -> list[Any]:
    """Inlines a traced program into the function that JAX traces, and returns its results."""
    try:
        with jax.enable_x64(True):
            return list(jax.extend.core.jaxpr_as_fun(traced.jaxpr)(*arrays))
    except jax.errors.UnexpectedTracerError as error:
        raise storages.outlived(error) from error


def run_or_fall_back(op: OpOverload, args: Sequence[Any], targets: Sequence[torch.Tensor] = ()) -> Any:
    """Computes a functional op as `run` does, or by torch's CPU kernel if XLA does not compute it."""
    try:
        return run(form_of(op), args, {}, targets)
    except NotLowered as reason:
        result = run_on_the_cpu(op, args, {}, str(reason))
    for target, value in zip(targets, [result], strict=True) if targets else ():
        run(form_of(aten.clone.default), (value,), {}, [target])
    return result


class Cache(Protocol):
    """The cache of `find`."""

    def get(self, key: Any, /) -> Any: ...

    def put(self, key: Any, value: Any, /) -> None: ...


def find(
    cache: Cache,
    make: Callable[[OpSpecialization], Any],
    key: Any,
    numbers: Sequence[Any],
    unsure: bool,
    problem: Callable[[], OpSpecialization],
) -> tuple[Any, Sequence[tuple[Any, np.dtype]]]:
    """Returns the program of an op, and the numbers that it takes as inputs with their dtypes.

    In place of the program it returns a `Resized` if the targets must be resized first, or the reason (str) why XLA cannot compute the op.

    Args:
        cache: where programs are looked up and stored.
        make: compiles or traces a problem.
        key: identifies the call, without its numbers.
        numbers: the Python numbers that the program may take as inputs.
        unsure: torch's kernel may reject these numbers, so they are compiled in and checked.
        problem: returns the op to compile, called only if the cache has no program.

    Raises: the errors of `make`.
    """
    found = _known(cache, key, numbers, unsure)
    if found is None:
        with _makers.alone((id(cache), key)):
            # Another thread may have stored it meanwhile.
            found = _known(cache, key, numbers, unsure) or _made(cache, make, key, numbers, unsure, problem)
    return found


def _known(cache: Cache, key: Any, numbers: Sequence[Any], unsure: bool) -> tuple[Any, Sequence[tuple[Any, np.dtype]]] | None:
    """Returns the result of `find` if it is in the cache, else None."""
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
    found = cache.get(key)  # a program, or the reason (str) why there is none
    return None if found is None else (found, ())


def _made(
    cache: Cache,
    make: Callable[[OpSpecialization], Any],
    key: Any,
    numbers: Sequence[Any],
    unsure: bool,
    problem: Callable[[], OpSpecialization],
) -> Any:
    """Makes the result of `find` that is not in the cache, and stores it there."""
    if numbers:
        known = CLOSED if unsure else cache.get(key)
        variants = known if isinstance(known, tuple) else ()
        if known is not CLOSED and len(variants) < _VARIANTS:
            try:
                made = make(problem())
            except Exception:  # the next attempt, with the numbers compiled in, succeeds or raises the right error
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
    except NotLowered as reason:
        closed = str(reason)
    cache.put(key, closed)
    return closed, ()


class _Makers:
    """Locks by key: of several threads that need the same new program, one compiles it and the others wait. If it fails, the next tries."""

    def __init__(self) -> None:
        self._lock = forks.lock()
        self._waited: dict[Any, list[Any]] = {}  # by key: a lock, and the number of threads that hold it or wait for it
        self._thread = threading.local()

    @contextlib.contextmanager
    def alone(self, key: Any) -> Iterator[None]:
        if getattr(self._thread, "is_making", False):  # two threads that need each other's program would wait for ever
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
    """Returns a Python number as an array of rank 0."""
    kind = type(value)
    # The sign distinguishes 0.0 from -0.0.
    key = kind, value, math.copysign(1.0, value) if kind is float else None, dtype, meshes.key_of(where)
    array = _numbers.get(key)
    if array is None:
        with jax.enable_x64(True), jax.ensure_compile_time_eval():
            array = jax.device_put(number(value, dtype), where)
        _numbers.put(key, array)
    return array


def resize_output(target: torch.Tensor, shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    """Resizes an `out` argument to the shape of the result, with torch's warning."""
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
    """Returns a hashable key of an argument, in which 1, 1.0 and True differ, and 0.0 and -0.0 do too."""
    if value is None or type(value) is TensorOperand:
        return value
    if type(value) is tuple:
        return tuple([_hashable(item) for item in value])
    if isinstance(value, float):
        return "float", repr(value)
    if isinstance(value, (bool, int, complex)):
        return type(value), repr(value)
    return value
