"""Tests of the local runner, and of the one-line form of errors."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch

from dynaxla.bench.engines import BenchEngine
from dynaxla.bench.runner import LocalRunner, ModelSetup, first_line, with_empty_caches


def test_first_line_of_a_wrapped_error_is_that_of_its_cause() -> None:
    def backend(*_: Any) -> Any:
        raise ValueError("\nthe reason\nmore")

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert first_line(caught.value) == "ValueError: the reason"
    assert len(first_line(ValueError("x" * 1000))) == 200


def test_time_calls_each_input_once_without_garbage_collection() -> None:
    calls: list[tuple[float, bool]] = []
    engine = BenchEngine("recording", lambda model, _: lambda x: calls.append((float(x), gc.isenabled())))
    runner = LocalRunner(engine, torch.nn.Identity(), (), ModelSetup())
    assert gc.isenabled()
    timing = runner.time([(torch.tensor(1.0),), (torch.tensor(2.0),)])
    assert calls == [(1.0, False), (2.0, False)]
    assert gc.isenabled()
    assert timing.wall_seconds > 0
    runner.close()
    with pytest.raises(RuntimeError, match="closed"):
        runner.call((torch.tensor(1.0),))


def test_empty_caches_sets_a_temporary_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    for before in (None, "/mine"):
        monkeypatch.delenv("DYNAXLA_CACHE", raising=False)
        if before is not None:
            monkeypatch.setenv("DYNAXLA_CACHE", before)
        with with_empty_caches():
            temporary = os.environ["DYNAXLA_CACHE"]
            assert os.listdir(temporary) == []
        assert os.environ.get("DYNAXLA_CACHE") == before
        assert not os.path.exists(temporary)
