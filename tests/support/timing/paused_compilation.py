"""A fixture that pauses the thread of background compilations until a test lets it go on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

import dynaxla
from dynaxla.engine import build as engine_build
from dynaxla.engine.unit import CompilationUnit, SpecialisedGraph
from dynaxla.observe import metrics
from support.processes.time_limits import PATIENCE


class Gate:
    """Holds the thread that compiles. Attributes: built (the sizes that it was given, in their order)."""

    def __init__(self) -> None:
        self.built: list[Any] = []
        self.started = threading.Event()
        self._open = threading.Event()

    def pass_through(self, specialised: SpecialisedGraph) -> None:
        assert specialised.function is not None
        self.built.append([spec.shape for spec in specialised.function.specs.values()])
        self.started.set()
        assert self._open.wait(PATIENCE)

    def open(self) -> None:
        """Have all compiled that waits."""
        self._open.set()
        dynaxla.synchronize()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made, build = Gate(), engine_build.build

    def held(unit: CompilationUnit, specialised: SpecialisedGraph) -> Any:
        if threading.current_thread().name == "dynaxla":
            made.pass_through(specialised)
        return build(unit, specialised)

    monkeypatch.setattr(engine_build, "build", held)
    metrics.reset()
    yield made
    made.open()
