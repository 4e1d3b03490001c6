"""Faults in replayed steps: in the containers from which they read tensors and to which they write them, and in Python numbers.

Attributes:
    FAULTS: the faults that random steps with several sets of objects in turns must find (cases/object_turns).
    NUMBER_FAULTS: the faults that random steps with Python numbers must find (cases/number_programs).
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
def stale_containers() -> Iterator[None]:
    """A container is looked up once, and not in each call's own arguments."""
    find, known = Snapshot.container, dict[str, Any]()
    with mock.patch.object(Snapshot, "container", lambda self, path: known.setdefault(path, find(self, path))):
        yield


@FAULTS.add
@contextlib.contextmanager
def created_tensors_are_shared() -> Iterator[None]:
    """All calls write the same tensor to a place."""
    build, built = replayed_steps.build, dict[int, Any]()

    def once(template: Any, *args: Any) -> Any:
        return built.setdefault(id(template), (template, build(template, *args)))[1]

    with mock.patch.object(replayed_steps, "build", once):
        yield


@FAULTS.add
@contextlib.contextmanager
def creation_is_skipped() -> Iterator[None]:
    """A call does not write its last place."""
    put = Snapshot.put

    def put_all_but_one(self: Snapshot, values: Any) -> None:
        put(self, dict(list(values.items())[:-1]))

    with mock.patch.object(Snapshot, "put", put_all_but_one):
        yield


@NUMBER_FAULTS.add
@contextlib.contextmanager
def conditions_are_ignored() -> Iterator[None]:
    """The first program for a state is used for all calls in that state."""
    add = StepPrograms._add_program
    with mock.patch.object(StepPrograms, "_add_program", lambda self, snapshot, _, program: add(self, snapshot, {}, program)):
        yield


@NUMBER_FAULTS.add
@contextlib.contextmanager
def numbers_are_stale() -> Iterator[None]:
    """A number is read once, and not in each call."""
    read, known = Snapshot.number_at, dict[Any, Any]()
    with mock.patch.object(Snapshot, "number_at", lambda self, place: known.setdefault(place, read(self, place))):
        yield
