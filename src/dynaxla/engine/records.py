"""Stored results of traces, so that later processes need neither trace nor lower the same graph.

A record holds the options for XLA, the facts that tracing yields besides the program (see `Results`), and a note that identifies the
program. Its key covers everything that the result of a trace depends on: the graph's text, the layouts of its inputs, the options, the
versions, the sources of dynaxla, the processor and its threads, and JAX's settings. Programs that call torch's kernels have no record,
because their callbacks are created by the trace.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import torch

from ..lowering import implementations
from ..lowering.registry import registry
from ..runtime import affinity, machine
from ..runtime.clients import is_own, threads_of
from ..runtime.store import StoreProtocol

Checks = Sequence[tuple[type[Exception], str]]


@dataclass(frozen=True)
class Record:
    """The stored result of one trace.

    Attributes:
        options: XLA's options, by name.
        checks: See `Facts`.
        numbers: See `Facts`.
        draws: See `Facts`.
        orders: The dimension orders of free results (see `Buffers.ordered`).
        note: Identifies the program (see `programs.note`).
    """

    options: Mapping[str, Any]
    checks: Checks
    numbers: tuple[Any, ...]
    draws: int
    orders: Mapping[int, tuple[int, ...]]
    note: bytes

    def put(self, store: StoreProtocol, key: str) -> None:
        """Stores the record under the key, if all of it can be serialised."""
        if not all(type(number) in (bool, int, type(None)) for number in self.numbers):
            return
        checks = [(error.__module__, error.__qualname__, message) for error, message in self.checks]
        if not all(_error(module, name) is error for (module, name, _), (error, _) in zip(checks, self.checks, strict=True)):
            return
        orders = [(index, list(order)) for index, order in self.orders.items()]
        told = {"options": dict(self.options), "checks": checks, "numbers": self.numbers, "draws": self.draws, "orders": orders}
        store.put(key, json.dumps(told).encode() + b"\n" + self.note)

    @staticmethod
    def find(store: StoreProtocol, key: str) -> Record | None:
        """Returns the record that a store has under a key; None if there is none."""
        data = store.get(key)
        if data is None:
            return None
        told, _, note = data.partition(b"\n")
        found = json.loads(told)
        checks = [(_error(module, name), message) for module, name, message in found["checks"]]
        orders = {index: tuple(order) for index, order in found["orders"]}
        return Record(found["options"], checks, tuple(found["numbers"]), found["draws"], orders, note)


def _error(module: str, name: str) -> Any:
    """Returns the exception class of this name from builtins or dynaxla.errors; None for other modules."""
    if module not in ("builtins", "dynaxla.errors"):
        return None
    return getattr(importlib.import_module(module), name, None)


def key_of(text: str | None, device: jax.Device, facts: Sequence[Any]) -> str | None:
    """Returns the key of a graph's record; None if no record may be kept.

    Args:
        text: The graph's text (see `fingerprint`); None if it has none.
        device: The device of the program.
        facts: Everything else that the result of the trace depends on, as plain data.
    """
    sources, lowerings, ways = machine.sources(), registry.external_lowerings(), implementations.external_implementations()
    if text is None or sources is None or lowerings is None or ways is None or not is_own(device):
        return None
    # The values in this thread: some settings can also be changed by a context manager.
    settings = [(name, repr(getattr(jax.config, name, value))) for name, value in sorted(jax.config.values.items())]
    surroundings = (
        machine.processor_facts(), torch.backends.cpu.get_cpu_capability(), threads_of(device), torch.get_num_threads(),
        affinity.processors(), os.environ.get("XLA_FLAGS", ""), settings,
    )  # fmt: skip
    told = text, tuple(facts), machine.versions(), sources, lowerings, ways, surroundings
    return hashlib.blake2b(repr(told).encode(), digest_size=32).hexdigest()
