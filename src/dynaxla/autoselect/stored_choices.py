"""Stores the fastest engine of each graph for later processes, in a file for each graph.

A stored choice saves a later process the timing, not the check: the engine is compared with eager mode before it serves calls. So a wrong
or stale file costs only time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from ..runtime import affinity, machine
from ..runtime.store import StoreProtocol
from .contest import Kept

Choice = tuple[str, Mapping[str, float]]


class KeptChoices(Kept):
    """The choices in a store under a key (see `key_of`)."""

    def __init__(self, store: StoreProtocol, key: str) -> None:
        self._store, self._key = store, key
        self.found = _read(store.get(key))

    def find(self, sizes: Hashable) -> tuple[str, Mapping[str, float]] | None:
        return self.found.get(repr(sizes))

    def put(self, sizes: Hashable, chosen: str, seconds: Mapping[str, float]) -> None:
        self._write({**_read(self._store.get(self._key)), repr(sizes): (chosen, dict(seconds))})

    def drop(self, sizes: Hashable) -> None:
        found = _read(self._store.get(self._key))
        if found.pop(repr(sizes), None) is not None:
            self._write(found)

    def _write(self, found: Mapping[str, Choice]) -> None:
        self.found = dict(found)
        self._store.put(self._key, json.dumps(found).encode())


def _read(data: bytes | None) -> dict[str, Choice]:
    """Decodes the choices in a file. Empty for a file of another format, e.g. of another release."""
    found: dict[str, Choice] = {}
    try:
        for sizes, (chosen, seconds) in json.loads(data or b"{}").items():
            if isinstance(chosen, str):
                found[sizes] = chosen, {name: float(value) for name, value in seconds.items()}
    except (ValueError, TypeError, AttributeError):
        return {}
    return found


def key_of(module: GraphModule, example_inputs: Sequence[Any], device: torch.device, facts: Sequence[Any]) -> str:
    """Returns the key of a TorchDynamo graph with these inputs, on this machine with these versions. `facts` become part of it."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    place = machine.processor_facts(), name, torch.get_num_threads(), affinity.processors()
    told = text_of(module, example_inputs), machine.versions(), machine.sources(), place, tuple(facts)
    return hashlib.blake2b(repr(told).encode(), digest_size=32).hexdigest()


def text_of(module: GraphModule, example_inputs: Sequence[Any]) -> str:
    """Returns a text of everything in a TorchDynamo graph and its inputs that affects its speed."""
    placeholders = module.graph.find_nodes(op="placeholder")
    # For dynamic sizes, TorchDynamo's example values have symbols.
    known = [node.meta.get("example_value", item) for node, item in zip(placeholders, example_inputs, strict=True)]
    inputs = [
        (tuple(map(str, item.shape)), tuple(map(str, item.stride())), str(item.dtype), str(item.device), item.requires_grad)
        if isinstance(item, torch.Tensor)
        else type(item).__name__
        for item in known
    ]
    autocast = [(torch.is_autocast_enabled(kind), str(torch.get_autocast_dtype(kind))) for kind in ("cpu", "cuda")]
    return repr((str(module.graph), inputs, torch.is_grad_enabled(), autocast))
