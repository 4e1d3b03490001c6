"""Compiles and runs recorded ops as one program. Recordings with the same ops on the same values share it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding

from ..engine.executable import execution_error, is_recording_runs
from ..lowering.ops.sharding_constraints import sharding_of_call
from ..lowering.promotion import number
from ..lowering.settings import Settings
from ..observe import metrics
from ..passes import pipeline
from ..runtime import late_checks, meshes
from ..runtime.cache import LeastRecentlyUsed
from ..runtime.layout import storage_extent
from . import op_compiler
from .op_compiler import NewTensor, OpSpecialization, Traced

# Compiled recordings.
CAPACITY = 256
_programs: LeastRecentlyUsed[tuple[_CompiledRecording, ...]] = LeastRecentlyUsed(CAPACITY)
# The largest number of programs with the same ops for different sets of wanted values. Beyond it, a program that returns more values than
# wanted is used: the times at which Python frees reference cycles must not cause compilation after compilation.
_VARIANTS = 8


@dataclass(frozen=True, eq=False)
class TracedOp:
    """A traced op in a recording. All calls with the same key share one object, so that steps compare it by identity.

    The attributes that are not listed here are those of `one_op.Traced`.

    Attributes:
        name: the op's.
        function: takes and returns arrays in the order of `one_op.Traced`.
        made: for each new tensor the size of its storage in bytes, its shape, stride and dtype; None or a number where the op
            returns that.
        kinds: the shapes and dtypes of the returned arrays.
        sharding: the sharding in the op's own arguments, or None.
    """

    name: str
    function: Callable[..., Sequence[jax.Array]]
    given: tuple[int, ...]
    draws: bool
    written: tuple[int, ...]
    made: tuple[tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype] | int | None, ...]
    is_list: bool
    checks: tuple[tuple[type[Exception], str], ...]
    numbers: Any
    kinds: tuple[tuple[Any, Any], ...]
    sharding: NamedSharding | None

    @staticmethod
    def of(problem: OpSpecialization, found: Traced) -> TracedOp:
        made = tuple(_sized(item) if isinstance(item, NewTensor) else item for item in found.made)
        jaxpr = found.traced.jaxpr
        count = len(found.written) + sum(isinstance(item, tuple) for item in made)
        kinds = tuple((aval.shape, aval.dtype) for aval in jaxpr.out_avals[:count])
        return TracedOp(
            str(problem.form.op), jaxpr_as_fun(jaxpr), found.given, found.draws, found.written, made, found.is_list, found.checks,
            found.numbers, kinds, sharding_of_call(problem.form.op, problem.args),
        )  # fmt: skip


def _sized(item: NewTensor) -> tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]:
    return storage_extent(item.shape, item.stride) * item.dtype.itemsize, item.shape, item.stride, item.dtype


class RecordedOp(NamedTuple):
    """A recorded op.

    Attributes:
        key: the `TracedOp`, the number of the op's first result, and the numbers of the values that it takes.
        first: the number of its first result.
        numbers: its Python numbers, with the dtypes in which the program takes them.
        seed: uint32[2] if it draws random numbers, else None.
        where: the user's line if the op has checks, else "".
        line: the user's line if programs are watched (`is_recording_runs`), else "".
    """

    key: tuple[Any, ...]
    first: int
    numbers: Sequence[tuple[Any, np.dtype]]
    seed: np.ndarray | None
    where: str
    line: str = ""


class _CompiledRecording(NamedTuple):
    """A compiled recording.

    Attributes:
        wanted: the values that it returns.
        call: takes and returns arrays.
        checks: the index of the step, the exception and the message of each check.
    """

    wanted: tuple[Wanted, ...]
    call: Callable[[Sequence[jax.Array]], Sequence[jax.Array]]
    checks: tuple[tuple[int, type[Exception], str], ...]


# The number of a value, and its sharding; None where XLA chooses.
Wanted = tuple[int, NamedSharding | None]


def run(steps: Sequence[RecordedOp], arrays: Sequence[jax.Array], wanted: Sequence[Wanted], device: jax.Device) -> Sequence[jax.Array]:
    """Runs the steps and returns the wanted values.

    Args:
        arrays: the values -1, -2, ... from before the recording.

    Raises: the error of the first failed check of any step; CompilationError; ExecutionError; DeviceMismatch for two meshes.
    """
    metrics.add("lazy_ops", len(steps))
    if not wanted and not any(step.key[0].checks for step in steps):
        return []
    with metrics.timed("lookup"):
        settings = Settings.current("cuda" if device.platform == "gpu" else device.platform)
        # `arrays` may have unused entries: the operands of an op that was noted but not recorded.
        where, placed = None, tuple[NamedSharding | None, ...]()
        if meshes.exist():
            where, arrays = _on_mesh(steps, arrays)
            placed = tuple([meshes.sharding_of(array) for array in arrays]) if where is not None else ()
        kinds = tuple([(array.shape, array.dtype) for array in arrays])
        # While programs are watched, each op in a program is annotated with its line, so that is a different program.
        key = device.id, settings, kinds, tuple([step.key for step in steps]), where, placed, where is not None and is_recording_runs()
        known = _programs.get(key) or ()
        program = _choose(known, tuple(wanted))
    numbers = _numbers(steps)
    seeds = [step.seed for step in steps if step.seed is not None]
    given = [*arrays, *_brought([*numbers.values(), *([np.stack(seeds)] if seeds else [])], where or device)]
    if program is None:
        program = _compile(steps, len(arrays), list(numbers), tuple(wanted), given, device, settings, where)
        _programs.put(key, (*known[-_VARIANTS + 1 :], program))
    else:
        metrics.add("found_compiled")
    with metrics.timed("execute"):
        try:
            results = list(program.call(given))
        except jax.errors.JaxRuntimeError as error:
            raise execution_error("recorded ops", error) from error
        code = int(np.asarray(results.pop())) if program.checks else 0
    if code < len(program.checks):
        index, kind, message = program.checks[code]
        failure = late_checks.failure(0, [(kind, message)])
        assert failure is not None
        failure.add_note(f"{steps[index].key[0].name} raised this. It was recorded in lazy mode{steps[index].where}, and has run only now.")
        raise failure
    if program.wanted == tuple(wanted):
        return results
    by_value = dict(zip(program.wanted, results, strict=True))
    return [by_value[value] for value in wanted]


def _on_mesh(steps: Sequence[RecordedOp], arrays: Sequence[jax.Array]) -> tuple[NamedSharding | None, Sequence[jax.Array]]:
    """Returns the mesh on which an array lies, or None, and all arrays moved to that mesh."""
    shardings = [meshes.sharding_of(array) for array in arrays]
    where = meshes.common([*shardings, *(step.key[0].sharding for step in steps)])
    if where is None:
        return None, arrays
    return where, [meshes.copied_to(array, where) if own is None else array for array, own in zip(arrays, shardings, strict=True)]


def _choose(known: Sequence[_CompiledRecording], wanted: tuple[Wanted, ...]) -> _CompiledRecording | None:
    """Returns the program for the wanted values among programs of the same ops.

    With `_VARIANTS` programs, also one that returns more values, the smallest such program. None: a new one must be compiled.
    """
    for program in known:
        if program.wanted == wanted:
            return program
    if len(known) < _VARIANTS:
        return None
    return min((program for program in known if set(wanted) <= set(program.wanted)), key=lambda program: len(program.wanted), default=None)


def _numbers(steps: Sequence[RecordedOp]) -> dict[np.dtype, np.ndarray]:
    """Returns the Python numbers of all steps in their order, as one array for each dtype."""
    found: dict[np.dtype, list[Any]] = {}
    for step in steps:
        for value, dtype in step.numbers:
            found.setdefault(dtype, []).append(value)
    return {dtype: _cast(values, dtype) for dtype, values in found.items()}


def _cast(values: list[Any], dtype: np.dtype) -> np.ndarray:
    if dtype in (np.float32, np.float64) and set(map(type, values)) == {float}:
        with np.errstate(over="ignore"):
            return np.array(values).astype(dtype)
    return np.array([number(value, dtype) for value in values], dtype)


def _brought(arrays: Sequence[np.ndarray], where: meshes.DeviceOrMesh) -> list[jax.Array]:
    with jax.enable_x64(True):
        return [jax.device_put(array, where) for array in arrays]


def _compile(
    steps: Sequence[RecordedOp], count: int, dtypes: Sequence[np.dtype], wanted: tuple[Wanted, ...], given: Sequence[jax.Array],
    device: jax.Device, settings: Settings, where: NamedSharding | None,
) -> _CompiledRecording:  # fmt: skip
    """Compiles the steps to one program.

    Args:
        count: the number of arrays from before the recording.
        dtypes: of the numbers' arrays.
        given: the inputs: the arrays from before the recording, the numbers by dtype, and the seeds.
    """
    needed = _needed(steps, [value for value, _ in wanted])
    checks = tuple((index, *check) for index, step in enumerate(steps) if needed[index] for check in step.key[0].checks)
    taken = [[dtype for _, dtype in step.numbers] for step in steps]
    draws = [step.seed is not None for step in steps]
    keys, lines = [step.key for step in steps], [step.line for step in steps]

    def program(*inputs: jax.Array) -> list[jax.Array]:
        values = {-1 - index: array for index, array in enumerate(inputs[:count])}
        numbers = {dtype: iter(array) for dtype, array in zip(dtypes, inputs[count:], strict=False)}
        seeds = iter(inputs[-1] if any(draws) else ())
        codes: list[tuple[int, jax.Array]] = []
        for (known, first, *operands), is_needed, own, is_drawn, line in zip(keys, needed, taken, draws, lines, strict=True):
            more = [next(seeds)] if is_drawn else []
            more += [next(numbers[dtype]) for dtype in own]
            if not is_needed:
                continue
            with jax.named_scope(f"at[{line}]") if line else contextlib.nullcontext():
                results = known.function(*[values[operand] for operand in operands], *more)
            if known.checks:
                codes.append((len(known.checks), results[-1]))
            values.update(zip(range(first, first + len(known.kinds)), results, strict=False))
        code = [_first_failed(codes)] if codes else []
        return [*(values[value] for value, _ in wanted), *code]

    program.__name__ = "recorded_ops"
    if where is None:
        sharding = jax.sharding.SingleDeviceSharding(device)
        avals = [jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding) for array in given]
        return _CompiledRecording(wanted, op_compiler.compiled(program, avals, device, settings), checks)
    avals = [jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding) for array in given]
    call = op_compiler.compiled(pipeline.PARTITIONABLE(program), avals, device, settings, [sharding for _, sharding in wanted])
    return _CompiledRecording(wanted, call, checks)


def _needed(steps: Sequence[RecordedOp], wanted: Sequence[int]) -> list[bool]:
    """Returns for each step True if it has a check, computes a wanted value, or computes an operand of such a step."""
    values, found = set(wanted), []
    for step in reversed(steps):
        known, first, *operands = step.key
        found.append(bool(known.checks) or not values.isdisjoint(range(first, first + len(known.kinds))))
        if found[-1]:
            values.update(operands)
    return found[::-1]


def _first_failed(codes: Sequence[tuple[int, jax.Array]]) -> jax.Array:
    """Computes, in a program, the index of the first failed check among the checks of all ops, or the number of checks if none failed.

    Args:
        codes: for each op, its number of checks, and the index of the first failed one among them.
    """
    total = sum(count for count, _ in codes)
    code, end = jax.numpy.int32(total), total
    for count, own in reversed(codes):
        end -= count
        code = jax.lax.select(own < count, own + np.int32(end), code)
    return code
