"""The programs of a step: a program is replayed, without running the step's Python code, while nothing that the step can read has changed.

The function is recorded on fake tensors (recorder.py), once in the state that it finds and once in the state that it would leave behind. If
both recordings have the same program, as for most optimizers once their state exists, that one program serves all calls.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_unflatten

from ..config import Options
from ..engine.dry_run import DryRun, first_program
from ..errors import CaptureError
from ..guards.invariants import MetadataSnapshot
from ..guards.object_graph import ObjectGraph
from ..guards.observation import Observation, observe
from ..guards.slots import ABSENT, Place
from ..guards.snapshot import FunctionGuards, Snapshot
from ..lowering.asynchronous import is_collective
from ..observe import metrics
from ..runtime import capture_lock, guards, private
from ..runtime.cache import LeastRecentlyUsed
from ..runtime.guards import Question
from . import parallel_modules
from .eager_collectives import HANDLERS as collectives_handlers
from .eager_collectives import as_in_programs
from .parallel_modules import ParallelModules
from .recorded_graph import RecordedGraph
from .recorder import Recorder, handlers
from .recording_settings import as_written, compiling, other_groups
from .recordings import Recording, build, known_of, outputs_of
from .scalars import TracedFloat, TracedNumberInspected
from .tracked_arrays import TrackedArrays, ValuesRead
from .unrecordable import refuse_comparing_classes, refuse_overlapping, refuse_shared_memory, refuse_sources
from .value_reads import HANDLERS as looks_handlers
from .value_reads import Looks

# How many times a step is recorded, because each recording ran code that the earlier ones did not run, or looked at an input's value.
_MOST_ATTEMPTS = 6
_seeds = itertools.count(1)
T = TypeVar("T")


class StepPrograms:
    """The programs of a function, one for each situation, that is, for each combination of surroundings, arguments and torch's settings."""

    def __init__(self, function: Callable[..., Any], options: Options) -> None:
        self._function = function
        self._options = options
        self._guards = FunctionGuards(function, options.executables)
        self._programs: LeastRecentlyUsed[_RecordedProgram] = LeastRecentlyUsed(options.executables)
        # Keys of situations in which a call has run in eager mode, and has done nothing that a program would not do.
        self._seen: LeastRecentlyUsed[bool] = LeastRecentlyUsed(options.executables)
        # The recording of the last capture, if its program is only for a first call.
        self._first: Recording | None = None
        # The modules that the last recording has found.
        self._modules = ParallelModules()

    def situation(self, args: Any, kwargs: Any) -> Snapshot:
        """Returns the state that a call finds. Raises: CaptureError for state that cannot be watched."""
        self._modules.prepare()
        self._modules.refuse()
        return self._guards.take(args, kwargs)

    @property
    def has_seen_anything(self) -> bool:
        """True if the function has run, so that the state that it can read is known."""
        return self._guards.have_seen_a_call

    def has_seen(self, found: Snapshot) -> bool:
        """True if a call in this situation has run in eager mode, and has done nothing that a program would not do."""
        return self._seen.get(found.key) is not None

    def observe(self, found: Snapshot | None, args: Any, kwargs: Any) -> tuple[Any, str, bool]:
        """Runs the function in eager mode, and watches it.

        Args:
            found: the situation, if it is known.

        Returns:
            The function's result; a message with its first effect that a program would not repeat, or ""; True if it ran code, or asked a
            question, that no earlier call has: then all situations have to be seen once more.
        """
        ignored = (*looks_handlers, *collectives_handlers, *parallel_modules.HANDLERS, *private.codes_of_lookups())
        with as_written(), self._in_eager_mode(args, kwargs), guards.questions() as questions, Looks() as looks:
            result, observation = observe(self._function, args, kwargs, ignore=(*ignored, *guards.answering.values()))
        is_new = self._widen(observation, questions)
        effect = next(iter(observation.effects), None)
        settings = "it changes settings of torch" if observation.changes_settings else ""
        reason = looks.first or (
            f"the step does something that a program cannot repeat: {effect or settings}" if effect or settings else ""
        )
        if found is not None and not reason and not is_new:
            self._seen.put(found.key, True)
        return result, reason, is_new

    def run_eagerly(self, args: Any, kwargs: Any) -> Any:
        """Runs the function in eager mode, without watching it."""
        with self._in_eager_mode(args, kwargs):
            return self._function(*args, **kwargs)

    @contextlib.contextmanager
    def _in_eager_mode(self, args: Any, kwargs: Any) -> Iterator[None]:
        """Inside the context, the function calls the same collectives in eager mode as the programs of other processes, if any."""
        if parallel_modules.may_be_there():
            with as_in_programs(self._parallel_modules(args, kwargs)):
                yield
        else:
            yield

    def run(self, found: Snapshot) -> tuple[bool, Any]:
        """Runs the program for the situation. Returns: True and its result; False and None if there is no program."""
        program = self._programs.get(found.key)
        return (False, None) if program is None else (True, program.run(found))

    def capture(self, args: Any, kwargs: Any) -> tuple[_RecordedProgram, dict[Place, Any]]:
        """Records and compiles the step for the current situation.

        Returns:
            The program, and the state that must be put in place before it runs (see `run_first`).

        Raises:
            CaptureError: the step cannot be recorded. After this or any exception of the function, all state is as before.
        """
        with capture_lock.one_at_a_time(), metrics.timed("capture"):
            self._parallel_modules(args, kwargs).prepare()
            for _ in range(_MOST_ATTEMPTS):
                self._guards.forget_surroundings()  # learning rates may have changed since
                found = self._guards.take(args, kwargs)
                self._guards.check_reached(found)
                try:
                    return self._settled(found, args, kwargs)
                except TracedNumberInspected:
                    self._guards.compare_learning_rates(found)
                except ValuesRead as error:
                    self._guards.compare_values(error.paths)
                except _NewCode:
                    continue
        raise CaptureError("the step runs different Python code in each recording")

    def _parallel_modules(self, args: Any, kwargs: Any) -> ParallelModules:
        """Returns the modules of torch.distributed that the function can reach."""
        if not parallel_modules.may_be_there():
            return ParallelModules()
        return ParallelModules.among(self._guards.take_reached(args, kwargs).objects.values())

    def run_first(self, program: _RecordedProgram, initial: Mapping[Place, Any], args: Any, kwargs: Any) -> Any:
        """Runs a program from `capture`, after putting its initial state in place."""
        found = self._guards.take(args, kwargs)
        if not initial:
            return program.run(found)
        try:
            found.put(initial)
            return program.run(self._guards.take(args, kwargs))
        except BaseException:
            found.restore()
            raise

    def dry_run(self, args: Any, kwargs: Any, look: Callable[[ObjectGraph], T]) -> tuple[DryRun | None, T]:
        """Prepares the program that calls will run after a first call, without running it. All state is as before afterwards.

        Returns: the program, held back, and the result of `look` for the surroundings after a first call.
        Raises: the same exceptions as `capture`.
        """
        program, initial = self.capture(args, kwargs)
        found = self._guards.take(args, kwargs)
        try:
            if self._first is None:
                found.put(initial)
            else:  # the first call has a program of its own, so look at the state after it
                found.put(self._first.left(found, initial))
                return self.dry_run(args, kwargs, look)
            later = self._guards.take(args, kwargs)
            return program.dry_run(later), look(later.around)
        finally:
            found.restore()

    # The following functions run once per situation.

    def _settled(self, found: Snapshot, args: Any, kwargs: Any) -> tuple[_RecordedProgram, dict[Place, Any]]:
        """Returns the program for this state, and the state that must be put in place before it runs."""
        self._first = None
        first = self._record(found, args, kwargs)
        initial = first.initial_values(found)
        try:
            found.put(first.left(found, initial))  # new tensors have the right shapes, but no values
            later = self._guards.take_anew(args, kwargs)
            second = self._record(later, args, kwargs)
            self._check_settled(later, second)
            if first.is_like(second, initial):
                program = _RecordedProgram(second)
                program.compile(self._options, later)
                self._programs.put(later.key, program)
                if not first.changes.keys() - second.changes.keys():
                    self._programs.put(found.key, program)
                    return program, {}
                return program, {place: value for place, value in first.left(found, initial).items() if place not in second.changes}
            following = _RecordedProgram(second)
            following.describe(later)
        finally:
            found.restore()
        again = self._record(found, args, kwargs)
        if not first.is_like(again, {}):
            if self._guards.learning_rates(found.around):
                raise TracedNumberInspected
            hint = "compute with tensors, and pass changing values to the step as arguments"
            raise CaptureError(
                "the step computes in Python with a number that differs from run to run (random, time, a tensor's value)", hint=hint
            )
        program, self._first = _RecordedProgram(again), again
        program.compile(self._options, found)
        self._programs.put(found.key, program)
        if following.share(program):
            self._programs.put(later.key, following)
        return program, {}

    def _check_settled(self, found: Snapshot, recording: Recording) -> None:
        """Raises: CaptureError if the step changes Python state at every call, so that no program could be used twice."""
        try:
            found.put(recording.left(found, {}))
            differing = self._guards.why_not(found)
        finally:
            found.restore()
        if differing:
            hint = "change it outside the step, or keep the number in a tensor"
            raise CaptureError(f"the step changes {differing} in Python at every call, and a program cannot do that", hint=hint)

    def _record(self, found: Snapshot, args: Any, kwargs: Any) -> Recording:
        """Records the function on fake tensors; all state that it changes is restored."""
        # The recording may run code that earlier ones did not run, and change state that the snapshot does not include.
        everything = self._guards.take_everything(args, kwargs)
        refuse_sources(everything)
        modules = self._modules = ParallelModules.among(everything.objects.values())
        modules.refuse()
        stand_ins = TrackedArrays(self._guards.arrays(found.around) | self._guards.arrays(found.given), found)
        recorder = Recorder(found.tensors, next(_seeds), stand_ins.tensors, stand_ins.read)
        untouched = MetadataSnapshot(everything.tensors, everything.objects)
        # For this thread only: learning rates are traced, step counts stay in tensors, and ops are ATen's ordinary ones.
        groups = _ParamGroups(found.around, {place: recorder.table.at(place) for place in self._guards.learning_rates(found.around)})
        try:
            with compiling(), other_groups(groups.shadows), modules.in_a_step():
                result = recorder.run(self._observed, *stand_ins.enter(args, kwargs))
            if written := stand_ins.restore_values(all_of_them=not self._guards.have_seen_a_call):
                hint = "write it outside the step, or keep the numbers in a tensor"
                raise CaptureError(f"the step writes to {written[0]} in Python, and a program cannot do that", hint=hint)
            stand_ins.check(recorder.written_arrays())
            refuse_shared_memory(recorder, found)
            changes = {place: value for place, value in found.changes().items() if not stand_ins.is_one(place, value)} | groups.changes()
            untouched.check()
            return Recording(recorder, result, {place: value for place, value in changes.items() if place[1] != _CHECKED}, found)
        finally:
            stand_ins.restore_values(all_of_them=not self._guards.have_seen_a_call)
            stand_ins.leave()
            found.restore()
            everything.restore()
            untouched.restore()

    def _observed(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function under observation.

        Raises:
            Refused: the function was stopped before an effect that a program would not repeat.
            _NewCode: it has run code that no earlier call has run.
        """
        with guards.questions() as questions:
            result, observation = observe(self._function, args, kwargs, refuse=True, ignore=(*handlers(), *guards.answering.values()))
        if not observation.is_pure:
            raise CaptureError(
                f"the step does something that a program cannot repeat: {next(iter(observation.effects), 'it changes settings of torch')}"
            )
        refuse_comparing_classes(observation.codes)
        if self._widen(observation, questions):
            raise _NewCode
        return result

    def _widen(self, observation: Observation, questions: Set[Question]) -> bool:
        """Notes executed code and questions. Returns: True if any is new; programs are dropped then: their guards may have missed state."""
        is_new = self._guards.widen(observation.codes, questions)
        if is_new:
            self._programs = LeastRecentlyUsed(self._options.executables)
            self._seen = LeastRecentlyUsed(self._options.executables)
        return is_new


class _NewCode(Exception):
    """Raised when a recording has run code that no earlier call had run."""


class _ParamGroups:
    """Optimizers' parameter groups as a recording sees them.

    Attributes:
        shadows: each optimizer with its groups during the recording.
    """

    def __init__(self, around: ObjectGraph, numbers: Mapping[Place, TracedFloat]) -> None:
        self.shadows: list[tuple[torch.optim.Optimizer, list[dict[str, Any]]]] = []
        self._given: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
        self._counts: list[tuple[list[Any], int]] = []
        for path, optimizer in around.optimizers.items():
            made = []
            for index, group in enumerate(optimizer.param_groups):
                place = f"{path}.param_groups[{index}]"
                shadow = dict(group) | _switches(group, optimizer.state)
                if (place, "lr") in numbers:
                    shadow["lr"] = numbers[place, "lr"]
                self._given.append((place, shadow, dict(shadow)))
                made.append(shadow)
            self.shadows.append((optimizer, made))
            self._counts.append((made, len(made)))

    def changes(self) -> dict[Place, Any]:
        """Returns the entries of groups that the step has changed, by place.

        Raises: CaptureError for a new group.
        """
        if any(len(made) != count for made, count in self._counts):
            raise CaptureError("the step adds a parameter group to an optimizer", hint="add it outside the step")
        found: dict[Place, Any] = {}
        for place, shadow, before in self._given:
            found |= {(place, key): value for key, value in shadow.items() if before.get(key, ABSENT) is not value}
            found |= {(place, key): ABSENT for key in before if key not in shadow}
        return found


# An optimizer's flag that its parameters support fused steps. The recording does not keep it: the user did not request fused steps.
_CHECKED = "_need_device_dtype_check_for_fused"


def _switches(group: Mapping[str, Any], state: Mapping[Any, Any]) -> dict[str, bool]:
    """Returns the settings of a parameter group during the recording. `state` is the optimizer's.

    Adam's capturable step divides by the learning rate: with a rate of 0, as at the start of a warmup, and second moments of 0 it gives
    NaN. Its fused step does not. Fused steps can run in torch's own memory (see updates.py).
    """
    found = {"capturable": True} if "capturable" in group else {}
    if "fused" in group and not group.get("differentiable") and all(parameter.is_floating_point() for parameter in group["params"]):
        if "capturable" in group:
            found["fused"] = True
        elif "nesterov" in group:
            learning = [parameter for parameter in group["params"] if parameter.requires_grad or parameter.grad is not None]
            if len({"momentum_buffer" in state.get(parameter, ()) for parameter in learning}) == 1:  # SGD's needs all of them, or none
                found |= {"fused": True, "foreach": False}
    return found


class _RecordedProgram:
    """A recording as an executable: an XLA program, the updates that torch does after it, and the changes to Python state."""

    def __init__(self, recording: Recording) -> None:
        self._result, self._spec, self._changes = recording.result, recording.spec, recording.changes
        recorder = recording.recorder
        paths = {node: path for path, node in recorder.leaves.items()}
        placeholders = recorder.graph.find_nodes(op="placeholder")
        self._inputs: list[str | TracedFloat] = [paths.get(node) or recorder.numbers[node] for node in placeholders]
        outputs = [recorder.node(output) for output in recording.outputs]
        refuse_overlapping(recorder)
        self._graph = RecordedGraph(recorder.graph, placeholders, outputs, recorder.constants)
        # True if the program has collectives, which fail when another process ends.
        self._may_be_left = any(map(is_collective, recorder.graph.nodes))
        self._new_gradients = [path for (path, key), template in self._changes.items() if key == "grad" and outputs_of(template)]
        templates = [*self._result, *self._changes.values()]
        self._used = {
            *(item for position in self._graph.read if isinstance(item := self._inputs[position], str)),
            *(path for template in templates for path in known_of(template)),
        }

    def compile(self, options: Options, found: Snapshot) -> None:
        """Compiles the program for the values of a call."""
        self._graph.compile(options, self._values(found))

    def describe(self, found: Snapshot) -> None:
        """Notes metadata and aliasing of the program's inputs, for `share`."""
        self._graph.describe(self._values(found))

    def share(self, other: _RecordedProgram) -> bool:
        """Uses the other program's executable if the XLA programs are equal. Returns: True if they are."""
        return self._graph.share(other._graph)

    def _values(self, found: Snapshot) -> list[Any]:
        values: list[Any] = [None] * len(self._inputs)
        for position in self._graph.read:
            item = self._inputs[position]
            values[position] = item.compute(found.number_at) if isinstance(item, TracedFloat) else found.input_at(item)
        return values

    def dry_run(self, found: Snapshot) -> DryRun | None:
        """Returns the XLA program that a call would run, without running it; None if there is none."""
        return first_program(lambda: self._graph.run(self._values(found)))

    def run(self, found: Snapshot) -> Any:
        """Runs the program, applies the step's changes to Python state, and returns the step's result."""
        values = self._values(found)
        before = found.around.gradients_at(self._new_gradients) if self._may_be_left else {}
        released = found.around.release_gradients(self._new_gradients, self._used)
        try:
            outputs = self._graph.run(values)
        except BaseException:
            found.put(before)
            raise
        metrics.add("steps")
        # All values are built before anything is changed: a new number may depend on a place that changes, too.
        changes = {place: build(template, lambda output: outputs[output.index], found) for place, template in self._changes.items()}
        leaves = [build(template, lambda output: outputs[output.index], found) for template in self._result]
        found.put(changes)
        found.around.accept_gradients(released)
        return tree_unflatten(leaves, self._spec)
