"""Snapshots of all state that a call of a function can read, and the guards of a function, which take them.

Two snapshots with equal keys are interchangeable for a recording: whatever was recorded from one is right for the other.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..errors import CaptureError
from ..runtime import guards
from ..runtime.cache import LeastRecentlyUsed
from ..runtime.guards import Question
from .code_names import ExecutedCode
from .numpy_arrays import could_read_unseen, inputs_of
from .object_graph import ObjectGraph
from .object_walker import walk
from .slots import ABSENT, Holder, Place
from .torch_state import global_state

# The most values that a function may reach. To record a step that reaches 150,000 floats takes 9 s, and each later call 2.7 ms (Intel Xeon
# with AVX-512, not idle otherwise, 2026-11-28).
_MOST_VALUES = 200_000
_numbers = itertools.count()


@dataclass(frozen=True)
class KnownObject:
    """An object that each call finds by its path."""

    path: str


@dataclass(frozen=True)
class Snapshot:
    """The state that a call finds. A path leads to an object of the surroundings or of the arguments.

    Attributes:
        around: the function's surroundings, that is, all state that it can read besides its arguments.
        given: the arguments; the base of this graph is `around`.
        key: equal for two snapshots if nothing that a recording depends on differs. Hashable.
    """

    around: ObjectGraph
    given: ObjectGraph
    key: Any = field(repr=False)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Tensors by path."""
        return self.around.tensors | self.given.tensors

    @property
    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """NumPy arrays by path."""
        return self.around.arrays | self.given.arrays

    @property
    def holders(self) -> dict[str, Holder]:
        """Mutable containers by path."""
        return self.around.holders | self.given.holders

    @property
    def repeated(self) -> set[int]:
        """The ids of objects that are in several places."""
        return self.around.repeated | self.given.repeated

    def path_of(self, value: Any) -> str | None:
        """Returns the path of an object; None if the snapshot has no such object."""
        return self.given.path_of(value)

    def object_at(self, path: str) -> Any:
        """Returns the object at a path. Raises: KeyError for an unknown path."""
        return self.given.object_at(path)

    def input_at(self, path: str) -> torch.Tensor:
        """Returns the tensor at a path, or a tensor that shares the memory of the array there."""
        return self.given.input_at(path)

    def number_at(self, place: Place) -> float:
        """Returns the number that is in a place now."""
        return self.given.number_at(place)

    def put(self, values: Mapping[Place, Any]) -> None:
        """Puts values into places, whose keys may be `KnownObject`s; `ABSENT` removes an entry."""
        for (path, key), value in values.items():
            self.holder(path).put(self.object_at(key.path) if isinstance(key, KnownObject) else key, value)

    def holder(self, path: str) -> Holder:
        """Returns the container at a path. Raises: KeyError for an unknown path."""
        return self.around.holders.get(path) or self.given.holders[path]

    def changes(self) -> dict[Place, Any]:
        """Returns the present values in the places that have changed since the snapshot; `ABSENT` for removed entries."""
        return {(path, key): value for path, holder in self.holders.items() for key, value in holder.changes().items()}

    def restore(self) -> None:
        """Gives all containers the entries that they had at the time of the snapshot."""
        self.around.restore()
        self.given.restore()

    def restore_values(self, quiet: Collection[str]) -> list[str]:
        """Restores the values of arrays, except for those at the paths `quiet`. Returns: the paths of the arrays that had changed."""
        return [path for graph in (self.around, self.given) for path in graph.restore_values(quiet)]


@dataclass(frozen=True)
class _Surroundings:
    """The surroundings of the function at its last call.

    Attributes:
        graph: the objects.
        rates: the places of learning rates, which may change.
        arrays: the paths of arrays whose values may change.
        number: identifies the facts.
    """

    graph: ObjectGraph
    rates: frozenset[Place]
    arrays: frozenset[str]
    number: int


class FunctionGuards:
    """Guards on all state that one function can read, which widen with the code that it runs.

    Learning rates of optimizers, and the values of NumPy arrays that become tensors, may change without a new key, until
    `compare_learning_rates` or `compare_values`: a recording takes them as inputs.

    Args:
        function: the function.
        kept: the number of surroundings that are recognized.
    """

    def __init__(self, function: Callable[..., Any], kept: int) -> None:
        self._function = function
        self._known: _Surroundings | None = None
        self._numbers: LeastRecentlyUsed[int] = LeastRecentlyUsed(kept)
        # The code that has run, with the globals that it ran in, and the names that it uses.
        self._executed: dict[types.CodeType, list[dict[str, Any]]] = {}
        self._touched: ExecutedCode | None = None
        # Further questions whose answers the function depends on, such as the state that a JAX function in it reads.
        self._questions: set[Question] = set()
        self._compared_rates: set[Place] = set()
        # The paths of arrays whose values Python has read; True if it may read other arrays unnoticed.
        self._compared_values: set[str] = set()
        self._reads_unseen = False

    @property
    def have_seen_a_call(self) -> bool:
        """True if the function has run, so that the state that it can read is known."""
        return self._touched is not None

    def take(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Snapshot:
        """Returns a snapshot of the state that a call with these arguments finds. Raises: CaptureError for state that cannot be watched."""
        known = self._surroundings()
        return self._with_arguments(known.graph, known.number, args, kwargs)

    def take_anew(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Snapshot:
        """Returns a snapshot like `take`, of state that only lasts until the caller restores another."""
        graph = self._graph({"step": self._function})
        return self._with_arguments(graph, self._number_of(graph, self.learning_rates(graph), self.arrays(graph)), args, kwargs)

    def take_everything(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ObjectGraph:
        """Returns all objects that a call could reach, whatever code it runs."""
        return walk({"step": self._function, "args": args, "kwargs": kwargs}, None, None, _MOST_VALUES)

    def take_reached(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ObjectGraph:
        """Returns all objects that the code which has run so far can reach."""
        return walk({"step": self._function, "args": args, "kwargs": kwargs}, None, self._touched)

    def why_not(self, found: Snapshot) -> str:
        """Returns the path of the first fact of the surroundings that differs now; "" if none does."""
        return _difference(*(self._facts(graph) for graph in (found.around, self._graph({"step": self._function}))))

    def widen(self, codes: Mapping[types.CodeType, Sequence[dict[str, Any]]], questions: Set[Question]) -> bool:
        """Notes executed code and questions. Returns: True if any is new, so that earlier snapshots may have missed state."""
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
            self._known = None
        return is_new

    def check_reached(self, found: Snapshot) -> None:
        """Checks that a snapshot has the functions of all code that has run; otherwise the function cannot be watched.

        Raises: CaptureError; the executed code is forgotten then, since another function may be in that place by now.
        """
        if self._touched is None:
            return
        unreached = set(found.around.unreached(self._touched)) & set(found.given.unreached(self._touched))
        if unreached:
            code = unreached.pop()
            self._executed.clear()
            self._touched = None
            raise CaptureError(
                f"the step runs {code.co_qualname}, a function that dynaxla cannot find from the step, so that its state cannot be watched",
                where=f"{code.co_filename}:{code.co_firstlineno}",
                hint="reach the function by an argument, a global variable, a closure or an attribute of these",
            )

    def forget_surroundings(self) -> None:
        """Makes the next snapshot look at all surroundings, e.g. because learning rates may have changed."""
        self._known = None

    def compare_learning_rates(self, found: Snapshot) -> None:
        """Compares the values of these learning rates from now on."""
        self._compared_rates.update(self.learning_rates(found.around))
        self._known = None

    def compare_values(self, paths: Collection[str]) -> None:
        """Compares the values of the arrays at these paths from now on."""
        self._compared_values.update(paths)

    def learning_rates(self, graph: ObjectGraph) -> dict[Place, float]:
        """Returns the learning rates that may change, by place."""
        return {
            place: group["lr"]
            for path, optimizer in graph.optimizers.items()
            for index, group in enumerate(optimizer.param_groups)
            if isinstance(group.get("lr"), float)
            and id(group) not in graph.repeated
            and (place := (f"{path}.param_groups[{index}]", "lr")) not in self._compared_rates
        }

    def arrays(self, graph: ObjectGraph) -> frozenset[str]:
        """Returns the paths of arrays whose values may change."""
        return frozenset() if self._reads_unseen or not graph.values else inputs_of(graph.arrays, self._compared_values)

    def _graph(self, roots: Mapping[str, Any], base: ObjectGraph | None = None) -> ObjectGraph:
        """Returns the objects that can be reached. Raises: CaptureError for objects that were read, but that cannot be compared."""
        found = walk(roots, base, self._touched, _MOST_VALUES)
        if self._touched is not None and found.incomparable:
            path, kind = next(iter(found.incomparable.items()))
            hint = "pass the values that the step needs from it as arguments"
            raise CaptureError(
                f"the step reads {path}, a {kind}, and dynaxla cannot check whether it has changed since the last call", hint=hint
            )
        if self._touched is not None and found.values:
            inputs = self.arrays(found)
            if large := [path for path, (_, values) in found.values.items() if values.data is None and path not in inputs]:
                hint = "pass the part that the step needs as an argument"
                raise CaptureError(f"the step reads {large[0]}, an array that is too large to compare at every call", hint=hint)
        return found

    def _surroundings(self) -> _Surroundings:
        """Returns the current surroundings: those of the last call, if nothing has changed."""
        known = self._known
        if known is None or not known.graph.is_unchanged(known.rates, known.arrays):
            graph = self._graph({"step": self._function})
            rates, arrays = self.learning_rates(graph), self.arrays(graph)
            known = self._known = _Surroundings(graph, frozenset(rates), arrays, self._number_of(graph, rates, arrays))
        return known

    def _with_arguments(self, around: ObjectGraph, number: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Snapshot:
        given = self._graph({"args": args, "kwargs": kwargs}, around)
        answers = tuple(map(guards.answer, sorted(self._questions)))
        return Snapshot(around, given, (number, _hashable(_frozen(given.facts(arrays=self.arrays(given)))), global_state(), answers))

    def _facts(self, graph: ObjectGraph) -> dict[str, Any]:
        return graph.facts(self.learning_rates(graph), self.arrays(graph))

    def _number_of(self, around: ObjectGraph, rates: Collection[Place], arrays: Collection[str]) -> int:
        """Returns a number that is equal for surroundings with equal facts; it is faster to compare."""
        facts = _hashable(_frozen(around.facts(rates, arrays)))
        number = self._numbers.get(facts)
        if number is None:
            number = next(_numbers)
            self._numbers.put(facts, number)
        return number


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
    for path in [*before, *after]:
        old, new = before.get(path), after.get(path)
        if old != new:
            if isinstance(old, list) and isinstance(new, list):
                known = dict(old)
                keys = [key for key, value in new if known.get(key, ABSENT) != value]
                return f"{path}[{keys[0]!r}]" if keys else path
            return path
    return ""
