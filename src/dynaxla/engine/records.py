"""What tracing a graph has told, kept for later processes: they need neither trace it nor lower it.

A record has the options that XLA gets, the facts that a trace tells besides the program (see `Results`), and a note of the program. Its key
has all that decides what a trace tells: the graph's text, how its inputs lie in memory, the options, the versions, the sources of dynaxla,
the processor and its threads, and the settings of JAX. Programs that call torch's kernels have no record: a trace makes these calls.
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

from ..lowering import forms, registry
from ..runtime import affinity, machine
from ..runtime.clients import is_own, threads_of
from ..runtime.store import Keeper

Checks = Sequence[tuple[type[Exception], str]]


@dataclass(frozen=True)
class Record:
    """Attributes: options (XLA's, by name); checks, numbers, draws (as of `Facts`); orders (of free results: see `Buffers.ordered`); note
    (of the program: see `programs.note`)."""

    options: Mapping[str, Any]
    checks: Checks
    numbers: tuple[Any, ...]
    draws: int
    orders: Mapping[int, tuple[int, ...]]
    note: bytes

    def put(self, store: Keeper, key: str) -> None:
        """Keep it, if it can be written down."""
        if not all(type(number) in (bool, int, type(None)) for number in self.numbers):
            return
        checks = [(error.__module__, error.__qualname__, message) for error, message in self.checks]
        if not all(_error(module, name) is error for (module, name, _), (error, _) in zip(checks, self.checks, strict=True)):
            return
        orders = [(index, list(order)) for index, order in self.orders.items()]
        told = {"options": dict(self.options), "checks": checks, "numbers": self.numbers, "draws": self.draws, "orders": orders}
        store.put(key, json.dumps(told).encode() + b"\n" + self.note)

    @staticmethod
    def find(store: Keeper, key: str) -> Record | None:
        """What a store has under a key."""
        data = store.get(key)
        if data is None:
            return None
        told, _, note = data.partition(b"\n")
        found = json.loads(told)
        checks = [(_error(module, name), message) for module, name, message in found["checks"]]
        orders = {index: tuple(order) for index, order in found["orders"]}
        return Record(found["options"], checks, tuple(found["numbers"]), found["draws"], orders, note)


def _error(module: str, name: str) -> Any:
    """An exception class by its name: one of Python's or of dynaxla's, and None for any other."""
    if module not in ("builtins", "dynaxla.errors"):
        return None
    return getattr(importlib.import_module(module), name, None)


def key_of(text: str | None, device: jax.Device, facts: Sequence[Any]) -> str | None:
    """The name of what is told by tracing a graph; None where it is not to be kept.

    text: the graph's (see `fingerprint`). facts: what the caller knows, as plain data.
    """
    sources, lowerings, ways = machine.sources(), registry.places(), forms.places()
    if text is None or sources is None or lowerings is None or ways is None or not is_own(device):
        return None
    # As this thread has them: some have a context manager, too.
    settings = [(name, repr(getattr(jax.config, name, value))) for name, value in sorted(jax.config.values.items())]
    surroundings = (
        machine.processor_facts(), torch.backends.cpu.get_cpu_capability(), threads_of(device), torch.get_num_threads(),
        affinity.processors(), os.environ.get("XLA_FLAGS", ""), settings,
    )  # fmt: skip
    told = text, tuple(facts), machine.versions(), sources, lowerings, ways, surroundings
    return hashlib.blake2b(repr(told).encode(), digest_size=32).hexdigest()
