"""Tests of engine/eager_timings.py: the choice between the program and the kernels for the next call, given their times so far."""

from __future__ import annotations

from dynaxla.engine.eager_timings import EagerTimings


def test_both_take_turns_and_the_shortest_time_counts() -> None:
    timings, choices = EagerTimings(), []
    assert not timings.has_program
    for seconds in (9.0, 1.0, 2.0):
        for _ in range(2):
            choices.append(timings.prefers_kernels(0.5))
            if choices[-1]:
                timings.add_kernels(seconds, 0.5)
            else:
                timings.add_program(1.5 * seconds)
    assert choices == [False, True] * 3
    assert (timings.is_complete, timings.program_is_slower) == (True, False)
    # Kernels take 2 s for 1.0 of the elements, the program 1.5 s for all of them.
    assert [timings.prefers_kernels(fraction) for fraction in (0.7, 0.8, 1.0)] == [True, False, False]


def test_program_is_slower_even_without_padding() -> None:
    timings = EagerTimings()
    for _ in range(3):
        assert not timings.program_is_slower
        timings.add_program(2.0)
        timings.add_kernels(1.0, 0.8)
    assert timings.program_is_slower
    assert timings.prefers_kernels(1.0)
