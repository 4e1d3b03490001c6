"""Tests of votes, by which processes choose one engine. Most tests use several ballots on one store in one process."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch.distributed as dist

from dynaxla.autoselect import engine_agreement
from dynaxla.autoselect.contest import SingleProcessBallot
from support import internals
from support.processes.scripts import run_script

FIRST = {"dynaxla": 1.0, "inductor": 2.0, "eager": 4.0}
SECOND = {"dynaxla": 9.0, "inductor": 3.0, "eager": 6.0}


def pair(monkeypatch: pytest.MonkeyPatch, patience: float = 60.0) -> list[engine_agreement.GroupBallot]:
    internals.no_pause_between_votes(monkeypatch)
    store = dist.HashStore()
    return [engine_agreement.GroupBallot(store, rank, 2, "graph", patience) for rank in range(2)]


def test_vote_chooses_the_best_engine_for_the_slowest_process(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = pair(monkeypatch)
    assert first.decide((), FIRST) is None
    assert second.decide((), SECOND) == "inductor"
    assert first.decide((), FIRST) == "inductor"
    assert first.decide((8,), FIRST) is None  # Other sizes have their own vote.


def test_engine_that_is_wrong_in_one_process_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = pair(monkeypatch)
    assert first.decide((), FIRST) is None
    assert second.decide((), {"dynaxla": 3.0, "eager": 1.0}) == "dynaxla"
    third, fourth = pair(monkeypatch)
    assert third.decide((), {"dynaxla": 1.0}) is None
    assert fourth.decide((), {"inductor": 1.0}) == "eager"
    assert third.decide((), {"dynaxla": 1.0}) == "eager"


def test_vote_without_an_absent_process(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    first, second = pair(monkeypatch, patience=0.0)
    with caplog.at_level(logging.WARNING, "dynaxla"):
        assert first.decide((), FIRST) == "dynaxla"
        assert "processes [1] have not measured the graph" in caplog.text
        assert second.decide((), {"inductor": 1.0}) == "eager"
        assert "the engine dynaxla, which does not agree with eager mode in this process" in caplog.text


def test_vote_with_a_closed_store(caplog: pytest.LogCaptureFixture) -> None:
    class ClosedStore:
        def set(self, *_: object) -> None:
            raise dist.DistNetworkError("the connection is closed")

    with caplog.at_level(logging.WARNING, "dynaxla"):
        assert engine_agreement.GroupBallot(ClosedStore(), 0, 2, "graph").decide((), SECOND) == "inductor"
    assert "does not answer" in caplog.text


def test_single_process_decides_alone() -> None:
    assert type(engine_agreement.ballot_for("graph", ["dynaxla"])) is SingleProcessBallot
    assert SingleProcessBallot().decide((), SECOND) == "inductor"


SCRIPT = """
import sys
from torch.multiprocessing import start_processes

def run(rank, folder):
    import json, time, torch
    import torch.distributed as dist
    import dynaxla
    from dynaxla.observe.engine_decisions import verdicts
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    torch.set_num_threads(1)

    def late(module, _):
        def call(*args):
            time.sleep(0.01 * (rank == 0))
            return module(*args)
        return call

    torch._dynamo.register_backend(late, name="late_in_the_first_process")
    options = {"engines": ["dynaxla", "late_in_the_first_process"]}
    function = torch.compile(lambda x: (x @ x).relu(), backend="dynaxla_auto", options=options)
    x, calls = torch.randn(8, 8), 0
    until = time.monotonic() + 60
    while not verdicts() and time.monotonic() < until:
        torch.testing.assert_close(function(x), (x @ x).relu())
        calls += 1
    function(x)
    with open(f"{folder}/{rank}", "w") as file:
        json.dump([verdicts()[-1]["chosen"], calls], file)
    dist.barrier()
    dist.destroy_process_group()

start_processes(run, (sys.argv[1],), 2, start_method="fork")
"""


@pytest.mark.slow
@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="this torch has no gloo")
def test_two_processes_choose_the_same_engine(tmp_path: Path) -> None:
    """`pytest -m slow tests/autoselect`. An engine is slow in the first process and fast in the second."""
    run_script(SCRIPT, [str(tmp_path)])
    assert [json.loads((tmp_path / str(rank)).read_text())[0] for rank in range(2)] == ["dynaxla", "dynaxla"]
