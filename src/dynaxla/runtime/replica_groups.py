"""Reads the device groups of a program's collectives from the program's HLO text. A device is given by its number."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence

import numpy as np

# A regular expression for the names of HLO collectives.
KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast|ragged-all-to-all"
_CALL = re.compile(rf" (?:{KINDS})(?:-start)?\(.*$", re.MULTILINE)
# Groups as lists: "{{0,1},{2,3}}".
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,]*\}(?:,\{[\d,]*\})*)?\}")
# Groups as an iota: "[2,4]<=[4,2]T(1,0)" is the array 0..7 of shape (4, 2), transposed, and reshaped to 2 groups of 4.
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
# Groups as axes of a mesh: "mesh['a'=2,'b'=4] {'b'}".
_MESH = re.compile(
    r"replica_groups=mesh\[(?P<sizes>[^\]]*)\](?:, device_ids=\((?P<order>[\d,]+|\[[^()]*\](?:T\([\d,]*\))?)\))? \{(?P<axes>[^}]*)\}"
)


def all_groups_in(text: str) -> set[frozenset[int]]:
    """Returns the device groups of all collectives in a program's HLO text. Raises: ValueError for an unknown syntax.

    The group of all devices is missing if the text does not list it. collective-permute has no groups.
    """
    calls = [match[0] for match in _CALL.finditer(text)]
    return set().union(*(groups_in(call) or () for call in calls if "source_target_pairs=" not in call))


def groups_in(text: str) -> set[frozenset[int]] | None:
    """Returns the device groups in the text of one collective; None if the text lists no groups: all devices are then one group.

    Raises: ValueError for an unknown syntax.
    """
    if mesh := _MESH.search(text):
        return _groups_of_mesh(mesh["sizes"], mesh["order"] or "", mesh["axes"])
    if listed := _LISTED.search(text):
        return {frozenset(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", listed[1] or "")} or None
    if iota := _IOTA.search(text):
        shape, dims, order = map(_numbers, iota.groups())
        return {frozenset(row.tolist()) for row in _iota(dims, order).reshape(shape)}
    if "replica_groups=" in text:
        raise ValueError(text)
    return None


def _groups_of_mesh(sizes: str, order: str, axes: str) -> set[frozenset[int]]:
    """Returns the groups that axes of a mesh define.

    Args:
        sizes: The mesh, such as "'a'=2,'b'=4".
        order: The order of the devices: their numbers, or an iota such as "[4,2]T(1,0)"; "" for ascending order.
        axes: The axes over which a group extends, such as "'b'", or "'b':(1)2": the major part of b, which has size 2.
    """
    chosen = [(name, int(before or 1), int(size or 0)) for name, before, size in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", axes)]
    shape: list[int] = []
    is_in_group: list[bool] = []  # for each dimension of `shape`: True if a group extends over it
    for name, total in re.findall(r"'([^']*)'=(\d+)", sizes):
        parts = [(before, before * (size or int(total))) for axis, before, size in chosen if axis == name]
        cuts = sorted({1, int(total), *itertools.chain(*parts)})
        for begin, end in itertools.pairwise(cuts):
            shape.append(end // begin)
            is_in_group.append(any(first <= begin and end <= last for first, last in parts))
    if iota := re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]*)\))?", order):
        devices = _iota(*map(_numbers, iota.groups()))
    else:
        devices = np.array(_numbers(order)) if order else np.arange(math.prod(shape))
    dims = sorted(range(len(shape)), key=is_in_group.__getitem__)
    rows = devices.reshape(shape).transpose(dims).reshape(-1, math.prod(itertools.compress(shape, is_in_group)))
    return {frozenset(row.tolist()) for row in rows}


def _numbers(text: str | None) -> list[int]:
    return [int(part) for part in text.split(",")] if text else []


def _iota(dims: Sequence[int], order: Sequence[int]) -> np.ndarray:
    """Returns the numbers 0, 1, ... in an array of shape `dims`, transposed by `order` unless that is empty."""
    numbers = np.arange(math.prod(dims)).reshape(dims)
    return numbers.transpose(order) if order else numbers
