"""A runner times calls alone, and errors come down to one line."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch

from dynaxla.bench.engines import BenchEngine
from dynaxla.bench.runner import LocalRunner, ModelSetup, empty_caches, first_line


def test_the_first_line_is_of_the_real_error() -> None:
    def backend(*_: Any) -> Any:
        raise ValueError("\nthe reason\nmore")

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert first_line(caught.value) == "ValueError: the reason"
    assert len(first_line(ValueError("x" * 1000))) == 200


def test_time_calls_each_input_once_and_holds_garbage_collection() -> None:
    seen: list[tuple[float, bool]] = []
    engine = BenchEngine("seeing", lambda model, _: lambda x: seen.append((float(x), gc.isenabled())))
    local = LocalRunner(engine, torch.nn.Identity(), (), ModelSetup())
    assert gc.isenabled()
    timing = local.time([(torch.tensor(1.0),), (torch.tensor(2.0),)])
    assert seen == [(1.0, False), (2.0, False)]
    assert gc.isenabled()
    assert timing.wall_seconds > 0
    local.close()
    with pytest.raises(RuntimeError, match="closed"):
        local.call((torch.tensor(1.0),))


def test_caches_are_empty_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    for before in (None, "/mine"):
        monkeypatch.delenv("DYNAXLA_CACHE", raising=False)
        if before is not None:
            monkeypatch.setenv("DYNAXLA_CACHE", before)
        with empty_caches():
            inside = os.environ["DYNAXLA_CACHE"]
            assert os.listdir(inside) == []
        assert os.environ.get("DYNAXLA_CACHE") == before
        assert not os.path.exists(inside)
