"""The overhead measurement: every way is timed, and the bare executable is the cheapest."""

from __future__ import annotations

from dynaxla.bench.overhead import measure


def test_every_way_of_calling_is_measured() -> None:
    result = measure(layers=3, rounds=3, calls=10)
    assert set(result.median) == {"eager", "inductor", "dynaxla", "capture", "program", "executable"}
    assert result.inputs == 7, "three weights, three biases, the activation"
    assert all(0 < result.minimum[name] <= result.median[name] for name in result.median)
    assert result.allowed == 30 + 0.6 * 7
