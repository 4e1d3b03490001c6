"""Measures the implementations of an op on a problem, and stores the fastest for this process and later ones."""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np
from jax import Array, lax

from .. import forks
from ..errors import CompilationError
from ..lowering.implementations import Implementation, Implementations, Measurable, Operand
from ..observe import metrics
from ..runtime import machine, meshes, private, programs
from ..runtime.store import Store

# In a round each implementation is called once. No round begins after _MAX_SECONDS, but there are at least _MIN_ROUNDS and at most
# _MAX_ROUNDS.
_MAX_SECONDS = 0.3
_MIN_ROUNDS = 3
_MAX_ROUNDS = 50
# The expected implementation is the one that is chosen without measurements. Another implementation is chosen only if it takes at most this
# fraction of the expected one's time: a smaller gain is noise, or does not matter next to the rest of the program.
_WORTHWHILE = 0.95


@dataclass(frozen=True)
class Measurement:
    """The measurements for one problem.

    Attributes:
        op: the op's name.
        problem: the problem's shapes and arguments, as readable text.
        machine: the name of the machine.
        seconds: the median seconds of a call, by implementation; None for an implementation that XLA rejected.
        expected: the implementation that would be chosen without measuring.
        chosen: the implementation to use.
    """

    op: str
    problem: str
    machine: str
    seconds: Mapping[str, float | None]
    expected: str
    chosen: str

    def encode(self) -> bytes:
        """Encodes the measurement for a file."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decode(data: bytes) -> Measurement | None:
        """Decodes a measurement. Returns None for data of another format, e.g. of another release."""
        try:
            return Measurement(**json.loads(data))
        except (ValueError, TypeError):
            return None


_measurements: dict[str, Measurement] = {}
_lock = forks.lock()


class Tuner:
    """Chooses implementations by measurement on a device.

    Args:
        device: the device to measure on.
        forced: by op, the name of the implementation that the user requires. It is used for every problem that it supports.
        options: XLA's options.
        store: the store with the measurements of earlier processes, or None.
        keep_heap: the argument keep_heap of `programs.compile_lowered`, as for the programs that will use the implementations.
    """

    def __init__(
        self, device: jax.Device, forced: Mapping[str, str], options: Mapping[str, Any], store: Store | None, keep_heap: bool = True
    ) -> None:
        self.device = device
        self.forced = forced
        self.options = options
        self.store = store
        self.keep_heap = keep_heap
        self.machine = machine.machine_name(device)

    def choose(self, implementations: Implementations[Any], problem: Any) -> Implementation[Any]:
        """Returns the fastest implementation; the expected one if the problem cannot be measured, or too little is saved (`_WORTHWHILE`).

        Raises: CompilationError if XLA rejects all implementations.
        """
        available = implementations.available(problem, self.forced)
        if len(available) == 1:
            return available[0]
        if not isinstance(problem, Measurable):
            return implementations.choose(problem, self.forced)
        with _lock:
            return implementations.by_name[self._measurement(implementations, problem, available).chosen]

    def _measurement(self, implementations: Implementations[Any], problem: Any, available: Sequence[Implementation[Any]]) -> Measurement:
        names = [implementation.name for implementation in available]
        facts = (implementations.op, repr(problem), names, self.machine, machine.versions(), sorted(self.options.items()))
        key = hashlib.blake2b(repr(facts).encode(), digest_size=32).hexdigest()
        found = _measurements.get(key)
        if found is None and self.store is not None and (data := self.store.get(key)) is not None:
            found = Measurement.decode(data)
        if found is None or found.chosen not in names:
            with metrics.timed("tune"):
                seconds = self._time(problem, available)
            expected = implementations.choose(problem, self.forced).name
            found = Measurement(implementations.op, str(problem), self.machine, seconds, expected, _fastest(seconds, expected))
            if self.store is not None:
                self.store.put(key, found.encode())
        _measurements[key] = found
        return found

    def _time(self, problem: Measurable, available: Sequence[Implementation[Any]]) -> dict[str, float | None]:
        """Returns the median seconds per call of each implementation. The implementations are called in turn."""
        arrays = [self._random(operand) for operand in problem.operands]
        calls: dict[str, Callable[[], object]] = {}
        refusals: dict[str, Exception] = {}
        for implementation in available:
            try:
                calls[implementation.name] = self._compiled(implementation, problem, arrays)
            except jax.errors.JaxRuntimeError as error:
                refusals[implementation.name] = error
        if not calls:
            raise CompilationError(
                f"XLA could not compile any implementation of {problem}: {refusals}",
                hint="use options={'tune': False}, which compiles only the expected implementation",
            )
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for call in calls.values():
            call()
        start = time.perf_counter()
        for number in range(_MAX_ROUNDS):
            if number >= _MIN_ROUNDS and time.perf_counter() - start > _MAX_SECONDS:
                break
            for name, call in calls.items():
                before = time.perf_counter()
                call()
                samples[name].append(time.perf_counter() - before)
        names = [implementation.name for implementation in available]
        return {name: statistics.median(samples[name]) if name in samples else None for name in names}

    def _random(self, operand: Operand) -> Array:
        """Returns an array of normally distributed numbers for an operand, with its dims in the operand's memory order."""
        generator = np.random.default_rng(0)
        shape = operand.shape if operand.order is None else tuple(operand.shape[dim] for dim in operand.order)
        return meshes.device_put(generator.standard_normal(shape, np.float32).astype(operand.dtype), self.device)

    def _compiled(self, implementation: Implementation[Any], problem: Measurable, arrays: Sequence[Array]) -> Callable[[], object]:
        orders = [operand.order for operand in problem.operands]

        def program(*packed: Array) -> Array:
            operands = [
                array if order is None else lax.transpose(array, np.argsort(order)) for array, order in zip(packed, orders, strict=True)
            ]
            result = implementation.run(problem, *operands)
            return result if problem.result_order is None else lax.transpose(result, problem.result_order)

        avals = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
        with jax.enable_x64(True), jax.default_device(self.device):
            lowered = private.lower(jax.jit(program, keep_unused=True).trace(*avals))
        compiled = programs.compile_lowered(lowered, self.device, self.options, keep_heap=self.keep_heap)
        return lambda: jax.block_until_ready(compiled.call(arrays))


def _fastest(seconds: Mapping[str, float | None], expected: str) -> str:
    """Returns the fastest implementation, or the expected one if the fastest saves too little time."""
    measured = {name: value for name, value in seconds.items() if value is not None}
    best = min(measured, key=measured.__getitem__)
    return expected if expected in measured and measured[best] > _WORTHWHILE * measured[expected] else best


def measurements() -> list[Measurement]:
    """Returns the measurements that this process has made or loaded."""
    with _lock:
        return list(_measurements.values())


def stored_measurements(store: Store) -> list[Measurement]:
    """Returns the measurements in a store."""
    found = (Measurement.decode(store.get(key) or b"") for key in store)
    return [measurement for measurement in found if measurement is not None]
