"""Tests of the store of chosen engines, by graph. Invalid entries are ignored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dynaxla.autoselect import stored_choices
from dynaxla.autoselect.stored_choices import StoredChoices
from dynaxla.runtime.store import Store


def test_find_and_drop_choices_by_class_of_sizes(tmp_path: Path) -> None:
    store = Store(tmp_path / "engines")
    choices = StoredChoices(store, "graph")
    choices.put((16,), "inductor", {"inductor": 1.0, "eager": 2.0})
    StoredChoices(store, "graph").put((32, True), "eager", {})
    reloaded = StoredChoices(store, "graph")
    assert reloaded.find((16,)) == ("inductor", {"inductor": 1.0, "eager": 2.0})
    assert reloaded.find((32, True)) == ("eager", {})
    assert reloaded.find((64,)) is None
    reloaded.drop((16,))
    assert StoredChoices(store, "graph").find((16,)) is None
    assert StoredChoices(store, "other").find((32, True)) is None


INVALID_ENTRIES = [b"", b"nothing", b"[]", b'{"()": 3}', b'{"()": ["eager"]}', b'{"()": ["eager", {"a": "x"}]}', b'{"()": [1, {}]}']


@pytest.mark.parametrize("data", INVALID_ENTRIES)
def test_invalid_entry_is_ignored_and_replaced(tmp_path: Path, data: bytes) -> None:
    store = Store(tmp_path / "engines")
    store.put("graph", data)
    choices = StoredChoices(store, "graph")
    assert choices.find(()) is None
    choices.put((), "eager", {})
    assert StoredChoices(store, "graph").find(()) == ("eager", {})


def test_key_depends_on_graph_inputs_and_autocast() -> None:
    keys: list[str] = []

    def backend(module: Any, inputs: Any) -> Any:
        keys.append(stored_choices.key_of(module, inputs, torch.device("cpu"), ()))
        return module.forward

    def key(function: Any, *args: Any) -> str:
        torch._dynamo.reset()
        torch.compile(function, backend=backend)(*args)
        return keys.pop()

    x = torch.rand(3, 4)
    first = key(lambda x: x + 1, x)
    assert key(lambda x: x + 1, x) == first
    others = [key(lambda x: x + 2, x), key(lambda x: x + 1, x.t()), key(lambda x: x + 1, x.double())]
    with torch.autocast("cpu"):
        others.append(key(lambda x: x + 1, x))
    assert len({first, *others}) == 5
