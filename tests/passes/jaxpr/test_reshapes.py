"""Reshapes of arrays in any order in memory are those of their values."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from dynaxla.passes.jaxpr.reshapes import Order, grouped_order, reshaped


@pytest.mark.parametrize(
    ("shape", "order", "wanted", "expected"),
    [
        # Tokens to a picture, and back.
        ((2, 8, 12), (0, 2, 1), (2, 8, 3, 4), ((2, 3, 4, 8), (0, 2, 3, 1))),
        ((2, 8, 3, 4), (0, 2, 3, 1), (2, 8, 12), ((2, 12, 8), (0, 2, 1))),
        # Neighbours in the value, not in memory: heads beside the batch, and two places the wrong way round.
        ((2, 8, 3, 4), (0, 2, 3, 1), (16, 3, 4), None),
        ((2, 8, 3, 4), (0, 3, 2, 1), (2, 8, 12), None),
        # Dimensions of one number lie anywhere.
        ((2, 1, 8, 12), (0, 3, 1, 2), (2, 8, 12), ((2, 12, 8), (0, 2, 1))),
        ((2, 8, 12), (0, 2, 1), (1, 2, 8, 1, 12), ((1, 2, 12, 8, 1), (0, 1, 4, 2, 3))),
        ((1, 1), (1, 0), (1,), ((1,), (0,))),
        ((0, 3), (1, 0), (3, 0), None),
    ],
)
def test_known(shape: Order, order: Order, wanted: Order, expected: tuple[Order, Order] | None) -> None:
    assert reshaped(shape, order, wanted) == expected


def test_joining() -> None:
    # Groups of channels the wrong way round; heads beside the batch, with places between them.
    assert grouped_order((2, 4, 8, 3, 5), (0, 3, 4, 2, 1), (2, 32, 3, 5)) == (0, 3, 4, 1, 2)
    assert grouped_order((2, 8, 12, 4), (0, 2, 1, 3), (16, 12, 4)) is None
    assert grouped_order((0, 6), (1, 0), (0, 1)) is None


def test_random_ones() -> None:
    dice = random.Random(0)

    def sizes(count: int) -> list[int]:
        found = []
        while count > 1:
            found.append(dice.choice([size for size in range(2, count + 1) if count % size == 0]))
            count //= found[-1]
        for _ in range(dice.choice([0, 0, 1, 2])):
            found.insert(dice.randrange(len(found) + 1), 1)
        return found

    kept = joined = 0
    for _ in range(2000):
        count = dice.choice([1, 6, 12, 24, 36, 64])
        shape, wanted = sizes(count), sizes(count)
        order = dice.sample(range(len(shape)), len(shape))
        value = np.arange(math.prod(shape)).reshape(shape)
        array = value.transpose(order)
        found = reshaped(shape, tuple(order), wanted)
        if found is not None:
            kept += 1
            np.testing.assert_array_equal(array.reshape(found[0]).transpose(np.argsort(found[1])), value.reshape(wanted))
        other = grouped_order(shape, tuple(order), wanted)
        assert found is None or other is not None
        if other is not None:
            joined += 1
            assert sorted(other) == sorted(order)
            joint = reshaped(shape, other, wanted)
            assert joint is not None
            np.testing.assert_array_equal(value.transpose(other).reshape(joint[0]).transpose(np.argsort(joint[1])), value.reshape(wanted))
    assert kept > 500
    assert joined > kept + 100
