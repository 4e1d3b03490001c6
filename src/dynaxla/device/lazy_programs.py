"""Compiles and runs recorded ops as one program. Recordings with the same steps share their program."""

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
from ..runtime import devices, late_checks, meshes
from ..runtime.cache import LeastRecentlyUsed
from ..runtime.layout import storage_extent
from . import op_compiler
from .op_compiler import NewTensor, OpProgram, OpSpecialization

# The largest number of keys in the cache of compiled recordings.
CAPACITY = 256
# Compiled recordings by steps, shapes, device and settings. The programs of one key differ in the values that they return.
_programs: LeastRecentlyUsed[tuple[_CompiledRecording, ...]] = LeastRecentlyUsed(CAPACITY)
# The largest number of programs of one key. Once it is reached, a program that returns more values than wanted may be used. The set of
# wanted values depends on the times at which Python frees reference cycles, so a loop might otherwise compile a program at each iteration.
_MAX_PROGRAMS_PER_KEY = 8


@dataclass(frozen=True, eq=False)
class TracedOp:
    """A traced op in a recording. All calls with the same cache key share one object, which is compared by identity.

    The attributes that are not listed here are described in `op_compiler.OpProgram`.

    Attributes:
        name: the name of the op's overload.
        function: takes and returns arrays in the order of `op_compiler.OpProgram`.
        new_outputs: for each new tensor the size of its storage in bytes, its shape, stride and dtype; None or an int where the op returns
            None or an int.
        shape_dtypes: the shapes and dtypes of the returned arrays, without the check code.
        sharding: the sharding in the op's own arguments, or None.
    """

    name: str
    function: Callable[..., Sequence[jax.Array]]
    input_slots: tuple[int, ...]
    draws_random: bool
    written_slots: tuple[int, ...]
    new_outputs: tuple[tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype] | int | None, ...]
    is_list: bool
    checks: tuple[tuple[type[Exception], str], ...]
    variant: Any
    shape_dtypes: tuple[tuple[Any, Any], ...]
    sharding: NamedSharding | None

    @staticmethod
    def of(specialization: OpSpecialization, program: OpProgram) -> TracedOp:
        """Converts the result of `op_compiler.trace_op`."""
        new_outputs = tuple(_with_nbytes(item) if isinstance(item, NewTensor) else item for item in program.new_outputs)
        jaxpr = program.traced.jaxpr
        count = len(program.written_slots) + sum(isinstance(item, tuple) for item in new_outputs)
        shape_dtypes = tuple((aval.shape, aval.dtype) for aval in jaxpr.out_avals[:count])
        op = specialization.functional_op.op
        return TracedOp(
            str(op), jaxpr_as_fun(jaxpr), program.input_slots, program.draws_random, program.written_slots, new_outputs, program.is_list,
            program.checks, program.variant, shape_dtypes, sharding_of_call(op, specialization.args),
        )  # fmt: skip


def _with_nbytes(item: NewTensor) -> tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]:
    return storage_extent(item.shape, item.stride) * item.dtype.itemsize, item.shape, item.stride, item.dtype


class RecordedOp(NamedTuple):
    """A step of a recording: an op with its operands.

    Attributes:
        key: the `TracedOp`, the id of the op's first result, and the ids of the values that the op takes.
        first_value_id: the id of the op's first result.
        numbers: the op's Python numbers, with the dtypes in which the program takes them.
        seed: uint32[2] if the op draws random numbers, else None.
        location: the user's line for the note of an error, such as "model.py:41, in forward"; "" for an op without checks.
        line: the user's line for `executable.recorded_runs`; "" if no such context is active.
    """

    key: tuple[Any, ...]
    first_value_id: int
    numbers: Sequence[tuple[Any, np.dtype]]
    seed: np.ndarray | None
    location: str
    line: str = ""


class _CompiledRecording(NamedTuple):
    """A compiled recording.

    Attributes:
        wanted: the values that the program returns.
        call: runs the program on arrays, and returns arrays.
        checks: the index of the step, the exception and the message of each check.
    """

    wanted: tuple[WantedValue, ...]
    call: Callable[[Sequence[jax.Array]], Sequence[jax.Array]]
    checks: tuple[tuple[int, type[Exception], str], ...]


# The id of a value to return, and the sharding that it must have; None if XLA may choose the sharding.
WantedValue = tuple[int, NamedSharding | None]


def run(steps: Sequence[RecordedOp], arrays: Sequence[jax.Array], wanted: Sequence[WantedValue], device: jax.Device) -> Sequence[jax.Array]:
    """Runs the steps and returns the wanted values.

    Args:
        steps: the steps of a recording.
        arrays: the arrays from before the recording, with the ids -1, -2, ...
        wanted: the values to return.
        device: the device of the recording.

    Raises: the error of the first failed check of any step; CompilationError; ExecutionError; DeviceMismatch for two meshes.
    """
    metrics.add("lazy_ops", len(steps))
    if not wanted and not any(step.key[0].checks for step in steps):
        return []
    with metrics.timed("lookup"):
        settings = Settings.current(devices.platform_name(device))
        # `arrays` may have unused entries: operands of an op that was not recorded in the end.
        mesh_sharding, shardings = None, tuple[NamedSharding | None, ...]()
        if meshes.may_have_sharded_arrays():
            mesh_sharding, arrays = _move_to_mesh(steps, arrays)
            shardings = tuple([meshes.sharding_of(array) for array in arrays]) if mesh_sharding is not None else ()
        shape_dtypes = tuple([(array.shape, array.dtype) for array in arrays])
        # Inside `recorded_runs`, a recording on a mesh gets a program of its own, whose metadata has the user's line of each op.
        key = (
            device.id,
            settings,
            shape_dtypes,
            tuple([step.key for step in steps]),
            mesh_sharding,
            shardings,
            mesh_sharding is not None and is_recording_runs(),
        )
        compiled = _programs.get(key) or ()
        program = _choose_program(compiled, tuple(wanted))
    numbers = _number_arrays(steps)
    seeds = [step.seed for step in steps if step.seed is not None]
    inputs = [*arrays, *_device_put([*numbers.values(), *([np.stack(seeds)] if seeds else [])], mesh_sharding or device)]
    if program is None:
        program = _compile(steps, len(arrays), list(numbers), tuple(wanted), inputs, device, settings, mesh_sharding)
        _programs.put(key, (*compiled[-_MAX_PROGRAMS_PER_KEY + 1 :], program))
    else:
        metrics.add("later_runs")
    with metrics.timed("execute"):
        try:
            results = list(program.call(inputs))
        except jax.errors.JaxRuntimeError as error:
            raise execution_error("recorded ops", error) from error
        code = int(np.asarray(results.pop())) if program.checks else 0
    if code < len(program.checks):
        index, error_type, message = program.checks[code]
        failure = late_checks.failure(0, [(error_type, message)])
        assert failure is not None
        location = f" at {steps[index].location}" if steps[index].location else ""
        failure.add_note(f"{steps[index].key[0].name} raised this. It was recorded in lazy mode{location}, and has run only now.")
        raise failure
    if program.wanted == tuple(wanted):
        return results
    by_value = dict(zip(program.wanted, results, strict=True))
    return [by_value[value] for value in wanted]


def _move_to_mesh(steps: Sequence[RecordedOp], arrays: Sequence[jax.Array]) -> tuple[NamedSharding | None, Sequence[jax.Array]]:
    """Copies arrays on one device to the mesh of the other arrays and of the steps.

    Returns the mesh's replicated sharding and all arrays. Without a mesh, returns None and the same arrays.
    """
    shardings = [meshes.sharding_of(array) for array in arrays]
    mesh_sharding = meshes.common([*shardings, *(step.key[0].sharding for step in steps)])
    if mesh_sharding is None:
        return None, arrays
    pairs = zip(arrays, shardings, strict=True)
    return mesh_sharding, [meshes.copy_to(array, mesh_sharding) if sharding is None else array for array, sharding in pairs]


def _choose_program(programs: Sequence[_CompiledRecording], wanted: tuple[WantedValue, ...]) -> _CompiledRecording | None:
    """Returns the program, of several programs for the same steps, that returns the wanted values; None if one must be compiled.

    If there are `_MAX_PROGRAMS_PER_KEY` programs already, the chosen program may return further values, but as few as possible.
    """
    for program in programs:
        if program.wanted == wanted:
            return program
    if len(programs) < _MAX_PROGRAMS_PER_KEY:
        return None
    return min(
        (program for program in programs if set(wanted) <= set(program.wanted)), key=lambda program: len(program.wanted), default=None
    )


def _number_arrays(steps: Sequence[RecordedOp]) -> dict[np.dtype, np.ndarray]:
    """Returns the Python numbers of all steps in their order, as one array for each dtype."""
    numbers: dict[np.dtype, list[Any]] = {}
    for step in steps:
        for value, dtype in step.numbers:
            numbers.setdefault(dtype, []).append(value)
    return {dtype: _cast(values, dtype) for dtype, values in numbers.items()}


def _cast(values: list[Any], dtype: np.dtype) -> np.ndarray:
    """Casts Python numbers to a dtype as `number` does. Floats are cast all at once, which is faster."""
    if dtype in (np.float32, np.float64) and set(map(type, values)) == {float}:
        with np.errstate(over="ignore"):
            return np.array(values).astype(dtype)
    return np.array([number(value, dtype) for value in values], dtype)


def _device_put(arrays: Sequence[np.ndarray], device_or_mesh: meshes.DeviceOrMesh) -> list[jax.Array]:
    with jax.enable_x64(True):
        return [jax.device_put(array, device_or_mesh) for array in arrays]


def _compile(
    steps: Sequence[RecordedOp], array_count: int, dtype_order: Sequence[np.dtype], wanted: tuple[WantedValue, ...],
    program_inputs: Sequence[jax.Array], device: jax.Device, settings: Settings, mesh_sharding: NamedSharding | None,
) -> _CompiledRecording:  # fmt: skip
    """Compiles the steps as one program.

    Args:
        steps: the steps of a recording.
        array_count: the number of arrays from before the recording.
        dtype_order: the dtypes of the numbers' arrays, in their order among the inputs.
        wanted: the values that the program returns.
        program_inputs: the arrays from before the recording, the array of numbers of each dtype, and the array of seeds if there are any.
        device: the device of the recording.
        settings: the precision settings.
        mesh_sharding: the replicated sharding of the inputs' mesh; None on one device.
    """
    needed = _needed_steps(steps, [value for value, _ in wanted])
    checks = tuple((index, *check) for index, step in enumerate(steps) if needed[index] for check in step.key[0].checks)
    number_dtypes = [[dtype for _, dtype in step.numbers] for step in steps]
    draws = [step.seed is not None for step in steps]
    keys, lines = [step.key for step in steps], [step.line for step in steps]

    def program(*inputs: jax.Array) -> list[jax.Array]:
        """Takes `program_inputs`. Returns the wanted values, and the index of the first failed check if there are checks."""
        values = {-1 - index: array for index, array in enumerate(inputs[:array_count])}
        numbers = {dtype: iter(array) for dtype, array in zip(dtype_order, inputs[array_count:], strict=False)}
        seeds = iter(inputs[-1] if any(draws) else ())
        codes: list[tuple[int, jax.Array]] = []
        for (traced, first_value_id, *operands), is_needed, number_inputs, is_random, line in zip(
            keys, needed, number_dtypes, draws, lines, strict=True
        ):
            extra = [next(seeds)] if is_random else []
            extra += [next(numbers[dtype]) for dtype in number_inputs]
            if not is_needed:
                continue
            with jax.named_scope(f"at[{line}]") if line else contextlib.nullcontext():
                results = traced.function(*[values[operand] for operand in operands], *extra)
            if traced.checks:
                codes.append((len(traced.checks), results[-1]))
            values.update(zip(range(first_value_id, first_value_id + len(traced.shape_dtypes)), results, strict=False))
        code = [_first_failed(codes)] if codes else []
        return [*(values[value] for value, _ in wanted), *code]

    program.__name__ = "recorded_ops"
    if mesh_sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(device)
        avals = [jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding) for array in program_inputs]
        return _CompiledRecording(wanted, op_compiler.compile_program(program, avals, device, settings), checks)
    avals = [jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding) for array in program_inputs]
    call = op_compiler.compile_program(pipeline.PARTITIONABLE(program), avals, device, settings, [sharding for _, sharding in wanted])
    return _CompiledRecording(wanted, call, checks)


def _needed_steps(steps: Sequence[RecordedOp], wanted: Sequence[int]) -> list[bool]:
    """Returns True for each step that has a check, computes a wanted value, or computes an operand of such a step."""
    values, needed = set(wanted), []
    for step in reversed(steps):
        traced, first_value_id, *operands = step.key
        needed.append(bool(traced.checks) or not values.isdisjoint(range(first_value_id, first_value_id + len(traced.shape_dtypes))))
        if needed[-1]:
            values.update(operands)
    return needed[::-1]


def _first_failed(codes: Sequence[tuple[int, jax.Array]]) -> jax.Array:
    """Computes, in a program, the index of the first failed check among the checks of all ops, or the number of checks if none failed.

    Args:
        codes: for each op with checks, its number of checks and its check code (see `op_compiler.OpProgram`).
    """
    total = sum(count for count, _ in codes)
    code, end = jax.numpy.int32(total), total
    for count, first_failed in reversed(codes):
        end -= count
        code = jax.lax.select(first_failed < count, first_failed + np.int32(end), code)
    return code
