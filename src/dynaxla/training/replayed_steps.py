"""The programs of a step. A program replaces the step's Python code in every call whose state matches the recorded state.

The function is recorded on fake tensors (recorder.py), once in the current state and once in the state after that call. If both recordings
have the same program, as for most optimizers after their state has been created, that program serves all calls. Otherwise the current state
is recorded once more, and gets a program of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_unflatten

from ..config import Options
from ..engine.dry_run import DryRun, first_program
from ..errors import CaptureError, DynaxlaError
from ..guards.invariants import MetadataSnapshot
from ..guards.object_graph import ObjectGraph
from ..guards.observation import Observation, Refused, observe
from ..guards.slots import ABSENT, Place
from ..guards.snapshot import FunctionGuards, Number, Snapshot, param_groups
from ..lowering.asynchronous import is_collective
from ..observe import metrics
from ..runtime import capture_lock, guards
from ..runtime.cache import LeastRecentlyUsed
from ..runtime.guards import Getter
from ..runtime.number_tracer import Formula, evaluate
from . import parallel_modules
from .eager_collectives import program_collectives
from .parallel_modules import ParallelModules
from .recorded_graph import RecordedGraph
from .recorder import Recorder
from .recording_settings import compiling, replaced_param_groups, without_torch_compile
from .recordings import Recording, build, numbers_of, object_paths_of, outputs_of
from .traced_numbers import TracedNumber, TracedNumberInspected
from .tracked_arrays import TrackedArrays, ValuesRead
from .unrecordable import (
    catches_exceptions,
    refuse_aliased_groups,
    refuse_comparing_classes,
    refuse_iterators,
    refuse_overlapping,
    refuse_shared_memory,
)
from .value_reads import ValueReadDetector

# The maximum number of attempts of one capture. An attempt ends early, and is repeated, if a recording in it runs new code or reads the
# value of an input.
_MAX_ATTEMPTS = 6
# One seed per recording, so that two recordings have different stand-ins (traced_numbers.py).
_seeds = itertools.count(1)
_REFUSED = "refused"
T = TypeVar("T")
# The outcomes of comparisons of traced numbers, by formula. See `NumberTrace.conditions`.
Conditions = Mapping[Formula, bool]


class StepPrograms:
    """The programs of a function, one for each state.

    A state is the combination of the function's surroundings (all objects that it can read besides its arguments), its arguments, and
    torch's settings. `Snapshot.key` identifies it.
    """

    def __init__(self, function: Callable[..., Any], options: Options) -> None:
        self._function = function
        self._options = options
        self._guards = FunctionGuards(function, options.executables)
        # For each key: programs, each with the conditions on numbers under which it may be replayed. `_REFUSED` is in place of a program if
        # the recording under these conditions was refused.
        self._programs: LeastRecentlyUsed[list[tuple[Conditions, _RecordedProgram | str]]] = LeastRecentlyUsed(options.executables)
        # The conditions of the last recording.
        self._conditions: Conditions = {}
        # True if the code of the last recording has an `except` clause.
        self._catches_exceptions = False
        # Keys of states in which a call has run in eager mode and has only done what a program would do.
        self._recordable: LeastRecentlyUsed[bool] = LeastRecentlyUsed(options.executables)
        # The recording of the last capture, if its program serves only a first call.
        self._first_call: Recording | None = None
        # The modules of torch.distributed that the last recording could reach.
        self._modules = ParallelModules()

    def take_snapshot(self, args: Any, kwargs: Any) -> Snapshot:
        """Returns a snapshot of the state before a call. Raises: CaptureError for incomparable state and for an unsupported module."""
        self._modules.prepare()
        self._modules.refuse()
        return self._guards.take(args, kwargs)

    def difference(self, before: Any, snapshot: Snapshot) -> str:
        """Returns the path of the first difference between an earlier snapshot, given by its key, and this one; "" if it is not known."""
        return self._guards.difference(before, snapshot.key)

    @property
    def has_run(self) -> bool:
        """True if the function has run, so that the state that it can read is known."""
        return self._guards.has_run

    def is_recordable(self, snapshot: Snapshot) -> bool:
        """True if a call in this state has run in eager mode, and has done nothing that a program would not do."""
        return self._recordable.get(snapshot.key) is not None

    def observe(self, snapshot: Snapshot | None, args: Any, kwargs: Any) -> tuple[Any, str, bool]:
        """Runs the function in eager mode under observation.

        `snapshot` is the state before the call; None for the first call, whose state is unknown.

        Returns:
            The function's result. A message with the first effect that a program would not repeat; "" if there is none. True if code or a
            getter (runtime/guards.py) was called that no earlier call has called: then each state needs another call in eager mode.
        """
        with (
            without_torch_compile(),
            self._eager_collectives(args, kwargs),
            guards.collected_getters() as getters,
            ValueReadDetector() as reads,
        ):
            result, observation = observe(self._function, args, kwargs)
        is_new = self._widen_guards(observation, getters)
        effect = next(iter(observation.effects), None)
        settings = "it changes settings of torch" if observation.changes_settings else ""
        reason = reads.first or (
            f"the step does something that a program cannot repeat: {effect or settings}" if effect or settings else ""
        )
        if snapshot is not None and not reason and not is_new:
            self._recordable.put(snapshot.key, True)
        return result, reason, is_new

    def run_eagerly(self, args: Any, kwargs: Any) -> Any:
        """Runs the function in eager mode, without observation."""
        with self._eager_collectives(args, kwargs):
            return self._function(*args, **kwargs)

    @contextlib.contextmanager
    def _eager_collectives(self, args: Any, kwargs: Any) -> Iterator[None]:
        """Inside the context, the function in eager mode calls the same collectives as the step's program in other processes."""
        if parallel_modules.in_process_group():
            with program_collectives(self._parallel_modules(args, kwargs)):
                yield
        else:
            yield

    def run(self, snapshot: Snapshot) -> tuple[bool, Any]:
        """Runs the program for this state. Returns True and the result; False and None if there is no program."""
        program = self._find(snapshot)
        return (True, program.run(snapshot)) if isinstance(program, _RecordedProgram) else (False, None)

    def has_room(self, snapshot: Snapshot) -> bool:
        """True if another program for this state's key may be added: the option `executables` limits the programs of each key."""
        return len(self._programs.get(snapshot.key) or ()) < self._options.executables

    def has_programs(self, snapshot: Snapshot) -> bool:
        """True if there are programs for this state's key, possibly under other conditions on numbers."""
        return bool(self._programs.get(snapshot.key))

    def is_refused(self, snapshot: Snapshot) -> bool:
        """True if an earlier recording was refused under conditions on numbers that hold in this state, too."""
        return self._find(snapshot) == _REFUSED

    def _find(self, snapshot: Snapshot) -> _RecordedProgram | str | None:
        """Returns the program, or `_REFUSED`, for this state. None if no recording's conditions hold, or if a number cannot be computed."""
        for conditions, program in self._programs.get(snapshot.key) or ():
            with contextlib.suppress(ArithmeticError):  # such as a division by zero, which the call in eager mode then raises, too
                if all(evaluate(comparison, snapshot.number_at) == outcome for comparison, outcome in conditions.items()):
                    if isinstance(program, _RecordedProgram):
                        program.check_numbers(snapshot)
                    return program
        return None

    def _add_program(self, snapshot: Snapshot, conditions: Conditions, program: _RecordedProgram | str) -> None:
        """Adds a program for states with the snapshot's key, in which these conditions hold."""
        earlier = self._programs.get(snapshot.key) or []
        self._programs.put(snapshot.key, [(dict(conditions), program), *earlier])

    def capture(self, args: Any, kwargs: Any) -> tuple[_RecordedProgram, dict[Place, Any]]:
        """Records and compiles the step for the current state.

        Returns:
            The program, and the values that `run_first` must put into places (entries of containers, guards/slots.py) before it runs.

        Raises:
            CaptureError: the step cannot be recorded.
            Refused: the step would have an effect that a program cannot repeat.

        After these exceptions, and after exceptions of the function, all state is as before.
        """
        with capture_lock.exclusive(), metrics.timed("capture"):
            self._parallel_modules(args, kwargs).prepare()
            for attempt in range(1, _MAX_ATTEMPTS + 1):
                self._guards.forget_surroundings()  # numbers may have changed since the last snapshot
                snapshot = self._guards.take(args, kwargs)
                self._guards.check_reached(snapshot)
                try:
                    return self._compile_for(snapshot, args, kwargs)
                except TracedNumberInspected as error:
                    # Half of the attempts find numbers one by one. Then all changing numbers are guarded by value at once.
                    others = self._changing_numbers(snapshot) if attempt > _MAX_ATTEMPTS // 2 else ()
                    self._guards.guard_numbers_by_value({*error.places, *others})
                except ValuesRead as error:
                    self._guards.guard_arrays_by_value(error.paths)
                except _GuardsWidened:
                    continue
                except (CaptureError, Refused):
                    if self._conditions:
                        self._add_program(snapshot, self._conditions, _REFUSED)
                    raise
                except DynaxlaError:
                    raise
                except Exception:  # perhaps of a function written in C that accepts no traced number
                    numbers = self._changing_numbers(snapshot)
                    if not numbers:
                        raise
                    self._guards.guard_numbers_by_value(numbers)
        raise CaptureError("the step runs different Python code in each recording")

    def _parallel_modules(self, args: Any, kwargs: Any) -> ParallelModules:
        """Returns the modules of torch.distributed that the function can reach."""
        if not parallel_modules.in_process_group():
            return ParallelModules()
        return ParallelModules.among(self._guards.walk_executed(args, kwargs).objects.values())

    def run_first(self, program: _RecordedProgram, initial: Mapping[Place, Any], args: Any, kwargs: Any) -> Any:
        """Puts the initial values of a program from `capture` into their places, and runs the program."""
        snapshot = self._guards.take(args, kwargs)
        if not initial:
            return program.run(snapshot)
        try:
            snapshot.put(initial)
            return program.run(self._guards.take(args, kwargs))
        except BaseException:
            snapshot.restore()
            raise

    def dry_run(self, args: Any, kwargs: Any, inspect: Callable[[ObjectGraph], T]) -> tuple[DryRun | None, T]:
        """Prepares the program that calls will run after a first call, without running it. All state is as before afterwards.

        Returns: the prepared program, or None if there is no XLA program; the result of `inspect` for the surroundings after a first call.
        Raises: the same exceptions as `capture`.
        """
        program, initial = self.capture(args, kwargs)
        snapshot = self._guards.take(args, kwargs)
        try:
            if self._first_call is None:
                snapshot.put(initial)
            else:  # the first call has a program of its own; later calls start in the state after the first call
                snapshot.put(self._first_call.values_after(snapshot, initial))
                return self.dry_run(args, kwargs, inspect)
            later = self._guards.take(args, kwargs)
            return program.dry_run(later), inspect(later.surroundings)
        finally:
            snapshot.restore()

    # The following functions run only during a capture.

    def _compile_for(self, snapshot: Snapshot, args: Any, kwargs: Any) -> tuple[_RecordedProgram, dict[Place, Any]]:
        """Records and compiles the step for this state. Returns: as `capture`."""
        self._first_call = None
        first = self._record(snapshot, args, kwargs)
        initial = first.initial_values(snapshot)
        try:
            # New tensors have the right shapes, but no values. An argument from which the step removes entries stays unchanged, because a
            # later call gets another one.
            after = first.values_after(snapshot, initial)
            shortened = {path for (path, _), value in after.items() if value is ABSENT} & snapshot.arguments.containers.keys()
            snapshot.put({place: value for place, value in after.items() if place[0] not in shortened})
            later = self._guards.take_temporary(args, kwargs)
            second = self._record(later, args, kwargs)
            self._check_reusable(later, second)
            if first.has_same_program(second, initial):
                program = _RecordedProgram(second, self._catches_exceptions)
                program.compile(self._options, later)
                self._add_program(later, second.recorder.traced_numbers.conditions, program)
                if not first.changes.keys() - second.changes.keys():
                    self._add_program(snapshot, first.recorder.traced_numbers.conditions, program)
                    return program, {}
                return program, {
                    place: value for place, value in first.values_after(snapshot, initial).items() if place not in second.changes
                }
            later_program = _RecordedProgram(second, self._catches_exceptions)
            later_program.store_input_layouts(later)
        finally:
            snapshot.restore()
        repeated = self._record(snapshot, args, kwargs)
        if not first.has_same_program(repeated, {}):
            if numbers := self._changing_numbers(snapshot) or self._numbers(snapshot):
                raise TracedNumberInspected(numbers)
            hint = "compute with tensors, and pass changing values to the step as arguments"
            difference, where = first.first_difference(repeated)
            detail = difference or "the ops of two runs differ"
            raise CaptureError(
                f"the step computes with a number that differs from run to run (random, time, a tensor's value): {detail}",
                where=where,
                hint=hint,
            )
        program, self._first_call = _RecordedProgram(repeated, self._catches_exceptions), repeated
        program.compile(self._options, snapshot)
        self._add_program(snapshot, repeated.recorder.traced_numbers.conditions, program)
        if later_program.reuse_executable(program):
            self._add_program(later, second.recorder.traced_numbers.conditions, later_program)
        return program, {}

    def _numbers(self, snapshot: Snapshot) -> dict[Place, Number]:
        return self._guards.numbers(snapshot.surroundings) | self._guards.numbers(snapshot.arguments)

    def _changing_numbers(self, snapshot: Snapshot) -> dict[Place, Number]:
        """Returns the numbers that are inputs of a recording because they have changed. Learning rates are inputs anyway, and left out."""
        rates = {(path, "lr") for path in param_groups(snapshot.optimizers)}
        return {place: number for place, number in self._numbers(snapshot).items() if place not in rates}

    def _check_reusable(self, snapshot: Snapshot, recording: Recording) -> None:
        """Checks that a later call can reuse the program of this recording.

        A step that compares numbers may change Python state at every call, because it may return to this state after some calls. For
        example, a step that accumulates gradients counts its calls up to a number.

        Raises:
            CaptureError: any other step changes Python state at every call, so that no program could be used twice.
            _GuardsWidened: the step has changed a number that has not changed before.
        """
        try:
            snapshot.put(recording.values_after(snapshot, {}))
            differing, is_number = self._guards.compare_with(snapshot)
        finally:
            snapshot.restore()
        if is_number:
            raise _GuardsWidened
        if differing and not recording.recorder.traced_numbers.conditions:
            hint = "change this value outside the step, or keep the number in a tensor"
            raise CaptureError(f"the step changes {differing} in Python at every call, and a program cannot do that", hint=hint)

    def _record(self, snapshot: Snapshot, args: Any, kwargs: Any) -> Recording:
        """Records the function on fake tensors. Afterwards all state that the function has changed is restored."""
        # The snapshot is not enough to restore the state: the recording may run new code, which may change state outside the snapshot.
        everything = self._guards.walk_everything(args, kwargs)
        refuse_iterators(everything)
        modules = self._modules = ParallelModules.among(everything.objects.values())
        modules.refuse()
        tracked = TrackedArrays(self._guards.arrays(snapshot.surroundings) | self._guards.arrays(snapshot.arguments), snapshot)
        recorder = Recorder(snapshot.tensors, next(_seeds), tracked.tensors, tracked.read)
        self._conditions = recorder.traced_numbers.conditions
        metadata = MetadataSnapshot(everything.tensors, everything.objects)
        numbers = {place: recorder.traced_numbers.at(place, value) for place, value in self._numbers(snapshot).items()}
        # Only this thread sees these groups, whose numbers are traced. Only in this thread, step counts stay in tensors (`compiling`).
        groups = _ParamGroups(snapshot, numbers)
        numbers = {place: number for place, number in numbers.items() if place[0] not in groups.paths}
        try:
            tracked.enter()
            snapshot.put(numbers)
            with compiling(), replaced_param_groups(groups.copies), modules.functional_collectives():
                result = recorder.run(self._observed, snapshot.args, snapshot.kwargs)
            if written := tracked.restore_values(include_unread=not self._guards.has_run):
                hint = "write to the array outside the step, or keep the numbers in a tensor"
                raise CaptureError(f"the step writes to {written[0]} in Python, and a program cannot do that", hint=hint)
            tracked.check(recorder.written_arrays())
            refuse_shared_memory(recorder, snapshot)
            changes = {place: value for place, value in snapshot.changes().items() if not tracked.is_tracked_view(place, value)}
            # The step has changed a traced number if its place has another object, even if the new number is equal to the old one.
            changes |= {place: snapshot.container(place[0]).get(place[1]) for place in numbers}
            changes = {place: value for place, value in changes.items() if place not in numbers or value is not numbers[place]}
            changes |= groups.changes()
            metadata.check()
            changes = {place: value for place, value in changes.items() if place[1] != _FUSED_CHECK_KEY}
            return Recording(recorder, result, changes, snapshot, metadata.requires_grad_changes())
        finally:
            recorder.traced_numbers.finish()
            tracked.restore_values(include_unread=not self._guards.has_run)
            tracked.leave()
            snapshot.restore()
            everything.restore()
            metadata.restore()

    def _observed(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function under observation.

        Raises:
            Refused: the function was stopped before an effect that a program would not repeat.
            CaptureError: the function has had such an effect, or has compared a class with torch.Tensor.
            _GuardsWidened: the function has run code that no earlier call has run.
        """
        with guards.collected_getters() as getters:
            result, observation = observe(self._function, args, kwargs, refuse=True)
        if not observation.is_pure:
            raise CaptureError(
                f"the step does something that a program cannot repeat: {next(iter(observation.effects), 'it changes settings of torch')}"
            )
        refuse_comparing_classes(observation.codes)
        self._catches_exceptions = catches_exceptions(observation.codes)
        if self._widen_guards(observation, getters):
            raise _GuardsWidened
        return result

    def _widen_guards(self, observation: Observation, getters: Set[Getter]) -> bool:
        """Adds executed code and getters to the guards. If any is new, returns True and drops all programs: their keys may lack state."""
        is_new = self._guards.widen(observation.codes, getters)
        if is_new:
            self._programs = LeastRecentlyUsed(self._options.executables)
            self._recordable = LeastRecentlyUsed(self._options.executables)
        return is_new


class ProgramFailed(Exception):
    """Raised if a program has failed that replaces code which catches exceptions. The call must run in eager mode."""


class _GuardsWidened(Exception):
    """Raised if a recording has run code that no earlier call has run, or has changed a number that was a constant so far."""


class _ParamGroups:
    """Copies of optimizers' parameter groups for a recording, with traced numbers in the places of numbers.

    Attributes:
        copies: each optimizer with the groups that it has during the recording.
        paths: the paths of the groups.
    """

    def __init__(self, snapshot: Snapshot, numbers: Mapping[Place, Any]) -> None:
        optimizers = snapshot.optimizers
        refuse_aliased_groups(optimizers, snapshot.aliased_ids)
        self.copies: list[tuple[torch.optim.Optimizer, list[dict[str, Any]]]] = []
        # For each group: its path, the group during the recording, and that group's content before the recording.
        self._groups: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
        self.paths = param_groups(optimizers).keys()
        self._counts: list[tuple[list[Any], int]] = []
        for path, optimizer in optimizers.items():
            copies = []
            for index, group in enumerate(optimizer.param_groups):
                group_path = f"{path}.param_groups[{index}]"
                copy = dict(group) | _recording_settings(group, optimizer.state)
                copy |= {key: number for (place, key), number in numbers.items() if place == group_path}
                self._groups.append((group_path, copy, dict(copy)))
                copies.append(copy)
            self.copies.append((optimizer, copies))
            self._counts.append((copies, len(copies)))

    def changes(self) -> dict[Place, Any]:
        """Returns the entries of groups that the step has changed, by place.

        Raises: CaptureError for a new group.
        """
        if any(len(copies) != count for copies, count in self._counts):
            raise CaptureError("the step adds a parameter group to an optimizer", hint="add the group outside the step")
        changes: dict[Place, Any] = {}
        for path, copy, before in self._groups:
            changes |= {(path, key): value for key, value in copy.items() if before.get(key, ABSENT) is not value}
            changes |= {(path, key): ABSENT for key in before if key not in copy}
        return changes


# True in this attribute means that an optimizer still has to check that its parameters support fused steps. Changes of the attribute are
# ignored, because the recording causes them, not the user's code.
_FUSED_CHECK_KEY = "_need_device_dtype_check_for_fused"


def _recording_settings(group: Mapping[str, Any], state: Mapping[Any, Any]) -> dict[str, bool]:
    """Returns the settings of a parameter group that differ during the recording. `state` is the optimizer's state.

    The recording prefers fused steps, which can run in torch's own memory (updates.py). Adam's step without fusion would have to be
    `capturable`. A capturable step divides by the learning rate, and gives NaN if the learning rate and second moments are 0, as at the
    start of a warmup. The fused step does not.
    """
    settings = {"capturable": True} if "capturable" in group else {}
    if "fused" in group and not group.get("differentiable") and all(parameter.is_floating_point() for parameter in group["params"]):
        if "capturable" in group:
            settings["fused"] = True
        elif "nesterov" in group:
            learning = [parameter for parameter in group["params"] if parameter.requires_grad or parameter.grad is not None]
            # Fused SGD needs momentum buffers of all parameters, or of no parameter.
            if len({"momentum_buffer" in state.get(parameter, ()) for parameter in learning}) == 1:
                settings |= {"fused": True, "foreach": False}
    return settings


class _RecordedProgram:
    """A recording as an executable: an XLA program, the updates that torch does after it, and the changes to Python state."""

    def __init__(self, recording: Recording, catches_exceptions: bool) -> None:
        self._catches_exceptions = catches_exceptions
        self._result, self._spec, self._changes, self._requires_grad = (
            recording.result, recording.spec, recording.changes, recording.requires_grad,
        )  # fmt: skip
        recorder = recording.recorder
        paths = {node: path for path, node in recorder.tensor_placeholders.items()}
        placeholders = recorder.graph.find_nodes(op="placeholder")
        self._inputs: list[str | TracedNumber] = [paths.get(node) or recorder.number_placeholders[node] for node in placeholders]
        outputs = [recorder.node(output) for output in recording.outputs]
        refuse_overlapping(recorder)
        self._graph = RecordedGraph(recorder.graph, placeholders, outputs, recorder.constants)
        # A program with collectives may fail because another process ends. Then the gradients that `run` has released are put back.
        self._has_collectives = any(map(is_collective, recorder.graph.nodes))
        self._new_gradients = [path for (path, key), template in self._changes.items() if key == "grad" and outputs_of(template)]
        templates = [*self._result, *self._changes.values()]
        self._numbers = [*recorder.number_placeholders.values(), *(number for item in templates for number in numbers_of(item))]
        self._limits = [recorder.traced_numbers.limits.get(number.dynaxla_formula, math.inf) for number in self._numbers]
        self._used_paths = {
            *(item for position in self._graph.used_positions if isinstance(item := self._inputs[position], str)),
            *(path for template in templates for path in object_paths_of(template)),
        }

    def compile(self, options: Options, snapshot: Snapshot) -> None:
        """Compiles the program for the values of a call."""
        self._graph.compile(options, self._values(snapshot))

    def store_input_layouts(self, snapshot: Snapshot) -> None:
        """Stores metadata and aliasing of the program's inputs, for `reuse_executable`."""
        self._graph.store_input_layouts(self._values(snapshot))

    def reuse_executable(self, other: _RecordedProgram) -> bool:
        """Uses the other program's executable if the XLA programs are equal. Returns True if the XLA programs are equal."""
        return self._graph.reuse_executable(other._graph)

    def check_numbers(self, snapshot: Snapshot) -> None:
        """Checks, before a call has any effect, that all its numbers can be computed.

        Raises: ArithmeticError, as the step's Python code does, or for a number beyond its limit (`TracedNumbers.limits`).
        """
        for number, limit in zip(self._numbers, self._limits, strict=True):
            value = evaluate(number.dynaxla_formula, snapshot.number_at)
            if limit < math.inf and not abs(value) <= limit:
                raise OverflowError(f"{value} lies outside the range of the dtypes that the step converts it to")

    def _values(self, snapshot: Snapshot) -> list[Any]:
        """Returns the tensors and floats for the graph's placeholders; None for placeholders that are not used."""
        values: list[Any] = [None] * len(self._inputs)
        for position in self._graph.used_positions:
            item = self._inputs[position]
            values[position] = (
                snapshot.input_at(item) if isinstance(item, str) else float(evaluate(item.dynaxla_formula, snapshot.number_at))
            )
        return values

    def dry_run(self, snapshot: Snapshot) -> DryRun | None:
        """Returns the XLA program that a call would run, without running the program; None if there is none."""
        return first_program(lambda: self._graph.run(self._values(snapshot)))

    def run(self, snapshot: Snapshot) -> Any:
        """Runs the program, applies the step's changes to Python state, and returns the step's result.

        Raises: ProgramFailed if the program fails, and the step's code could catch the exception. Otherwise the exception itself.
        """
        values = self._values(snapshot)
        before = snapshot.surroundings.gradients_at(self._new_gradients) if self._has_collectives else {}
        released = snapshot.surroundings.release_gradients(self._new_gradients, self._used_paths)
        try:
            outputs = self._graph.run(values)
        except BaseException as error:
            snapshot.put(before)
            if self._catches_exceptions and isinstance(error, Exception):
                raise ProgramFailed from error
            raise
        metrics.add("steps")
        # All values are built before any place changes, because a new number may depend on a place that changes, too.
        built: dict[int, Any] = {}
        changes, leaves = (
            [build(template, lambda output: outputs[output.index], snapshot, built) for template in templates]
            for templates in (self._changes.values(), self._result)
        )
        snapshot.put(dict(zip(self._changes, changes, strict=True)))
        for path, requires_grad in self._requires_grad.items():
            snapshot.object_at(path).requires_grad_(requires_grad)
        snapshot.surroundings.accept_gradients(released)
        return tree_unflatten(leaves, self._spec)
