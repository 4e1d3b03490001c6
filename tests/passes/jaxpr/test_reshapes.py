"""Tests of passes/jaxpr/reshapes.py: reshapes of arrays in any memory order equal the reshapes of their values."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from dynaxla.passes.jaxpr.reshapes import Order, grouped_order, reshaped


@pytest.mark.parametrize(
    ("shape", "order", "wanted", "expected"),
    [
        # Tokens to an image, and back.
        ((2, 8, 12), (0, 2, 1), (2, 8, 3, 4), ((2, 3, 4, 8), (0, 2, 3, 1))),
        ((2, 8, 3, 4), (0, 2, 3, 1), (2, 8, 12), ((2, 12, 8), (0, 2, 1))),
        # Merged dimensions that are not next to each other in memory (heads and batch), or in reverse order (height and width).
        ((2, 8, 3, 4), (0, 2, 3, 1), (16, 3, 4), None),
        ((2, 8, 3, 4), (0, 3, 2, 1), (2, 8, 12), None),
        # Dimensions of size 1 can have any position.
        ((2, 1, 8, 12), (0, 3, 1, 2), (2, 8, 12), ((2, 12, 8), (0, 2, 1))),
        ((2, 8, 12), (0, 2, 1), (1, 2, 8, 1, 12), ((1, 2, 12, 8, 1), (0, 1, 4, 2, 3))),
        ((1, 1), (1, 0), (1,), ((1,), (0,))),
        ((0, 3), (1, 0), (3, 0), None),
    ],
)
def test_known_orders(shape: Order, order: Order, wanted: Order, expected: tuple[Order, Order] | None) -> None:
    assert reshaped(shape, order, wanted) == expected


def test_grouped_orders() -> None:
    # Groups of channels in reverse order; heads and batch with other dimensions between them.
    assert grouped_order((2, 4, 8, 3, 5), (0, 3, 4, 2, 1), (2, 32, 3, 5)) == (0, 3, 4, 1, 2)
    assert grouped_order((2, 8, 12, 4), (0, 2, 1, 3), (16, 12, 4)) is None
    assert grouped_order((0, 6), (1, 0), (0, 1)) is None


def test_random_reshapes() -> None:
    generator = random.Random(0)

    def sizes(count: int) -> list[int]:
        factors = []
        while count > 1:
            factors.append(generator.choice([size for size in range(2, count + 1) if count % size == 0]))
            count //= factors[-1]
        for _ in range(generator.choice([0, 0, 1, 2])):
            factors.insert(generator.randrange(len(factors) + 1), 1)
        return factors

    reshaped_count = grouped_count = 0
    for _ in range(2000):
        count = generator.choice([1, 6, 12, 24, 36, 64])
        shape, wanted = sizes(count), sizes(count)
        order = generator.sample(range(len(shape)), len(shape))
        value = np.arange(math.prod(shape)).reshape(shape)
        array = value.transpose(order)
        found = reshaped(shape, tuple(order), wanted)
        if found is not None:
            reshaped_count += 1
            np.testing.assert_array_equal(array.reshape(found[0]).transpose(np.argsort(found[1])), value.reshape(wanted))
        grouped = grouped_order(shape, tuple(order), wanted)
        assert found is None or grouped is not None
        if grouped is not None:
            grouped_count += 1
            assert sorted(grouped) == sorted(order)
            regrouped = reshaped(shape, grouped, wanted)
            assert regrouped is not None
            np.testing.assert_array_equal(
                value.transpose(grouped).reshape(regrouped[0]).transpose(np.argsort(regrouped[1])), value.reshape(wanted)
            )
    assert reshaped_count > 500
    assert grouped_count > reshaped_count + 100
