"""Faults in the guards on Python state: changes that these no longer see."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from dynaxla.guards import fingerprints, object_graph, object_walker, reference_checks, slots, trusted_code
from dynaxla.guards.object_walker import Visitor

from . import FaultList

FAULTS = FaultList()


def _contents(name: str, blind: Callable[[type], bool]) -> None:
    """All values of such types are the same."""

    def planted() -> AbstractContextManager[Any]:
        right = fingerprints._finder

        def finder(kind: type) -> Any:
            return (lambda value: "same") if blind(kind) else right(kind)

        return patch.object(fingerprints, "_finder", finder)

    FAULTS[name] = planted


def _named(*names: str) -> Callable[[type], bool]:
    return lambda kind: kind.__name__ in names


_contents("code_is_not_looked_at", _named("code"))
_contents(
    "numpy_scalars_are_known_by_their_path", lambda kind: kind.__module__ == "numpy" and kind.__name__ in ("float32", "int64", "float64")
)
_contents("decimals_are_alike", _named("Decimal"))
_contents("fractions_are_alike", _named("Fraction"))
_contents("dates_are_alike", _named("datetime", "timedelta"))
_contents("ranges_are_alike", _named("range"))
_contents("dtypes_are_alike", _named("dtype"))
_contents("strings_are_alike", _named("str", "bytes"))


@FAULTS.add
def numbers_are_compared_without_their_types() -> AbstractContextManager[Any]:
    right = fingerprints.fingerprint

    def fingerprint(value: Any) -> Any:
        return (None, value) if type(value) in (int, bool, float) else right(value)

    return patch.object(object_graph, "fingerprint", fingerprint)


def _parts(name: str, kind: type | tuple[type, ...], kept: Sequence[str]) -> None:
    def planted() -> AbstractContextManager[Any]:
        right = fingerprints.parts_of

        def parts_of(value: Any) -> Any:
            found = right(value)
            return {key: found[key] for key in kept} if isinstance(value, kind) else found

        return patch.object(object_walker, "parts_of", parts_of)

    FAULTS[name] = planted


_parts("partials_are_known_by_nothing", functools.partial, ())
_parts("functions_of_partials_are_not_looked_at", functools.partial, ("args", "keywords"))
_parts("slices_are_known_by_their_path", slice, ())
_parts("objects_of_bound_methods_are_not_looked_at", types.MethodType, ("__func__",))
_parts("properties_are_not_looked_into", property, ())
_parts("static_and_class_methods_are_not_looked_into", (staticmethod, classmethod), ())


def _unheld(name: str, skip: Callable[[Any, str], bool]) -> None:
    """Places of a kind are not held."""

    def planted() -> AbstractContextManager[Any]:
        right = Visitor._add_container

        def hold(self: Visitor, path: str, target: Any, counts: Any = None) -> dict[Any, Any]:
            items = right(self, path, target, counts)
            if skip(target, path):
                del self._graph.containers[path]
            return items

        return patch.object(Visitor, "_add_container", hold)

    FAULTS[name] = planted


def _is_attributes(target: Any, name: str) -> bool:
    return isinstance(target, slots.Attributes) and name in target.names


_unheld("closure_cells_are_not_held", lambda target, _: isinstance(target, types.CellType))
_unheld("functions_are_known_by_nothing", lambda target, _: _is_attributes(target, "__defaults__"))
_unheld("slots_are_not_held", lambda target, path: path.endswith(" slots"))
_unheld("default_factories_are_not_held", lambda target, path: path.endswith("default_factory"))
_unheld("attributes_of_functions_are_not_held", lambda target, path: path.endswith(" attributes"))
_unheld("lists_are_not_held", lambda target, _: isinstance(target, list))
_unheld("sets_are_not_held", lambda target, _: isinstance(target, set))


def _class_items(name: str, skip: Callable[[str, Any], bool]) -> None:
    def planted() -> AbstractContextManager[Any]:
        right = object_walker.ClassDict

        def made(kind: type, counts: Callable[[str, Any], bool]) -> Any:
            return right(kind, lambda key, value: counts(key, value) and not skip(key, value))

        return patch.object(object_walker, "ClassDict", made)

    FAULTS[name] = planted


_class_items("methods_are_not_looked_at", lambda _, value: isinstance(value, types.FunctionType))
_class_items("attributes_of_classes_are_not_looked_at", lambda _, value: isinstance(value, tuple))
_class_items("special_methods_are_not_looked_at", lambda key, _: key.startswith("__"))


@FAULTS.add
def code_without_a_file_is_trusted() -> AbstractContextManager[Any]:
    return _trusting()


@contextmanager
def _trusting() -> Iterator[None]:
    right = trusted_code.is_trusted_namespace

    def trusted(values: Any) -> bool:
        return values.get("__file__") is None or right(values)

    with patch.object(trusted_code, "is_trusted_namespace", trusted), patch.object(object_walker, "is_trusted_namespace", trusted):
        yield


@FAULTS.add
def globals_are_not_read() -> AbstractContextManager[Any]:
    return patch.object(Visitor, "_add_globals", lambda self, *_: None)


@FAULTS.add
def modules_are_not_looked_into() -> AbstractContextManager[Any]:
    return patch.object(Visitor, "_add_module", lambda self, *_, **__: None)


@FAULTS.add
def metaclasses_are_not_looked_at() -> AbstractContextManager[Any]:
    right = Visitor._referents

    def inside(self: Visitor, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        for suffix, item in right(self, path, value):
            if not (isinstance(value, type) and isinstance(item, type) and issubclass(item, type)):
                yield suffix, item

    return patch.object(Visitor, "_referents", inside)


@contextmanager
def _values(change: Callable[[Any], Any]) -> Iterator[None]:
    right = fingerprints.buffer_contents

    def buffer_contents(value: Any, with_data: bool = True) -> Any:
        return change(right(value, with_data))

    with (
        patch.object(object_walker, "buffer_contents", buffer_contents),
        patch.object(reference_checks, "buffer_contents", buffer_contents),
    ):
        yield


@FAULTS.add
def values_of_arrays_are_not_compared() -> AbstractContextManager[Any]:
    return _values(lambda found: fingerprints.BufferContents(found.metadata, b""))


@FAULTS.add
def shapes_are_not_compared() -> AbstractContextManager[Any]:
    right = object_graph.metadata_of
    return patch.object(object_graph, "metadata_of", lambda tensor: (*right(tensor)[:1], None, None, *right(tensor)[3:]))


@FAULTS.add
def required_gradients_are_not_compared() -> AbstractContextManager[Any]:
    right = object_graph.metadata_of
    return patch.object(object_graph, "metadata_of", lambda tensor: (*right(tensor)[:5], False, right(tensor)[-1]))


@FAULTS.add
def the_watch_does_not_look_at_globals() -> AbstractContextManager[Any]:
    return patch.object(reference_checks.ReferenceChecks, "_are_namespaces_unchanged", lambda self: True)


@FAULTS.add
def the_watch_does_not_look_at_containers() -> AbstractContextManager[Any]:
    return patch.object(reference_checks.ReferenceChecks, "_are_entries_unchanged", lambda self: True)


@FAULTS.add
def the_watch_does_not_look_at_keys() -> AbstractContextManager[Any]:
    return patch.object(reference_checks, "_keys", lambda target: ())


@FAULTS.add
def the_watch_does_not_look_at_versions_of_dicts() -> AbstractContextManager[Any]:
    return patch.object(reference_checks.DictCheck, "are_unchanged", lambda self: True)


@FAULTS.add
def the_watch_does_not_look_at_classes() -> AbstractContextManager[Any]:
    return patch.object(reference_checks.Identities, "are_unchanged", lambda self: True)


@FAULTS.add
def the_watch_compares_by_equality() -> AbstractContextManager[Any]:
    return patch.object(reference_checks, "_pointers", lambda values: list(map(repr, map(type, values))))
