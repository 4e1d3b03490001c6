"""Faults in the guards on Python state: changes that the guards no longer detect."""

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


def _add_equal_values(name: str, is_blind: Callable[[type], bool]) -> None:
    """Adds a fault: all values of a type with `is_blind` have the same fingerprint."""

    def planted() -> AbstractContextManager[Any]:
        original = fingerprints._finder

        def finder(kind: type) -> Any:
            return (lambda value: "same") if is_blind(kind) else original(kind)

        return patch.object(fingerprints, "_finder", finder)

    FAULTS[name] = planted


def _is_named(*names: str) -> Callable[[type], bool]:
    return lambda kind: kind.__name__ in names


_add_equal_values("code_is_ignored", _is_named("code"))
_add_equal_values("numpy_scalars_are_equal", lambda kind: kind.__module__ == "numpy" and kind.__name__ in ("float32", "int64", "float64"))
_add_equal_values("decimals_are_equal", _is_named("Decimal"))
_add_equal_values("fractions_are_equal", _is_named("Fraction"))
_add_equal_values("dates_are_equal", _is_named("datetime", "timedelta"))
_add_equal_values("ranges_are_equal", _is_named("range"))
_add_equal_values("dtypes_are_equal", _is_named("dtype"))
_add_equal_values("strings_are_equal", _is_named("str", "bytes"))


@FAULTS.add
def numbers_are_compared_without_their_types() -> AbstractContextManager[Any]:
    original = fingerprints.fingerprint

    def fingerprint(value: Any) -> Any:
        return (None, value) if type(value) in (int, bool, float) else original(value)

    return patch.object(object_graph, "fingerprint", fingerprint)


def _add_missing_parts(name: str, kind: type | tuple[type, ...], compared: Sequence[str]) -> None:
    """Adds a fault: objects of a class are compared by some of their parts only."""

    def planted() -> AbstractContextManager[Any]:
        original = fingerprints.parts_of

        def parts_of(value: Any) -> Any:
            parts = original(value)
            return {key: parts[key] for key in compared} if isinstance(value, kind) else parts

        return patch.object(object_walker, "parts_of", parts_of)

    FAULTS[name] = planted


_add_missing_parts("partials_are_ignored", functools.partial, ())
_add_missing_parts("functions_of_partials_are_ignored", functools.partial, ("args", "keywords"))
_add_missing_parts("slices_are_equal", slice, ())
_add_missing_parts("objects_of_bound_methods_are_ignored", types.MethodType, ("__func__",))
_add_missing_parts("properties_are_ignored", property, ())
_add_missing_parts("static_and_class_methods_are_ignored", (staticmethod, classmethod), ())


def _add_ignored_containers(name: str, skip: Callable[[Any, str], bool]) -> None:
    """Adds a fault: containers with `skip` are not in the object graph."""

    def planted() -> AbstractContextManager[Any]:
        original = Visitor._add_container

        def add_container(self: Visitor, path: str, target: Any, counts: Any = None) -> dict[Any, Any]:
            items = original(self, path, target, counts)
            if skip(target, path):
                del self._graph.containers[path]
            return items

        return patch.object(Visitor, "_add_container", add_container)

    FAULTS[name] = planted


def _is_attributes(target: Any, name: str) -> bool:
    return isinstance(target, slots.Attributes) and name in target.names


_add_ignored_containers("closure_cells_are_ignored", lambda target, _: isinstance(target, types.CellType))
_add_ignored_containers("functions_are_ignored", lambda target, _: _is_attributes(target, "__defaults__"))
_add_ignored_containers("slots_are_ignored", lambda target, path: path.endswith(" slots"))
_add_ignored_containers("default_factories_are_ignored", lambda target, path: path.endswith("default_factory"))
_add_ignored_containers("attributes_of_functions_are_ignored", lambda target, path: path.endswith(" attributes"))
_add_ignored_containers("lists_are_ignored", lambda target, _: isinstance(target, list))
_add_ignored_containers("sets_are_ignored", lambda target, _: isinstance(target, set))


def _add_ignored_class_items(name: str, skip: Callable[[str, Any], bool]) -> None:
    """Adds a fault: items of classes with `skip` are not compared."""

    def planted() -> AbstractContextManager[Any]:
        original = object_walker.ClassDict

        def class_dict(kind: type, counts: Callable[[str, Any], bool]) -> Any:
            return original(kind, lambda key, value: counts(key, value) and not skip(key, value))

        return patch.object(object_walker, "ClassDict", class_dict)

    FAULTS[name] = planted


_add_ignored_class_items("methods_are_ignored", lambda _, value: isinstance(value, types.FunctionType))
_add_ignored_class_items("attributes_of_classes_are_ignored", lambda _, value: isinstance(value, tuple))
_add_ignored_class_items("special_methods_are_ignored", lambda key, _: key.startswith("__"))


@FAULTS.add
def code_without_a_file_is_trusted() -> AbstractContextManager[Any]:
    return _trust_code_without_file()


@contextmanager
def _trust_code_without_file() -> Iterator[None]:
    original = trusted_code.is_trusted_namespace

    def is_trusted(values: Any) -> bool:
        return values.get("__file__") is None or original(values)

    with patch.object(trusted_code, "is_trusted_namespace", is_trusted), patch.object(object_walker, "is_trusted_namespace", is_trusted):
        yield


@FAULTS.add
def globals_are_ignored() -> AbstractContextManager[Any]:
    return patch.object(Visitor, "_add_globals", lambda self, *_: None)


@FAULTS.add
def modules_are_ignored() -> AbstractContextManager[Any]:
    return patch.object(Visitor, "_add_module", lambda self, *_, **__: None)


@FAULTS.add
def metaclasses_are_ignored() -> AbstractContextManager[Any]:
    original = Visitor._referents

    def referents(self: Visitor, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        for suffix, item in original(self, path, value):
            if not (isinstance(value, type) and isinstance(item, type) and issubclass(item, type)):
                yield suffix, item

    return patch.object(Visitor, "_referents", referents)


@contextmanager
def _changed_buffer_contents(change: Callable[[Any], Any]) -> Iterator[None]:
    original = fingerprints.buffer_contents

    def buffer_contents(value: Any, with_data: bool = True) -> Any:
        return change(original(value, with_data))

    with (
        patch.object(object_walker, "buffer_contents", buffer_contents),
        patch.object(reference_checks, "buffer_contents", buffer_contents),
    ):
        yield


@FAULTS.add
def values_of_arrays_are_not_compared() -> AbstractContextManager[Any]:
    return _changed_buffer_contents(lambda contents: fingerprints.BufferContents(contents.metadata, b""))


@FAULTS.add
def shapes_are_not_compared() -> AbstractContextManager[Any]:
    original = object_graph.metadata_of
    return patch.object(object_graph, "metadata_of", lambda tensor: (*original(tensor)[:1], None, None, *original(tensor)[3:]))


@FAULTS.add
def requires_grad_is_not_compared() -> AbstractContextManager[Any]:
    original = object_graph.metadata_of
    return patch.object(object_graph, "metadata_of", lambda tensor: (*original(tensor)[:5], False, original(tensor)[-1]))


@FAULTS.add
def the_reference_checks_ignore_globals() -> AbstractContextManager[Any]:
    return patch.object(reference_checks.ReferenceChecks, "_are_namespaces_unchanged", lambda self: True)


@FAULTS.add
def the_reference_checks_ignore_containers() -> AbstractContextManager[Any]:
    return patch.object(reference_checks.ReferenceChecks, "_are_entries_unchanged", lambda self: True)


@FAULTS.add
def the_reference_checks_ignore_keys() -> AbstractContextManager[Any]:
    return patch.object(reference_checks, "_keys", lambda target: ())


@FAULTS.add
def the_reference_checks_ignore_versions_of_dicts() -> AbstractContextManager[Any]:
    return patch.object(reference_checks.DictCheck, "are_unchanged", lambda self: True)


@FAULTS.add
def the_reference_checks_ignore_classes() -> AbstractContextManager[Any]:
    return patch.object(reference_checks.Identities, "are_unchanged", lambda self: True)


@FAULTS.add
def the_reference_checks_compare_by_equality() -> AbstractContextManager[Any]:
    return patch.object(reference_checks, "_pointers", lambda values: list(map(repr, map(type, values))))
