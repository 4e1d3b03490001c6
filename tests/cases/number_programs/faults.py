"""Faults that are planted in how steps replay numbers, each of which the random programs have to find."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from dynaxla.guards.snapshot import Snapshot
from dynaxla.training.replayed_steps import StepPrograms


@contextlib.contextmanager
def conditions_ignored() -> Iterator[None]:
    """The first program of a state serves all its calls."""
    add = StepPrograms._add_program
    with mock.patch.object(StepPrograms, "_add_program", lambda self, snapshot, _, program: add(self, snapshot, {}, program)):
        yield


@contextlib.contextmanager
def numbers_of_an_earlier_call() -> Iterator[None]:
    """A number is read once, and not in each call."""
    read, known = Snapshot.number_at, dict[Any, Any]()
    with mock.patch.object(Snapshot, "number_at", lambda self, place: known.setdefault(place, read(self, place))):
        yield


FAULTS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "conditions ignored": conditions_ignored,
    "numbers of an earlier call": numbers_of_an_earlier_call,
}
