"""Tests of events and their listeners."""

from __future__ import annotations

from dynaxla.observe import coverage, events, metrics


def test_listeners_receive_events_only_while_listening() -> None:
    received: list[object] = []
    assert not events.has_listeners()
    with events.listening(received.append), events.listening(lambda _: None), metrics.timed("test"):
        assert events.has_listeners()
        coverage.count_fallback("test.op", "a reason", "model.py:3")
    assert not events.has_listeners()
    coverage.count_fallback("test.op", "a reason", "")
    fallback, phase_end = received
    assert fallback == events.OpFellBack("test.op", "a reason", "model.py:3")
    assert isinstance(phase_end, events.PhaseEnded)
    assert phase_end.phase == "test"


def test_equal_lines_have_equal_numbers() -> None:
    with events.line_scope('File "a.py", line 1, in f'):
        number = events.lines().index('File "a.py", line 1, in f')
    with events.line_scope('File "a.py", line 1, in f'), events.line_scope(""):
        assert events.lines().index('File "a.py", line 1, in f') == number
