"""Who listens is told, in turn, and nobody else."""

from __future__ import annotations

from dynaxla.observe import coverage, events, metrics


def test_listeners_hear_what_happens_while_they_listen() -> None:
    heard: list[object] = []
    assert not events.has_listeners()
    with events.listening(heard.append), events.listening(lambda _: None), metrics.timed("test"):
        assert events.has_listeners()
        coverage.count_fallback("test.op", "a reason", "model.py:3")
    assert not events.has_listeners()
    coverage.count_fallback("test.op", "a reason", "")
    fell, spent = heard
    assert fell == events.OpFellBack("test.op", "a reason", "model.py:3")
    assert isinstance(spent, events.PhaseEnded)
    assert spent.phase == "test"


def test_lines_have_numbers() -> None:
    with events.line_scope('File "a.py", line 1, in f'):
        number = events.lines().index('File "a.py", line 1, in f')
    with events.line_scope('File "a.py", line 1, in f'), events.line_scope(""):
        assert events.lines().index('File "a.py", line 1, in f') == number
