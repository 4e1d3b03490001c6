"""The programs of a step: a program is replayed, without running the step's Python code, while nothing that the step can read has changed.

The function is recorded on fake tensors (recorder.py), once in the state that it finds and once in the state that it would leave behind. If
both recordings have the same program, as for most optimizers once their state exists, that one program serves all calls.
"""

from __future__ import annotations

import contextlib
import itertools
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_unflatten

from ..config import Options
from ..engine.dry_run import DryRun, first_program
from ..errors import CaptureError
from ..guards.invariants import MetadataSnapshot
from ..guards.numpy_arrays import TrackedArrays, ValuesRead, could_read_unseen, inputs_of
from ..guards.observation import observe
from ..guards.snapshot import ABSENT, ExecutedCode, Holder, Walk, global_state, walk
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
from .recordings import KnownObject, Recording, build, known_of, outputs_of
from .scalars import Place, TracedFloat, TracedNumberInspected
from .unrecordable import refuse_comparing_classes, refuse_overlapping, refuse_shared_memory, refuse_sources
from .value_reads import HANDLERS as looks_handlers
from .value_reads import Looks

# The most values that a step may reach. To record a step that reaches 150,000 floats takes 9 s, and each later call 2.7 ms (Intel Xeon with
# AVX-512, not idle otherwise, 2026-11-28).
_MOST_VALUES = 200_000
# How many times a step is recorded, because each recording ran code that the earlier ones did not run, or looked at an input's value.
_MOST_ATTEMPTS = 6
_seeds = itertools.count(1)
T = TypeVar("T")
_numbers = itertools.count()


@dataclass(frozen=True)
class _StepState:
    """The surroundings of a step.

    Attributes:
        around: the walk.
        inputs: the places in it that are inputs of the program.
        arrays: the paths of arrays that are inputs of the program.
        number: identifies the facts of the walk.
    """

    around: Walk
    inputs: frozenset[Place]
    arrays: frozenset[str]
    number: int


@dataclass(frozen=True)
class CallState:
    """The state that a call finds.

    Attributes:
        around: the walk of the surroundings.
        given: the walk of the arguments.
        key: the key of the program for this situation.
    """

    around: Walk
    given: Walk
    key: Any


class StepPrograms:
    """The programs of a function, one for each situation, that is, for each combination of surroundings, arguments and torch's settings."""

    def __init__(self, function: Callable[..., Any], options: Options) -> None:
        self._function = function
        self._options = options
        self._programs: LeastRecentlyUsed[_RecordedProgram] = LeastRecentlyUsed(options.executables)
        self._baked: set[Place] = set()
        self._known: _StepState | None = None
        self._numbers: LeastRecentlyUsed[int] = LeastRecentlyUsed(options.executables)
        # The code that has run, with the globals that it ran in, and the names that it uses.
        self._executed: dict[types.CodeType, list[dict[str, Any]]] = {}
        self._touched: ExecutedCode | None = None
        # The paths of arrays whose values Python has read; True if it may read other arrays unnoticed.
        self._read: set[str] = set()
        self._reads_unseen = False
        # Keys of situations in which a call has run in eager mode, and has done nothing that a program would not do.
        self._seen: LeastRecentlyUsed[bool] = LeastRecentlyUsed(options.executables)
        # Further questions whose answers the function depends on, such as the state that a JAX function in it reads.
        self._questions: set[Question] = set()
        # The recording of the last capture, if its program is only for a first call.
        self._first: Recording | None = None
        # The modules that the last recording has found.
        self._modules = ParallelModules()

    def situation(self, args: Any, kwargs: Any) -> CallState:
        """Returns the situation of a call. Raises: CaptureError for state that cannot be watched."""
        self._modules.prepare()
        self._modules.refuse()
        around = self._around()
        given = self._walk({"args": args, "kwargs": kwargs}, around)
        return CallState(around, given, self._key(around, given))

    def _walk(self, roots: Mapping[str, Any], base: Walk | None = None) -> Walk:
        """Returns a walk from these roots. Raises: CaptureError for objects that the step has read, but that cannot be compared."""
        found = walk(roots, base, self._touched, _MOST_VALUES)
        if self._touched is not None and found.incomparable:
            path, kind = next(iter(found.incomparable.items()))
            hint = "pass the values that the step needs from it as arguments"
            raise CaptureError(
                f"the step reads {path}, a {kind}, and dynaxla cannot check whether it has changed since the last call", hint=hint
            )
        if self._touched is not None and found.values:
            inputs = self._arrays(found)
            if large := [path for path, (_, values) in found.values.items() if values.data is None and path not in inputs]:
                hint = "pass the part that the step needs as an argument"
                raise CaptureError(f"the step reads {large[0]}, an array that is too large to compare at every call", hint=hint)
        return found

    @property
    def has_seen_anything(self) -> bool:
        """True if the function has run, so that the state that it can read is known."""
        return self._touched is not None

    def has_seen(self, found: CallState) -> bool:
        """True if a call in this situation has run in eager mode, and has done nothing that a program would not do."""
        return self._seen.get(found.key) is not None

    def observe(self, found: CallState | None, args: Any, kwargs: Any) -> tuple[Any, str, bool]:
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
        is_new = self._widen(observation.codes, questions)
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

    def run(self, found: CallState) -> tuple[bool, Any]:
        """Runs the program for the situation. Returns: True and its result; False and None if there is no program."""
        program = self._programs.get(found.key)
        return (False, None) if program is None else (True, program.run(found.around, found.given))

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
                self._known = None  # learning rates may have changed since
                around = self._around()
                given = self._walk({"args": args, "kwargs": kwargs}, around)
                self._check_reached(around, given)
                try:
                    return self._settled(around, given, args, kwargs)
                except TracedNumberInspected:
                    self._bake(around)
                except ValuesRead as error:
                    self._read |= error.paths
                except _NewCode:
                    continue
        raise CaptureError("the step runs different Python code in each recording")

    def _check_reached(self, around: Walk, given: Walk) -> None:
        """Checks that the walks have found the functions of all code that has run; otherwise the function cannot be watched.

        Raises: CaptureError; the executed code is forgotten then, since another function may be in that place by now.
        """
        if self._touched is not None:
            unreached = set(around.unreached(self._touched)) & set(given.unreached(self._touched))
            if unreached:
                code = unreached.pop()
                self._executed.clear()
                self._touched = None
                raise CaptureError(
                    f"the step runs {code.co_qualname}, a function that dynaxla cannot find from the step",
                    where=f"{code.co_filename}:{code.co_firstlineno}",
                )

    def _parallel_modules(self, args: Any, kwargs: Any) -> ParallelModules:
        """Returns the modules of torch.distributed that the function can reach."""
        if not parallel_modules.may_be_there():
            return ParallelModules()
        return ParallelModules.among(walk({"step": self._function, "args": args, "kwargs": kwargs}, None, self._touched).objects.values())

    def run_first(self, program: _RecordedProgram, initial: Mapping[Place, Any], args: Any, kwargs: Any) -> Any:
        """Runs a program from `capture`, after putting its initial state in place."""
        around = self._around()
        given = self._walk({"args": args, "kwargs": kwargs}, around)
        if not initial:
            return program.run(around, given)
        try:
            _put(around, given, initial)
            later = self._around()
            return program.run(later, self._walk({"args": args, "kwargs": kwargs}, later))
        except BaseException:
            around.restore()
            given.restore()
            raise

    def dry_run(self, args: Any, kwargs: Any, look: Callable[[Walk], T]) -> tuple[DryRun | None, T]:
        """Prepares the program that calls will run after a first call, without running it. All state is as before afterwards.

        Returns: the program, held back, and the result of `look` for the surroundings after a first call.
        Raises: the same exceptions as `capture`.
        """
        program, initial = self.capture(args, kwargs)
        around = self._around()
        given = self._walk({"args": args, "kwargs": kwargs}, around)
        try:
            if self._first is None:
                _put(around, given, initial)
            else:  # the first call has a program of its own, so look at the state after it
                _put(around, given, self._first.left(given, initial))
                return self.dry_run(args, kwargs, look)
            later = self._around()
            return program.dry_run(later, self._walk({"args": args, "kwargs": kwargs}, later)), look(later)
        finally:
            around.restore()
            given.restore()

    def _around(self) -> Walk:
        """Returns the walk of the current surroundings; the last one, if nothing has changed."""
        if self._known is None or not self._known.around.is_unchanged(self._known.inputs, self._known.arrays):
            found = self._walk({"step": self._function})
            inputs, arrays = self._inputs(found), self._arrays(found)
            self._known = _StepState(found, frozenset(inputs), arrays, self._number_of(found, inputs, arrays))
        return self._known.around

    def _number_of(self, around: Walk, inputs: Collection[Place], arrays: Collection[str]) -> int:
        """Returns a number that is equal for surroundings with equal facts; it is faster to compare."""
        facts = _hashable(_frozen(around.facts(inputs, arrays)))
        number = self._numbers.get(facts)
        if number is None:
            number = next(_numbers)
            self._numbers.put(facts, number)
        return number

    def _inputs(self, around: Walk) -> dict[Place, float]:
        """Returns the learning rates that are inputs of the program, by place."""
        return {
            place: group["lr"]
            for path, optimizer in around.optimizers.items()
            for index, group in enumerate(optimizer.param_groups)
            if isinstance(group.get("lr"), float)
            and id(group) not in around.repeated
            and (place := (f"{path}.param_groups[{index}]", "lr")) not in self._baked
        }

    def _arrays(self, found: Walk) -> frozenset[str]:
        """Returns the paths of arrays that are inputs of the program."""
        return frozenset() if self._reads_unseen or not found.values else inputs_of(found.arrays, self._read)

    def _key(self, around: Walk, given: Walk) -> Any:
        known = self._known
        if known is not None and known.around is around:
            number = known.number
        else:
            number = self._number_of(around, self._inputs(around), self._arrays(around))
        answers = tuple(map(guards.answer, sorted(self._questions)))
        return number, _hashable(_frozen(given.facts(arrays=self._arrays(given)))), global_state(), answers

    # The following functions run once per situation.

    def _bake(self, around: Walk) -> None:
        """Turns learning rates into constants, because Python looks at them, or computes with them in ways that cannot be traced."""
        self._baked.update(self._inputs(around))
        self._known = None

    def _settled(self, around: Walk, given: Walk, args: Any, kwargs: Any) -> tuple[_RecordedProgram, dict[Place, Any]]:
        """Returns the program for this state, and the state that must be put in place before it runs."""
        own, self._first = self._key(around, given), None
        first = self._record(around, given, args, kwargs)
        initial = first.initial_values(around, given)
        try:
            _put(around, given, first.left(given, initial))  # new tensors have the right shapes, but no values
            later = self._walk({"step": self._function})
            later_given = self._walk({"args": args, "kwargs": kwargs}, later)
            second = self._record(later, later_given, args, kwargs)
            self._check_settled(later, later_given, second)
            if first.is_like(second, initial):
                program = _RecordedProgram(second, later, later_given)
                program.compile(self._options, later, later_given)
                self._programs.put(self._key(later, later_given), program)
                if not first.changes.keys() - second.changes.keys():
                    self._programs.put(own, program)
                    return program, {}
                return program, {place: value for place, value in first.left(given, initial).items() if place not in second.changes}
            following, following_key = _RecordedProgram(second, later, later_given), self._key(later, later_given)
            following.describe(later, later_given)
        finally:
            around.restore()
            given.restore()
        again = self._record(around, given, args, kwargs)
        if not first.is_like(again, {}):
            if self._inputs(around):
                raise TracedNumberInspected
            hint = "compute with tensors, and pass changing values to the step as arguments"
            raise CaptureError(
                "the step computes in Python with a number that differs from run to run (random, time, a tensor's value)", hint=hint
            )
        program, self._first = _RecordedProgram(again, around, given), again
        program.compile(self._options, around, given)
        self._programs.put(own, program)
        if following.share(program):
            self._programs.put(following_key, following)
        return program, {}

    def _check_settled(self, around: Walk, given: Walk, recording: Recording) -> None:
        """Raises: CaptureError if the step changes Python state at every call, so that no program could be used twice."""
        try:
            _put(around, given, recording.left(given, {}))
            after = self._walk({"step": self._function})
            differing = _difference(*(found.facts(self._inputs(found), self._arrays(found)) for found in (around, after)))
        finally:
            around.restore()
            given.restore()
        if differing:
            hint = "change it outside the step, or keep the number in a tensor"
            raise CaptureError(f"the step changes {differing} in Python at every call, and a program cannot do that", hint=hint)

    def _record(self, around: Walk, given: Walk, args: Any, kwargs: Any) -> Recording:
        """Records the function on fake tensors; all state that it changes is restored."""
        tensors = around.tensors | given.tensors
        # The recording may run code that earlier ones did not run, and change state that the other walks do not include.
        everything = walk({"step": self._function, "args": args, "kwargs": kwargs}, None, None, _MOST_VALUES)
        refuse_sources(everything)
        modules = self._modules = ParallelModules.among(everything.objects.values())
        modules.refuse()
        stand_ins = TrackedArrays(self._arrays(around) | self._arrays(given), around, given)
        recorder = Recorder(tensors, next(_seeds), stand_ins.tensors, stand_ins.read)
        untouched = MetadataSnapshot(everything.tensors, everything.objects)
        # For this thread only: learning rates are traced, step counts stay in tensors, and ops are ATen's ordinary ones.
        groups = _ParamGroups(around, {place: recorder.table.at(place) for place in self._inputs(around)})
        try:
            with compiling(), other_groups(groups.shadows), modules.in_a_step():
                result = recorder.run(self._observed, *stand_ins.enter(args, kwargs))
            if written := stand_ins.restore_values(all_of_them=self._touched is None):
                hint = "write it outside the step, or keep the numbers in a tensor"
                raise CaptureError(f"the step writes to {written[0]} in Python, and a program cannot do that", hint=hint)
            stand_ins.check(recorder.written_arrays())
            refuse_shared_memory(recorder, around, given)
            walks = {path: holder for walked in (around, given) for path, holder in walked.holders.items()}
            changes = {(path, key): value for path, holder in walks.items() for key, value in holder.changes().items()}
            changes = {place: value for place, value in changes.items() if not stand_ins.is_one(place, value)} | groups.changes()
            untouched.check()
            return Recording(recorder, result, {place: value for place, value in changes.items() if place[1] != _CHECKED}, given)
        finally:
            stand_ins.restore_values(all_of_them=self._touched is None)
            stand_ins.leave()
            around.restore()
            given.restore()
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
        if self._widen(observation.codes, questions):
            raise _NewCode
        return result

    def _widen(self, codes: Mapping[types.CodeType, Sequence[dict[str, Any]]], questions: Set[Question]) -> bool:
        """Notes executed code and questions. Returns: True if any is new; programs are dropped then: their walks may have missed state."""
        is_new = self._touched is None or not questions <= self._questions
        self._questions |= questions
        for code, places in codes.items():
            known = self._executed.setdefault(code, [])
            added = [place for place in places if all(place is not other for other in known)]
            known += added
            is_new = is_new or bool(added)
        if is_new:
            self._touched = ExecutedCode.of(self._executed)
            self._reads_unseen = could_read_unseen(self._executed)
            self._programs = LeastRecentlyUsed(self._options.executables)
            self._seen = LeastRecentlyUsed(self._options.executables)
            self._known = None
        return is_new


class _NewCode(Exception):
    """Raised when a recording has run code that no earlier call had run."""


class _ParamGroups:
    """Optimizers' parameter groups as a recording sees them.

    Attributes:
        shadows: each optimizer with its groups during the recording.
    """

    def __init__(self, around: Walk, numbers: Mapping[Place, TracedFloat]) -> None:
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


def _put(around: Walk, given: Walk, values: Mapping[Place, Any]) -> None:
    for (path, key), value in values.items():
        _holder(around, given, path).put(given.object_at(key.path) if isinstance(key, KnownObject) else key, value)


def _holder(around: Walk, given: Walk, path: str) -> Holder:
    return around.holders.get(path) or given.holders[path]


def _hashable(facts: Any) -> Any:
    """Returns the facts. Raises: CaptureError if they are not hashable, such as a fake tensor's symbolic sizes."""
    try:
        hash(facts)
    except TypeError as error:
        raise CaptureError(f"the step can reach a value that dynaxla cannot compare with its value at an earlier call: {error}") from error
    return facts


def _frozen(facts: Mapping[str, Any]) -> Any:
    return tuple((path, tuple(value) if isinstance(value, list) else value) for path, value in facts.items())


def _difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Returns the path of the first fact that differs; "" if none does."""
    for path in [*before, *after]:
        old, new = before.get(path), after.get(path)
        if old != new:
            if isinstance(old, list) and isinstance(new, list):
                known = dict(old)
                keys = [key for key, value in new if known.get(key, ABSENT) != value]
                return f"{path}[{keys[0]!r}]" if keys else path
            return path
    return ""


class _RecordedProgram:
    """A recording as an executable: an XLA program, the updates that torch does after it, and the changes to Python state."""

    def __init__(self, recording: Recording, around: Walk, given: Walk) -> None:
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

    def compile(self, options: Options, around: Walk, given: Walk) -> None:
        """Compiles the program for the values of a call."""
        self._graph.compile(options, self._values(around, given))

    def describe(self, around: Walk, given: Walk) -> None:
        """Notes metadata and aliasing of the program's inputs, for `share`."""
        self._graph.describe(self._values(around, given))

    def share(self, other: _RecordedProgram) -> bool:
        """Uses the other program's executable if the XLA programs are equal. Returns: True if they are."""
        return self._graph.share(other._graph)

    def _values(self, around: Walk, given: Walk) -> list[Any]:
        values: list[Any] = [None] * len(self._inputs)
        for position in self._graph.read:
            item = self._inputs[position]
            values[position] = item.compute(around.number_at) if isinstance(item, TracedFloat) else given.input_at(item)
        return values

    def dry_run(self, around: Walk, given: Walk) -> DryRun | None:
        """Returns the XLA program that a call would run, without running it; None if there is none."""
        return first_program(lambda: self._graph.run(self._values(around, given)))

    def run(self, around: Walk, given: Walk) -> Any:
        """Runs the program, applies the step's changes to Python state, and returns the step's result."""
        values = self._values(around, given)
        before = around.gradients_at(self._new_gradients) if self._may_be_left else {}
        released = around.release_gradients(self._new_gradients, self._used)
        try:
            outputs = self._graph.run(values)
        except BaseException:
            _put(around, given, before)
            raise
        metrics.add("steps")
        # All values are built before anything is changed: a new number may depend on a place that changes, too.
        changes = {place: build(template, lambda output: outputs[output.index], given) for place, template in self._changes.items()}
        leaves = [build(template, lambda output: outputs[output.index], given) for template in self._result]
        _put(around, given, changes)
        around.accept_gradients(released)
        return tree_unflatten(leaves, self._spec)
