"""A fixture that pauses the thread of background compilations until a test opens the gate."""

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
    """Pauses the thread that compiles.

    Attributes:
        built: the shapes of the inputs of each compilation, in order.
        started: set when a compilation has started.
    """

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
        """Lets all waiting compilations run, and waits for them."""
        self._open.set()
        dynaxla.synchronize()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    compilation_gate, build = Gate(), engine_build.build

    def gated_build(unit: CompilationUnit, specialised: SpecialisedGraph) -> Any:
        if threading.current_thread().name == "dynaxla":
            compilation_gate.pass_through(specialised)
        return build(unit, specialised)

    monkeypatch.setattr(engine_build, "build", gated_build)
    metrics.reset()
    yield compilation_gate
    compilation_gate.open()
