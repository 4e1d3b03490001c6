"""Faults in replayed steps: in where they find and put tensors, and in the numbers that they compute with.

Attributes:
    FAULTS: the faults that random steps with several sets of objects in turns have to find.
    NUMBER_FAULTS: the faults that random steps with Python numbers have to find.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from dynaxla.guards.snapshot import Snapshot
from dynaxla.training import replayed_steps
from dynaxla.training.replayed_steps import StepPrograms

from . import FaultList

FAULTS = FaultList()
NUMBER_FAULTS = FaultList()


@FAULTS.add
@contextlib.contextmanager
def place_of_the_recording() -> Iterator[None]:
    """A place is found once, and not from each call's own arguments."""
    find, known = Snapshot.container, dict[str, Any]()
    with mock.patch.object(Snapshot, "container", lambda self, path: known.setdefault(path, find(self, path))):
        yield


@FAULTS.add
@contextlib.contextmanager
def created_object_shared() -> Iterator[None]:
    """All calls put the same tensor in a place."""
    make, made = replayed_steps.build, dict[int, Any]()

    def once(template: Any, *args: Any) -> Any:
        return made.setdefault(id(template), (template, make(template, *args)))[1]

    with mock.patch.object(replayed_steps, "build", once):
        yield


@FAULTS.add
@contextlib.contextmanager
def creation_forgotten() -> Iterator[None]:
    """The last of the places of a call stays as it was."""
    put = Snapshot.put

    def put_all_but_one(self: Snapshot, values: Any) -> None:
        put(self, dict(list(values.items())[:-1]))

    with mock.patch.object(Snapshot, "put", put_all_but_one):
        yield


@NUMBER_FAULTS.add
@contextlib.contextmanager
def conditions_ignored() -> Iterator[None]:
    """The first program of a state serves all its calls."""
    add = StepPrograms._add_program
    with mock.patch.object(StepPrograms, "_add_program", lambda self, snapshot, _, program: add(self, snapshot, {}, program)):
        yield


@NUMBER_FAULTS.add
@contextlib.contextmanager
def numbers_of_an_earlier_call() -> Iterator[None]:
    """A number is read once, and not in each call."""
    read, known = Snapshot.number_at, dict[Any, Any]()
    with mock.patch.object(Snapshot, "number_at", lambda self, place: known.setdefault(place, read(self, place))):
        yield
