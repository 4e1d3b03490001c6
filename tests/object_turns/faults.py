"""Faults that are planted in how a replayed call finds its places, each of which random programs have to find."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from dynaxla.guards.snapshot import Snapshot
from dynaxla.training import replayed_steps


@contextlib.contextmanager
def place_of_the_recording() -> Iterator[None]:
    """A place is found once, and not from each call's own arguments."""
    find, known = Snapshot.container, dict[str, Any]()
    with mock.patch.object(Snapshot, "container", lambda self, path: known.setdefault(path, find(self, path))):
        yield


@contextlib.contextmanager
def created_object_shared() -> Iterator[None]:
    """All calls put the same tensor in a place."""
    make, made = replayed_steps.build, dict[int, Any]()

    def once(template: Any, *args: Any) -> Any:
        return made.setdefault(id(template), (template, make(template, *args)))[1]

    with mock.patch.object(replayed_steps, "build", once):
        yield


@contextlib.contextmanager
def creation_forgotten() -> Iterator[None]:
    """The last of the places of a call stays as it was."""
    put = Snapshot.put

    def put_all_but_one(self: Snapshot, values: Any) -> None:
        put(self, dict(list(values.items())[:-1]))

    with mock.patch.object(Snapshot, "put", put_all_but_one):
        yield


FAULTS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "place of the recording": place_of_the_recording,
    "created object shared": created_object_shared,
    "creation forgotten": creation_forgotten,
}
