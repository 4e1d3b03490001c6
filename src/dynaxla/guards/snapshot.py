"""Snapshots of all state that a call of a function can read, and the guards of a function, which take them.

Two snapshots with equal keys are interchangeable for a recording: a program recorded from one state is right for the other state.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import numpy as np
import torch

from ..errors import CaptureError
from ..runtime import guards
from ..runtime.cache import LeastRecentlyUsed
from ..runtime.guards import Getter
from .code_names import ExecutedCode, could_tell_classes
from .fingerprints import NO_FINGERPRINT, fingerprint
from .numpy_arrays import could_read_unnoticed, inputs_of
from .object_graph import ObjectGraph
from .object_walker import walk
from .slots import ABSENT, Attributes, Holder, Namespace, Place
from .torch_state import global_state

# The maximum number of values that a function may reach. With 150,000 floats, recording a step takes 9 s, and the checks of each later call
# 2.7 ms (Intel Xeon with AVX-512, not idle otherwise, 2026-11-28).
_MAX_VALUES = 200_000
# Beyond this number, numbers are compared. A list that is shifted at each call has many that change, and each takes time in every call.
_MAX_CHANGING_NUMBERS = 100
_new_keys = itertools.count()


@dataclass(frozen=True)
class KnownObject:
    """Stands for an object as a key of a dict: each call looks the object up by its path."""

    path: str


@dataclass(frozen=True)
class Snapshot:
    """The state at the beginning of a call. A path leads to an object of the surroundings or of the arguments.

    Attributes:
        surroundings: the objects that can be reached from the function, and from modules and optimizers among the arguments.
        arguments: the objects that can be reached only from the other arguments; the base of this graph is `surroundings`.
        key: equal for two snapshots if nothing that a recording depends on differs. Hashable.
    """

    surroundings: ObjectGraph
    arguments: ObjectGraph
    key: Any = field(repr=False)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Tensors by path."""
        return self.surroundings.tensors | self.arguments.tensors

    @property
    def args(self) -> list[Any]:
        """The positional arguments."""
        return self.arguments.roots["args"]

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments."""
        return self.arguments.roots["kwargs"]

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """Optimizers by path."""
        return self.surroundings.optimizers | self.arguments.optimizers

    @property
    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """NumPy arrays by path."""
        return self.surroundings.arrays | self.arguments.arrays

    @property
    def holders(self) -> dict[str, Holder]:
        """Mutable containers by path."""
        return self.surroundings.holders | self.arguments.holders

    @property
    def repeated(self) -> set[int]:
        """The ids of objects that several places refer to."""
        return self.surroundings.repeated | self.arguments.repeated

    def path_of(self, value: Any) -> str | None:
        """Returns the path of an object; None if the snapshot has no such object."""
        return self.arguments.path_of(value)

    def object_at(self, path: str) -> Any:
        """Returns the object at a path. Raises: KeyError for an unknown path."""
        return self.arguments.object_at(path)

    def input_at(self, path: str) -> torch.Tensor:
        """Returns the tensor at a path, or a tensor that shares the memory of the array there."""
        return self.arguments.input_at(path)

    def number_at(self, place: Place) -> Number:
        """Returns the number of a parameter group that a place contains now."""
        return self.arguments.number_at(place)

    def put(self, values: Mapping[Place, Any]) -> None:
        """Puts values into places, whose keys may be `KnownObject`s; `ABSENT` removes an entry."""
        for (path, key), value in values.items():
            self.holder(path).put(self.object_at(key.path) if isinstance(key, KnownObject) else key, value)

    def holder(self, path: str) -> Holder:
        """Returns the container at a path. Raises: KeyError for an unknown path."""
        return self.surroundings.holders.get(path) or self.arguments.holders[path]

    def changes(self) -> dict[Place, Any]:
        """Returns the current value of each place that has changed since the snapshot; `ABSENT` for a removed entry."""
        return {(path, key): value for path, holder in self.holders.items() for key, value in holder.changes().items()}

    def restore(self) -> None:
        """Gives all containers the entries that they had at the time of the snapshot."""
        self.surroundings.restore()
        self.arguments.restore()

    def restore_values(self, quiet: Collection[str]) -> list[str]:
        """Restores the values of arrays, except for arrays at the paths `quiet`. Returns: the paths of the arrays that had changed."""
        return [path for graph in (self.surroundings, self.arguments) for path in graph.restore_values(quiet)]


@dataclass(frozen=True)
class _Surroundings:
    """The surroundings of the function at its last call.

    Attributes:
        graph: the objects. It keeps the modules and optimizers among the last call's arguments alive.
        numbers: the places of numbers of parameter groups, which may change.
        arrays: the paths of arrays whose values may change.
        key: equal for surroundings with equal facts (`ObjectGraph.facts`).
    """

    graph: ObjectGraph
    numbers: frozenset[Place]
    arrays: frozenset[str]
    key: int


class FunctionGuards:
    """Guards on all state that one function can read. They widen when the function runs new code.

    Python numbers that have changed between two calls, and the values of NumPy arrays that become tensors, may change without a new key,
    until `compare_numbers` or `compare_values`: a recording takes them as inputs. Learning rates are inputs from the first recording on;
    another number is a constant of the program until it changes.

    Args:
        function: the function.
        capacity: the number of different surroundings to remember.
    """

    def __init__(self, function: Callable[..., Any], capacity: int) -> None:
        self._function = function
        self._last: _Surroundings | None = None
        self._keys: LeastRecentlyUsed[int] = LeastRecentlyUsed(capacity)
        # The code that has run, with the globals that the code ran in, and the names that the code uses.
        self._executed: dict[types.CodeType, list[dict[str, Any]]] = {}
        self._executed_names: ExecutedCode | None = None
        # Questions whose answers the function depends on, such as the state that a JAX function called by it reads.
        self._questions: set[Getter] = set()
        # The numbers at the last call; the places of those that have changed; and of those whose values Python has read.
        self._last_numbers: dict[Place, Number] = {}
        self._changing_numbers: dict[Place, None] = {}
        self._compared_numbers: set[Place] = set()
        # The paths of arrays whose values Python has read. Then: True if Python may read other arrays without notice.
        self._compared_values: set[str] = set()
        self._may_read_unnoticed = False
        # True if Python may tell traced numbers from plain ones.
        self._may_tell_classes = False

    @property
    def have_seen_a_call(self) -> bool:
        """True if the function has run, so that the state that it can read is known."""
        return self._executed_names is not None

    def take(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Snapshot:
        """Returns a snapshot of the state before a call with these arguments. Raises: CaptureError for state that cannot be compared."""
        surroundings = self._surroundings(self._roots(args, kwargs))
        arguments = self._graph({"args": list(args), "kwargs": dict(kwargs)}, surroundings.graph)
        self.find_changing_numbers(arguments)
        return self._snapshot(surroundings.graph, surroundings.key, arguments)

    def take_anew(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Snapshot:
        """Returns a snapshot like `take`, but of temporary state: the next call of `take` does not compare with it."""
        graph = self._graph(self._roots(args, kwargs))
        key = self._key_of(graph, self.numbers(graph), self.arrays(graph))
        return self._snapshot(graph, key, self._graph({"args": list(args), "kwargs": dict(kwargs)}, graph))

    def take_everything(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ObjectGraph:
        """Returns all objects that a call could reach with any code."""
        return walk({"step": self._function, "args": args, "kwargs": kwargs}, None, None, _MAX_VALUES)

    def take_reached(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ObjectGraph:
        """Returns all objects that the code which has run so far can reach."""
        return walk({"step": self._function, "args": args, "kwargs": kwargs}, None, self._executed_names)

    def compare_with(self, snapshot: Snapshot) -> tuple[str, bool]:
        """Compares the current surroundings with those of a snapshot.

        Returns: the path of the first fact that differs, "" if there is none; True if numbers have changed for the first time.
        """
        now = self._graph(snapshot.surroundings.roots)
        if self.find_changing_numbers(now):
            return "", True
        return _first_difference(self._facts(snapshot.surroundings), self._facts(now)), False

    def difference(self, before: Any, after: Any) -> str:
        """Returns the path of the first difference between two snapshots, which are given by their keys; "" if it is not known."""
        surroundings = {number: facts for facts, number in self._keys.items()}
        facts: Any = [surroundings.get(key[0]) for key in (before, after)] if before[0] != after[0] else [before[1], after[1]]
        return "" if None in facts else _first_difference(*map(dict, facts))

    def widen(self, codes: Mapping[types.CodeType, Sequence[dict[str, Any]]], questions: Set[Getter]) -> bool:
        """Adds executed code and questions. Returns True if any is new, so that earlier snapshots may have missed state.

        Args:
            codes: code objects, each with the globals that the code ran in.
            questions: questions whose answers the function depends on.
        """
        is_new = self._executed_names is None or not questions <= self._questions
        self._questions |= questions
        for code, namespaces in codes.items():
            earlier = self._executed.setdefault(code, [])
            added = [namespace for namespace in namespaces if all(namespace is not other for other in earlier)]
            earlier += added
            is_new = is_new or bool(added)
        if is_new:
            self._executed_names = ExecutedCode.of(self._executed)
            self._may_read_unnoticed = could_read_unnoticed(self._executed)
            self._may_tell_classes = could_tell_classes(self._executed)
            self._last = None
        return is_new

    def check_reached(self, snapshot: Snapshot) -> None:
        """Checks that a snapshot has the functions of all code that has run.

        Raises: CaptureError if not. The executed code is forgotten then, because the place of that function may have another function now.
        """
        if self._executed_names is None:
            return
        unreached = set(snapshot.surroundings.unreached(self._executed_names)) & set(snapshot.arguments.unreached(self._executed_names))
        if unreached:
            code = unreached.pop()
            self._executed.clear()
            self._executed_names = None
            raise CaptureError(
                f"the step runs {code.co_qualname}, a function that dynaxla cannot find from the step, so that its state cannot be watched",
                where=f"{code.co_filename}:{code.co_firstlineno}",
                hint="reach the function by an argument, a global variable, a closure or an attribute of these",
            )

    def forget_surroundings(self) -> None:
        """Makes the next snapshot walk the surroundings again, e.g. because numbers of parameter groups may have changed."""
        self._last = None

    def compare_numbers(self, places: Collection[Place]) -> None:
        """Compares the values of the numbers at these places from now on."""
        self._compared_numbers.update(places)
        self._last = None

    def compare_values(self, paths: Collection[str]) -> None:
        """Compares the values of the arrays at these paths from now on."""
        self._compared_values.update(paths)

    def numbers(self, graph: ObjectGraph) -> dict[Place, Number]:
        """Returns the numbers that may change without a new key, by place."""
        groups = param_groups(graph.optimizers)
        places = {(path, "lr"): None for path in groups} | self._changing_numbers
        values = {
            (path, key): graph.number_at((path, key))
            for path, key in places
            if path in graph.holders
            and (path, key) not in self._compared_numbers
            # A recording replaces groups in their optimizers only.
            and (id(groups[path]) not in graph.repeated if path in groups else not self._may_tell_classes)
        }
        return {place: value for place, value in values.items() if _is_number(value)}

    def find_changing_numbers(self, graph: ObjectGraph) -> bool:
        """Compares all numbers with those of the last call. Returns True if one has changed for the first time."""
        numbers = {
            (path, key): value
            for path, holder in graph.holders.items()
            if isinstance(holder.target, _HOLDERS_OF_NUMBERS)
            for key, value in holder.items.items()
            if _is_number(value) and fingerprint(key) is not NO_FINGERPRINT
        }
        changed = [
            place
            for place, value in numbers.items()
            if self._last_numbers.get(place, value) != value and place not in self._compared_numbers and place not in self._changing_numbers
        ]
        added = changed[: _MAX_CHANGING_NUMBERS - len(self._changing_numbers)]
        self._changing_numbers |= dict.fromkeys(added)
        self._last_numbers |= numbers
        return bool(added)

    def arrays(self, graph: ObjectGraph) -> frozenset[str]:
        """Returns the paths of arrays whose values may change."""
        return frozenset() if self._may_read_unnoticed or not graph.values else inputs_of(graph.arrays, self._compared_values)

    def _graph(self, roots: Mapping[str, Any], base: ObjectGraph | None = None) -> ObjectGraph:
        """Returns the objects that the roots reach. Raises: CaptureError for an object that was read and cannot be compared."""
        graph = walk(roots, base, self._executed_names, _MAX_VALUES)
        if self._executed_names is not None and graph.incomparable:
            path, kind = next(iter(graph.incomparable.items()))
            hint = "pass the values that the step needs from it as arguments"
            raise CaptureError(
                f"the step reads {path}, a {kind}, and dynaxla cannot check whether it has changed since the last call", hint=hint
            )
        if self._executed_names is not None and graph.values:
            inputs = self.arrays(graph)
            if large := [path for path, (_, values) in graph.values.items() if values.data is None and path not in inputs]:
                hint = "pass the part that the step needs as an argument"
                raise CaptureError(f"the step reads {large[0]}, an array that is too large to compare at every call", hint=hint)
        return graph

    def _roots(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the roots of the surroundings. Large arguments are among them: a call with the same ones need not walk them again."""
        given = {f"{ARGUMENT}{index}": value for index, value in enumerate(args)} | {f"{ARGUMENT}{name}": kwargs[name] for name in kwargs}
        return {"step": self._function} | {name: value for name, value in given.items() if isinstance(value, _LARGE_OBJECTS)}

    def _surroundings(self, roots: dict[str, Any]) -> _Surroundings:
        """Returns the current surroundings: the same object as for the last call, if nothing has changed."""
        last = self._last
        if last is None or not _are_same_objects(last.graph.roots, roots) or not last.graph.is_unchanged(last.numbers, last.arrays):
            self._last = last = None  # frees the last call's arguments
            graph = self._graph(roots)
            self.find_changing_numbers(graph)
            numbers, arrays = self.numbers(graph), self.arrays(graph)
            last = self._last = _Surroundings(graph, frozenset(numbers), arrays, self._key_of(graph, numbers, arrays))
        return last

    def _snapshot(self, surroundings: ObjectGraph, key: int, arguments: ObjectGraph) -> Snapshot:
        answers = tuple(map(guards.call_getter, sorted(self._questions)))
        return Snapshot(surroundings, arguments, (key, _hashable(_as_tuples(self._facts(arguments))), global_state(), answers))

    def _facts(self, graph: ObjectGraph) -> dict[str, Any]:
        return graph.facts(self.numbers(graph), self.arrays(graph))

    def _key_of(self, surroundings: ObjectGraph, numbers: Collection[Place], arrays: Collection[str]) -> int:
        """Returns a key that is equal for surroundings with equal facts. Keys are compared faster than facts."""
        facts = _hashable(_as_tuples(surroundings.facts(numbers, arrays)))
        key = self._keys.get(facts)
        if key is None:
            key = next(_new_keys)
            self._keys.put(facts, key)
        return key


# A number, or a tuple of numbers such as Adam's `betas`.
Number = float | tuple[float, ...]
# The paths of large arguments begin with this. No other path does, because expressions have no spaces here.
ARGUMENT = "argument "
_LARGE_OBJECTS = (torch.nn.Module, torch.optim.Optimizer)
# Containers whose entries may be traced numbers during a recording.
_HOLDERS_OF_NUMBERS = (dict, list, Namespace, Attributes, types.CellType)


def _are_same_objects(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(value is other[name] for name, value in one.items())


def param_groups(optimizers: Mapping[str, torch.optim.Optimizer]) -> dict[str, dict[str, Any]]:
    """Returns the parameter groups of optimizers, which are given by path, by path."""
    return {
        f"{path}.param_groups[{index}]": group
        for path, optimizer in optimizers.items()
        for index, group in enumerate(optimizer.param_groups)
    }


def _is_number(value: Any) -> bool:
    """True for an int, a float, and a tuple of these."""
    return type(value) in (int, float) or (type(value) is tuple and bool(value) and all(type(item) in (int, float) for item in value))


def _hashable(facts: Any) -> Any:
    """Returns the facts. Raises: CaptureError for facts that are not hashable, such as symbolic sizes of a fake tensor."""
    try:
        hash(facts)
    except TypeError as error:
        raise CaptureError(f"the step can reach a value that dynaxla cannot compare with its value at an earlier call: {error}") from error
    return facts


def _as_tuples(facts: Mapping[str, Any]) -> Any:
    return tuple((path, tuple(value) if isinstance(value, list) else value) for path, value in facts.items())


def _are_entries(fact: Any) -> TypeGuard[Iterable[tuple[Any, Any]]]:
    """True for the entries of a container: pairs of keys and values."""
    return isinstance(fact, (list, tuple)) and all(isinstance(item, tuple) and len(item) == 2 for item in fact)


def _first_difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Returns the path of the first difference between two mappings of facts; "" if there is none."""
    for path in [*before, *after]:
        old, new = before.get(path), after.get(path)
        if old != new:
            if _are_entries(old) and _are_entries(new):
                old_values = dict(old)
                keys = [key for key, value in new if old_values.get(key, ABSENT) != value]
                return f"{path}[{keys[0]!r}]" if keys else path
            return path
    return ""
