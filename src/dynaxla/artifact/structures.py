"""JSON descriptions of nested tuples, lists and dicts of arrays.

A description is one of these dicts:

{"kind": "tuple" or "list", "items": [...]}       the items are descriptions
{"kind": "dict", "keys": [...], "items": [...]}   the items are descriptions
{"kind": "array"}
{"kind": "constant", "value": ...}                the value is an int, float, bool, string or None
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Structure = Mapping[str, Any]

ARRAY: Structure = {"kind": "array"}
CONSTANTS = (bool, int, float, str, type(None))


class StructureMismatch(Exception):
    """Raised for a value whose structure differs from its description. The message names the path."""


def constant(value: Any) -> Structure:
    return {"kind": "constant", "value": value}


def sequence(kind: str, items: Sequence[Structure]) -> Structure:
    """Returns the description of a sequence. `kind` is "tuple" or "list"."""
    return {"kind": kind, "items": list(items)}


def mapping(items: Mapping[Any, Structure]) -> Structure:
    return {"kind": "dict", "keys": list(items), "items": list(items.values())}


def flatten(structure: Structure, value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yields the arrays in a value, each with its path, in the order of the description. Tuples and lists may replace each other.

    Args:
        structure: the description of the value.
        value: nested tuples, lists and dicts of arrays.
        path: the path of the value itself, such as "args".

    Raises: StructureMismatch.
    """
    kind = structure["kind"]
    if kind == "array":
        yield path, value
    elif kind == "constant":
        # Texts, because NaN is not equal to itself, and -0.0 equals 0.0.
        if type(value) is not type(structure["value"]) or repr(value) != repr(structure["value"]):
            raise StructureMismatch(f"{path} is {value!r}, and was {structure['value']!r} at export: constants are part of the program")
    elif kind == "dict":
        if not isinstance(value, Mapping):
            raise StructureMismatch(f"{path} is a {type(value).__name__}, and was a dict at export")
        missing = [key for key in structure["keys"] if key not in value]
        extra = [key for key in value if key not in structure["keys"]]
        if missing or extra:
            differences = [f"has no {', '.join(map(repr, missing))}, which it had at export"] * bool(missing)
            differences += [f"has {', '.join(map(repr, extra))}, which it did not have at export"] * bool(extra)
            raise StructureMismatch(f"{path} {' and '.join(differences)}")
        for key, item in zip(structure["keys"], structure["items"], strict=True):
            yield from flatten(item, value[key], f"{path}[{key!r}]")
    else:
        if not isinstance(value, (tuple, list)):
            raise StructureMismatch(f"{path} is a {type(value).__name__}, and was a {kind} at export")
        if len(value) != len(structure["items"]):
            raise StructureMismatch(f"{path} has {len(value)} items, and had {len(structure['items'])} at export")
        for index, item in enumerate(structure["items"]):
            yield from flatten(item, value[index], f"{path}[{index}]")


def unflatten(structure: Structure, arrays: Iterator[Any]) -> Any:
    """Builds the value that a description describes, from its arrays in the order of the description."""
    kind = structure["kind"]
    if kind == "array":
        return next(arrays)
    if kind == "constant":
        return structure["value"]
    items = [unflatten(item, arrays) for item in structure["items"]]
    if kind == "dict":
        return dict(zip(structure["keys"], items, strict=True))
    return tuple(items) if kind == "tuple" else items


def count_arrays(structure: Structure) -> int:
    """Returns the number of arrays in a described value. Raises: KeyError, TypeError or ValueError for an invalid description."""
    kind = structure["kind"]
    if kind == "array":
        return 1
    if kind == "constant":
        if not isinstance(structure["value"], CONSTANTS):
            raise TypeError(f"{structure['value']!r} is not a constant")
        return 0
    if kind not in ("tuple", "list", "dict"):
        raise ValueError(f"{kind!r} is not a kind of structure")
    if kind == "dict" and len(structure["keys"]) != len(structure["items"]):
        raise ValueError("a dict needs as many keys as items")
    return sum(map(count_arrays, structure["items"]))
