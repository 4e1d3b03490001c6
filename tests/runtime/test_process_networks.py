"""Networks of XLA clients that span processes (runtime/process_networks.py). tests/cases/processes has tests with several processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dynaxla.errors import CollectiveFailed
from dynaxla.runtime import process_networks
from dynaxla.runtime.process_networks import Participants


class _Group:
    """Stands for a process group."""


def test_keys_in_the_store_differ_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second attempt to connect read the addresses that the failed one had left in the group's store."""
    attempts: list[int] = []
    network: Any = SimpleNamespace(cliques=frozenset([(0, 1)]), extra_cliques=frozenset())

    def connect(group: Any, ranks: Any, attempt: int, extra_cliques: Any) -> Any:
        attempts.append(attempt)
        if len(attempts) == 1:
            raise CollectiveFailed("no connection")
        return network

    monkeypatch.setattr(process_networks, "_connect", connect)
    collectives: Any = SimpleNamespace(agree_now=lambda: None)
    participants = Participants((0, 1), {"0": (0, 1)}, _Group(), collectives)
    with pytest.raises(CollectiveFailed):
        participants.connected()
    assert participants.connected() is participants.connected() is network
    assert attempts == [0, 1]
