"""Stored results of traces, so that later processes need neither trace nor lower the same graph.

A record holds the options for XLA, the metadata of the trace (see `TraceMetadata`), and a reference to the program. Its key covers
everything that the result of a trace depends on: the graph's text, the layouts of its inputs, the options, the versions, the sources of
dynaxla, the processor and its threads, and JAX's settings. Programs that call torch's kernels have no record, because their callbacks are
created by the trace.
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
        checks: See `TraceMetadata`.
        numbers: See `TraceMetadata`.
        draws: See `TraceMetadata`.
        orders: The dimension orders of free results (see `Buffers.with_result_orders`).
        reference: Refers to the program (see `programs.reference_to`).
    """

    options: Mapping[str, Any]
    checks: Checks
    numbers: tuple[Any, ...]
    draws: int
    orders: Mapping[int, tuple[int, ...]]
    reference: bytes

    def put(self, store: StoreProtocol, key: str) -> None:
        """Stores the record under the key, if all of it can be serialised."""
        if not all(type(number) in (bool, int, type(None)) for number in self.numbers):
            return
        checks = [(error.__module__, error.__qualname__, message) for error, message in self.checks]
        if not all(_error(module, name) is error for (module, name, _), (error, _) in zip(checks, self.checks, strict=True)):
            return
        orders = [(index, list(order)) for index, order in self.orders.items()]
        fields = {"options": dict(self.options), "checks": checks, "numbers": self.numbers, "draws": self.draws, "orders": orders}
        store.put(key, json.dumps(fields).encode() + b"\n" + self.reference)

    @staticmethod
    def find(store: StoreProtocol, key: str) -> Record | None:
        """Returns the record that a store has under a key; None if there is none."""
        data = store.get(key)
        if data is None:
            return None
        line, _, reference = data.partition(b"\n")
        fields = json.loads(line)
        checks = [(_error(module, name), message) for module, name, message in fields["checks"]]
        orders = {index: tuple(order) for index, order in fields["orders"]}
        return Record(fields["options"], checks, tuple(fields["numbers"]), fields["draws"], orders, reference)


def _error(module: str, name: str) -> Any:
    """Returns the exception class of this name from builtins or dynaxla.errors; None for other modules."""
    if module not in ("builtins", "dynaxla.errors"):
        return None
    return getattr(importlib.import_module(module), name, None)


def key_of(text: str | None, device: jax.Device, key_parts: Sequence[Any]) -> str | None:
    """Returns the key of a graph's record; None if the graph must have no record.

    Args:
        text: The graph's text (see `fingerprint`); None if it has none.
        device: The device of the program.
        key_parts: Everything else that the result of the trace depends on, as plain data.
    """
    sources, lowerings, ways = machine.sources(), registry.external_lowerings(), implementations.external_implementations()
    if text is None or sources is None or lowerings is None or ways is None or not is_own(device):
        return None
    # The values in this thread: some settings can also be changed by a context manager.
    settings = [(name, repr(getattr(jax.config, name, value))) for name, value in sorted(jax.config.values.items())]
    environment = (
        machine.processor_facts(), torch.backends.cpu.get_cpu_capability(), threads_of(device), torch.get_num_threads(),
        affinity.processors(), os.environ.get("XLA_FLAGS", ""), settings,
    )  # fmt: skip
    parts = text, tuple(key_parts), machine.versions(), sources, lowerings, ways, environment
    return hashlib.blake2b(repr(parts).encode(), digest_size=32).hexdigest()
