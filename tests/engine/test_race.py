"""Which of two ways runs the next call, given their times so far."""

from __future__ import annotations

from dynaxla.engine.race import Race


def test_both_take_turns_and_the_least_time_counts() -> None:
    race, ways = Race(), []
    assert not race.has_begun
    for seconds in (9.0, 1.0, 2.0):
        for _ in range(2):
            ways.append(race.prefers_kernels(0.5))
            if ways[-1]:
                race.add_kernels(seconds, 0.5)
            else:
                race.add_program(1.5 * seconds)
    assert ways == [False, True] * 3
    assert (race.is_decided, race.is_lost) == (True, False)
    # Kernels take 2 s for 1.0 of the elements, the program 1.5 s for all of them.
    assert [race.prefers_kernels(share) for share in (0.7, 0.8, 1.0)] == [True, False, False]


def test_a_program_that_is_slower_without_padding_has_lost() -> None:
    race = Race()
    for _ in range(3):
        assert not race.is_lost
        race.add_program(2.0)
        race.add_kernels(1.0, 0.8)
    assert race.is_lost
    assert race.prefers_kernels(1.0)
