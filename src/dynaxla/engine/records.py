"""Records: stored results of traces, so that later processes need neither trace nor lower the same graph.

A record has the options for XLA, the metadata of the trace (see `TraceMetadata`), and a reference to the program. The key of a record
covers
everything that the result of a trace depends on: the graph's text, the layouts of its inputs, the options, the versions, the sources of
dynaxla, the processor and its threads, and JAX's settings. Programs that call torch's kernels have no record, because the trace creates the
callbacks, which cannot be stored.
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
from ..runtime import machine
from ..runtime.clients import is_own, threads_of
from ..runtime.store import StoreProtocol

Checks = Sequence[tuple[type[Exception], str]]


@dataclass(frozen=True)
class Record:
    """The stored result of one trace.

    Attributes:
        options: XLA's options, by name.
        checks, numbers, draws: See `TraceMetadata`.
        orders: The memory orders of free results (see `Buffers.with_result_orders`).
        reference: A reference to the program (see `programs.reference_to`).
    """

    options: Mapping[str, Any]
    checks: Checks
    numbers: tuple[Any, ...]
    draws: int
    orders: Mapping[int, tuple[int, ...]]
    reference: bytes

    def put(self, store: StoreProtocol, key: str) -> None:
        """Stores the record under the key. It does nothing if the record has numbers or exception classes that cannot be serialised."""
        if not all(type(number) in (bool, int, type(None)) for number in self.numbers):
            return
        checks = [(error.__module__, error.__qualname__, message) for error, message in self.checks]
        if not all(_exception_class(module, name) is error for (module, name, _), (error, _) in zip(checks, self.checks, strict=True)):
            return
        orders = [(index, list(order)) for index, order in self.orders.items()]
        fields = {"options": dict(self.options), "checks": checks, "numbers": self.numbers, "draws": self.draws, "orders": orders}
        store.put(key, json.dumps(fields).encode() + b"\n" + self.reference)

    @staticmethod
    def find(store: StoreProtocol, key: str) -> Record | None:
        """Returns the record under a key of a store; None if there is none."""
        data = store.get(key)
        if data is None:
            return None
        line, _, reference = data.partition(b"\n")
        fields = json.loads(line)
        checks = [(_exception_class(module, name), message) for module, name, message in fields["checks"]]
        orders = {index: tuple(order) for index, order in fields["orders"]}
        return Record(fields["options"], checks, tuple(fields["numbers"]), fields["draws"], orders, reference)


def _exception_class(module: str, name: str) -> Any:
    """Returns the exception class with this name from builtins or dynaxla.errors; None for other modules."""
    if module not in ("builtins", "dynaxla.errors"):
        return None
    return getattr(importlib.import_module(module), name, None)


def key_of(text: str | None, device: jax.Device, key_parts: Sequence[Any]) -> str | None:
    """Returns the key of a graph's record; None if the graph must have no record.

    That is the case on devices of JAX's own clients, and if the graph, dynaxla's sources, or lowerings and implementations that a user has
    registered cannot be described by a text.

    Args:
        text: The graph's text (see `graph_text`); None if it has none.
        device: The device of the program.
        key_parts: All other values that the result of the trace depends on, as plain data.
    """
    sources, lowerings = machine.sources(), registry.external_lowerings()
    external_implementations = implementations.external_implementations()
    if text is None or sources is None or lowerings is None or external_implementations is None or not is_own(device):
        return None
    # `getattr` reads JAX's settings as this thread sees them: a context manager may change a setting for one thread only.
    settings = [(name, repr(getattr(jax.config, name, value))) for name, value in sorted(jax.config.values.items())]
    environment = (
        machine.processor_facts(), torch.backends.cpu.get_cpu_capability(), threads_of(device), torch.get_num_threads(),
        os.environ.get("XLA_FLAGS", ""), settings,
    )  # fmt: skip
    parts = text, tuple(key_parts), machine.versions(), sources, lowerings, external_implementations, environment
    return hashlib.blake2b(repr(parts).encode(), digest_size=32).hexdigest()
