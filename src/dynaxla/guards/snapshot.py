"""Snapshots of all state that a call of a function can read, and the guards of a function, which take the snapshots.

If two snapshots have equal keys, a program that was recorded in one of the two states gives correct results in the other.
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
from .code_names import ExecutedCode, could_check_classes
from .fingerprints import NO_FINGERPRINT, fingerprint
from .numpy_arrays import could_read_unnoticed, inputs_of
from .object_graph import ObjectGraph
from .object_walker import walk
from .slots import ABSENT, Attributes, Container, Namespace, Place
from .torch_state import global_state

# The maximum number of values that a function may reach. With 150,000 floats, recording a step takes 9 s, and the checks of each later call
# 2.7 ms (Intel Xeon with AVX-512, not idle otherwise, 2026-11-28).
_MAX_VALUES = 200_000
# The maximum number of Python numbers, besides learning rates, that are inputs because they change. All other numbers are guarded by value:
# a list that is shifted at each call has many changing numbers, and each input takes time in every call.
_MAX_CHANGING_NUMBERS = 100
_new_keys = itertools.count()


@dataclass(frozen=True)
class ObjectAtPath:
    """Stands for an object that each call looks up by its path. It may be the key of a place, or in a template (training/recordings.py)."""

    path: str


@dataclass(frozen=True)
class Snapshot:
    """The state at the beginning of a call. The path of an object identifies the object in `surroundings` or in `arguments`.

    Attributes:
        surroundings: the objects that can be reached from the function, and from modules and optimizers among the arguments.
        arguments: the objects that can be reached only from the other arguments; the base of this graph is `surroundings`.
        key: a hashable value. Two snapshots with equal keys differ in nothing that a recording depends on.
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
    def containers(self) -> dict[str, Container]:
        """Mutable containers by path."""
        return self.surroundings.containers | self.arguments.containers

    @property
    def aliased_ids(self) -> set[int]:
        """The ids of objects that several places refer to."""
        return self.surroundings.aliased_ids | self.arguments.aliased_ids

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
        """Returns the number, or the tuple of numbers, that a place contains now."""
        return self.arguments.number_at(place)

    def put(self, values: Mapping[Place, Any]) -> None:
        """Puts values into places. The key of a place may be an `ObjectAtPath`; a value of `ABSENT` removes the entry."""
        for (path, key), value in values.items():
            self.container(path).put(self.object_at(key.path) if isinstance(key, ObjectAtPath) else key, value)

    def container(self, path: str) -> Container:
        """Returns the container at a path. Raises: KeyError for an unknown path."""
        return self.surroundings.containers.get(path) or self.arguments.containers[path]

    def changes(self) -> dict[Place, Any]:
        """Returns the current value of each place that has changed since the snapshot, by place; `ABSENT` for a removed entry.

        Raises: CaptureError for a dict whose keys have another order, because the changes of places do not restore that order.
        """
        if path := next((path for path, container in self.containers.items() if container.is_reordered()), ""):
            hint = "keep the order of the keys, or change it outside the step"
            raise CaptureError(f"the step changes the order of the keys of {path}, and a program cannot do that", hint=hint)
        return {(path, key): value for path, container in self.containers.items() for key, value in container.changes().items()}

    def restore(self) -> None:
        """Gives all containers the entries that they had at the time of the snapshot."""
        self.surroundings.restore()
        self.arguments.restore()

    def restore_values(self, skipped: Collection[str]) -> list[str]:
        """Restores the values of arrays, except for arrays at the paths `skipped`. Returns: the paths of the arrays that had changed."""
        return [path for graph in (self.surroundings, self.arguments) for path in graph.restore_values(skipped)]


@dataclass(frozen=True)
class _Surroundings:
    """The surroundings of the function at its last call.

    Attributes:
        graph: the objects. The graph keeps the modules and optimizers among the last call's arguments alive.
        numbers: the places of numbers that may change without a new key.
        arrays: the paths of arrays whose values may change without a new key.
        key: equal for surroundings with equal facts (`ObjectGraph.facts`).
    """

    graph: ObjectGraph
    numbers: frozenset[Place]
    arrays: frozenset[str]
    key: int


class FunctionGuards:
    """Guards on all state that one function can read. The guards widen when the function runs new code.

    The inputs of a recording are learning rates, Python numbers that have changed between two calls, and NumPy arrays that can be tensors.
    Inputs are not guarded by value. A number that has not changed yet is guarded by value, as a constant of the program.
    `guard_numbers_by_value` and `guard_arrays_by_value` remove numbers and arrays from the inputs, so that they are guarded by value, too.

    Args:
        function: the function.
        capacity: the maximum number of different surroundings whose keys are stored.
    """

    def __init__(self, function: Callable[..., Any], capacity: int) -> None:
        self._function = function
        self._last: _Surroundings | None = None
        self._keys: LeastRecentlyUsed[int] = LeastRecentlyUsed(capacity)
        # The code objects that have run, each with the globals that it ran in.
        self._executed: dict[types.CodeType, list[dict[str, Any]]] = {}
        # The names that this code uses; None before the first run.
        self._executed_names: ExecutedCode | None = None
        # Getters (runtime/guards.py) on whose results the function depends, such as a getter for the state that a JAX function reads.
        self._getters: set[Getter] = set()
        # The last value of each number, by place.
        self._last_numbers: dict[Place, Number] = {}
        # The places of numbers that have changed between two calls, in order.
        self._changing_numbers: dict[Place, None] = {}
        # The places of numbers, and the paths of arrays, that are guarded by value because Python has read their values.
        self._compared_numbers: set[Place] = set()
        self._compared_values: set[str] = set()
        # True if the executed code could read an array without the recording noticing it.
        self._may_read_unnoticed = False
        # True if the executed code could distinguish traced numbers from plain numbers.
        self._may_check_classes = False

    @property
    def has_run(self) -> bool:
        """True if the function has run, so that the state that it can read is known."""
        return self._executed_names is not None

    def take(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Snapshot:
        """Returns a snapshot of the state before a call with these arguments. Raises: CaptureError for state that cannot be compared."""
        surroundings = self._surroundings(self._roots(args, kwargs))
        arguments = self._graph({"args": list(args), "kwargs": dict(kwargs)}, surroundings.graph)
        self.find_changing_numbers(arguments)
        return self._snapshot(surroundings.graph, surroundings.key, arguments)

    def take_temporary(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Snapshot:
        """Returns a snapshot as `take` does, but of temporary state: the next call of `take` does not compare with it."""
        graph = self._graph(self._roots(args, kwargs))
        key = self._key_of(graph, self.numbers(graph), self.arrays(graph))
        return self._snapshot(graph, key, self._graph({"args": list(args), "kwargs": dict(kwargs)}, graph))

    def walk_everything(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ObjectGraph:
        """Returns all objects that a call could reach with any code."""
        return walk({"step": self._function, "args": args, "kwargs": kwargs}, None, None, _MAX_VALUES)

    def walk_executed(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ObjectGraph:
        """Returns all objects that the function can reach through names in the code that has run so far."""
        return walk({"step": self._function, "args": args, "kwargs": kwargs}, None, self._executed_names)

    def compare_with(self, snapshot: Snapshot) -> tuple[str, bool]:
        """Compares the current surroundings with the surroundings of a snapshot.

        Returns: the path of the first fact that differs, "" if there is none; True if a number has changed for the first time. Facts are
        not compared then.
        """
        now = self._graph(snapshot.surroundings.roots)
        if self.find_changing_numbers(now):
            return "", True
        return _first_difference(self._facts(snapshot.surroundings), self._facts(now)), False

    def difference(self, before: Any, after: Any) -> str:
        """Returns the path of the first difference between two snapshots, which are given by their keys; "" if the path is not known."""
        surroundings = {number: facts for facts, number in self._keys.items()}
        facts: Any = [surroundings.get(key[0]) for key in (before, after)] if before[0] != after[0] else [before[1], after[1]]
        return "" if None in facts else _first_difference(*map(dict, facts))

    def widen(self, codes: Mapping[types.CodeType, Sequence[dict[str, Any]]], getters: Set[Getter]) -> bool:
        """Adds executed code and getters. Returns True if any is new, so that earlier snapshots may have missed state.

        Args:
            codes: code objects, each with the globals that the code ran in.
            getters: getters on whose results the function depends.
        """
        is_new = self._executed_names is None or not getters <= self._getters
        self._getters |= getters
        for code, namespaces in codes.items():
            earlier = self._executed.setdefault(code, [])
            added = [namespace for namespace in namespaces if all(namespace is not other for other in earlier)]
            earlier += added
            is_new = is_new or bool(added)
        if is_new:
            self._executed_names = ExecutedCode.of(self._executed)
            self._may_read_unnoticed = could_read_unnoticed(self._executed)
            self._may_check_classes = could_check_classes(self._executed)
            self._last = None
        return is_new

    def check_reached(self, snapshot: Snapshot) -> None:
        """Checks that a snapshot has the functions of all code that has run.

        Raises: CaptureError for code whose function is missing. Then all executed code is forgotten, because another function may have
        replaced the missing function.
        """
        if self._executed_names is None:
            return
        unreached = set(snapshot.surroundings.unreached(self._executed_names)) & set(snapshot.arguments.unreached(self._executed_names))
        if unreached:
            code = unreached.pop()
            self._executed.clear()
            self._executed_names = None
            raise CaptureError(
                f"the step runs {code.co_qualname}, a function that dynaxla cannot find from the step, so that its state cannot be guarded",
                where=f"{code.co_filename}:{code.co_firstlineno}",
                hint="reach the function by an argument, a global variable, a closure or an attribute of these",
            )

    def forget_surroundings(self) -> None:
        """Makes the next snapshot walk the surroundings again, e.g. because numbers of parameter groups may have changed."""
        self._last = None

    def guard_numbers_by_value(self, places: Collection[Place]) -> None:
        """Guards the numbers at these places by value from now on."""
        self._compared_numbers.update(places)
        self._last = None

    def guard_arrays_by_value(self, paths: Collection[str]) -> None:
        """Guards the arrays at these paths by value from now on."""
        self._compared_values.update(paths)

    def numbers(self, graph: ObjectGraph) -> dict[Place, Number]:
        """Returns the numbers that may change without a new key, by place."""
        groups = param_groups(graph.optimizers)
        places = {(path, "lr"): None for path in groups} | self._changing_numbers
        values = {
            (path, key): graph.number_at((path, key))
            for path, key in places
            if path in graph.containers
            and (path, key) not in self._compared_numbers
            # A recording replaces a parameter group in its optimizer only, so no other object may refer to the group.
            and (id(groups[path]) not in graph.aliased_ids if path in groups else not self._may_check_classes)
        }
        return {place: value for place, value in values.items() if _is_number(value)}

    def find_changing_numbers(self, graph: ObjectGraph) -> bool:
        """Compares all numbers with the numbers of the last call. Returns True if a number has changed that becomes a new input."""
        numbers = {
            (path, key): value
            for path, container in graph.containers.items()
            if isinstance(container.target, _NUMBER_CONTAINERS)
            for key, value in container.items.items()
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
        """Returns the paths of arrays whose values may change without a new key."""
        return frozenset() if self._may_read_unnoticed or not graph.buffers_at_walk else inputs_of(graph.arrays, self._compared_values)

    def _graph(self, roots: Mapping[str, Any], base: ObjectGraph | None = None) -> ObjectGraph:
        """Returns the objects that the roots reach. Raises: CaptureError for an object that code may read and that cannot be compared."""
        graph = walk(roots, base, self._executed_names, _MAX_VALUES)
        if self._executed_names is not None and graph.incomparable:
            path, kind = next(iter(graph.incomparable.items()))
            hint = "pass the values that the step needs from it as arguments"
            raise CaptureError(
                f"the step reads {path}, a {kind}, and dynaxla cannot check whether it has changed since the last call", hint=hint
            )
        if self._executed_names is not None and graph.buffers_at_walk:
            inputs = self.arrays(graph)
            if large := [path for path, (_, values) in graph.buffers_at_walk.items() if values.data is None and path not in inputs]:
                hint = "pass the part that the step needs as an argument"
                raise CaptureError(f"the step reads {large[0]}, an array that is too large to compare at every call", hint=hint)
        return graph

    def _roots(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the roots of the surroundings: the function, and the modules and optimizers among the arguments.

        Modules and optimizers count as surroundings, so that a later call with the same ones does not walk them again.
        """
        arguments = {f"{ARGUMENT}{index}": value for index, value in enumerate(args)}
        arguments |= {f"{ARGUMENT}{name}": value for name, value in kwargs.items()}
        return {"step": self._function} | {name: value for name, value in arguments.items() if isinstance(value, _LARGE_OBJECTS)}

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
        results = tuple(map(guards.call_getter, sorted(self._getters)))
        return Snapshot(surroundings, arguments, (key, _hashable(_as_tuples(self._facts(arguments))), global_state(), results))

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
# The paths of modules and optimizers among the arguments begin with this prefix. No other path has a space at that position.
ARGUMENT = "argument "
_LARGE_OBJECTS = (torch.nn.Module, torch.optim.Optimizer)
# Containers whose entries may be traced numbers during a recording.
_NUMBER_CONTAINERS = (dict, list, Namespace, Attributes, types.CellType)


def _are_same_objects(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    return first.keys() == second.keys() and all(value is second[name] for name, value in first.items())


def param_groups(optimizers: Mapping[str, torch.optim.Optimizer]) -> dict[str, dict[str, Any]]:
    """Returns the parameter groups of optimizers, by path. `optimizers`: optimizers by path."""
    return {
        f"{path}.param_groups[{index}]": group
        for path, optimizer in optimizers.items()
        for index, group in enumerate(optimizer.param_groups)
    }


def _is_number(value: Any) -> bool:
    """True for an int, a float, and a tuple of these."""
    return type(value) in (int, float) or (type(value) is tuple and bool(value) and all(type(item) in (int, float) for item in value))


def _hashable(facts: Any) -> Any:
    """Returns the facts unchanged. Raises: CaptureError for facts that are not hashable, such as symbolic sizes of a fake tensor."""
    try:
        hash(facts)
    except TypeError as error:
        raise CaptureError(
            f"{_first_unhashable(facts)} has a value that dynaxla cannot compare with its value at an earlier call: {error}",
            hint="keep it out of the step",
        ) from error
    return facts


def _first_unhashable(facts: Any) -> str:
    """Returns the path of the first fact that is not hashable."""
    for path, fact in facts:
        try:
            hash(fact)
        except TypeError:
            return f"{path}, which the step can read,"
    return "an object that the step can read"


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
