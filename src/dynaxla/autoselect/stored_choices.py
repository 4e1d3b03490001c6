"""Stores the fastest engine of each graph for later processes, in a file for each graph.

A stored choice saves a later process the timing, but not the check: the engine is compared with eager mode before it serves calls. So a
wrong or outdated file makes calls slower, but not wrong.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from ..runtime import machine
from ..runtime.store import StoreProtocol
from .contest import Choices

Choice = tuple[str, Mapping[str, float]]


class StoredChoices(Choices):
    """The choices for one graph in a store.

    Args:
        store: the store.
        key: the key of the graph, as `key_of` returns it.
    """

    def __init__(self, store: StoreProtocol, key: str) -> None:
        self._store, self._key = store, key
        self.choices = _read(store.get(key))

    def find(self, sizes: Hashable) -> tuple[str, Mapping[str, float]] | None:
        return self.choices.get(repr(sizes))

    def put(self, sizes: Hashable, chosen: str, seconds: Mapping[str, float]) -> None:
        self._write({**_read(self._store.get(self._key)), repr(sizes): (chosen, dict(seconds))})

    def drop(self, sizes: Hashable) -> None:
        choices = _read(self._store.get(self._key))
        if choices.pop(repr(sizes), None) is not None:
            self._write(choices)

    def _write(self, choices: Mapping[str, Choice]) -> None:
        self.choices = dict(choices)
        self._store.put(self._key, json.dumps(choices).encode())


def _read(data: bytes | None) -> dict[str, Choice]:
    """Decodes the choices in a file; {} for a file of another format, e.g. of another release."""
    choices: dict[str, Choice] = {}
    try:
        for sizes, (chosen, seconds) in json.loads(data or b"{}").items():
            if isinstance(chosen, str):
                choices[sizes] = chosen, {name: float(value) for name, value in seconds.items()}
    except (ValueError, TypeError, AttributeError):
        return {}
    return choices


def key_of(module: GraphModule, example_inputs: Sequence[Any], device: torch.device, facts: Sequence[Any]) -> str:
    """Returns the key of a TorchDynamo graph with these inputs, on this machine with these versions of packages.

    Args:
        module: the graph.
        example_inputs: the inputs of the first call.
        device: the device that does most of the graph's work.
        facts: further facts on which a choice depends, such as the engines and the options.
    """
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    hardware = machine.processor_facts(), gpu, torch.get_num_threads()
    key = text_of(module, example_inputs), machine.versions(), machine.sources(), hardware, tuple(facts)
    return hashlib.blake2b(repr(key).encode(), digest_size=32).hexdigest()


def text_of(module: GraphModule, example_inputs: Sequence[Any]) -> str:
    """Returns a text with all properties of a TorchDynamo graph and its inputs that affect the speed of the graph."""
    placeholders = module.graph.find_nodes(op="placeholder")
    # For dynamic sizes, TorchDynamo's example values have symbols.
    examples = [node.meta.get("example_value", item) for node, item in zip(placeholders, example_inputs, strict=True)]
    inputs = [
        (tuple(map(str, item.shape)), tuple(map(str, item.stride())), str(item.dtype), str(item.device), item.requires_grad)
        if isinstance(item, torch.Tensor)
        else type(item).__name__
        for item in examples
    ]
    autocast = [(torch.is_autocast_enabled(kind), str(torch.get_autocast_dtype(kind))) for kind in ("cpu", "cuda")]
    return repr((str(module.graph), inputs, torch.is_grad_enabled(), autocast))
