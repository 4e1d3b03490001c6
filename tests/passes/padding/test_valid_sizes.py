"""Tests of passes/padding/valid_sizes.py: the valid elements of padded dimensions, through reshapes and broadcasts."""

from __future__ import annotations

import pytest
import sympy
from torch.utils._sympy.functions import FloorDiv, Min

from dynaxla.passes.padding.valid_sizes import (
    Extent,
    NoPaddingRule,
    _canonical,
    broadcast,
    common_extent,
    is_nondecreasing,
    merge_fixed_factors,
    quotient,
    reshaped,
)

B, S, N = (sympy.Symbol(name, positive=True, integer=True) for name in "bsn")
ROUNDED = {B, S}
ONE = Extent(())


def extents(*sizes: object) -> tuple[Extent, ...]:
    return tuple(map(Extent.of, sizes))


def test_reshape_merges_and_splits_at_whole_sizes() -> None:
    flat = reshaped(extents(B, S, 32), (B * S, 4, 8), ROUNDED)
    assert flat == (Extent((B, S)), Extent((4,)), Extent((8,)))
    assert reshaped(flat, (B, S, 2, 1, 16), ROUNDED) == extents(B, S, 2, 1, 16)
    assert reshaped(extents(B, 3, 2, S), (6 * B, S), ROUNDED) == (Extent((B, 6)), Extent((S,)))
    assert reshaped(extents(N, B), (N * B,), ROUNDED) == (Extent((N, B)),)


@pytest.mark.parametrize(
    ("before", "after"), [((B * S,), (B, S)), ((B, S), (S, B)), ((2 * S,), (2, S)), ((0, B), (B, 0)), ((S, 6), (4, S, 3))]
)
def test_reshape_that_splits_a_size_raises(before: tuple[object, ...], after: tuple[object, ...]) -> None:
    with pytest.raises(NoPaddingRule):
        reshaped(extents(*before), after, ROUNDED)


def test_error_has_factorization_of_input() -> None:
    for fails in (lambda: reshaped(extents(2 * S, 4), (2, S, 4), ROUNDED), lambda: common_extent([Extent((2, S)), Extent((2 * S,))])):
        with pytest.raises(NoPaddingRule) as raised:
            fails()
        assert raised.value.factorization == (2 * S, (2, S))


def test_common_extent_and_broadcast() -> None:
    assert common_extent([Extent((B, S)), ONE, Extent((B * S,), uniform=True)]) == Extent((B, S))
    assert common_extent([ONE, Extent((S,), uniform=True)]).uniform
    assert broadcast([extents(B, 1, 4), extents(S, 4)]) == extents(B, S, 4)
    with pytest.raises(NoPaddingRule, match="padded along different sizes"):
        common_extent([Extent((B, S)), Extent((B * S,))])


def test_is_nondecreasing() -> None:
    assert all(map(is_nondecreasing, [3, S, S + 1, S - 1, 2 * S * B, B * (S + 2), B * S**2]))
    assert not any(map(is_nondecreasing, [-S, B - S, 5 - S, S % 4, 2**S, (S - 3) ** 2]))


def test_quotients_and_merged_factors() -> None:
    assert (quotient(6 * S, 2 * S), quotient(S * B + B, B), quotient(S, B), quotient(5, 2)) == (3, S + 1, None, None)
    assert quotient(S + 1, 2) is None
    assert merge_fixed_factors([2, 3, S, 2, N, B], ROUNDED) == (6, S, 2 * N, B)


def test_floor_divisions() -> None:
    half, third = FloorDiv(S + 1, 2), FloorDiv(2 * S, 3)
    assert all(map(is_nondecreasing, [S - half, 2 * S - half + 3, S - third]))
    assert not any(map(is_nondecreasing, [S - 2 * half, half - S, S - FloorDiv(B, 2), S - FloorDiv(S * S, 2)]))
    assert _canonical(FloorDiv(S - 1, 2) + 1) == half
    assert _canonical(S + 1) == S + 1
    assert (_canonical(FloorDiv(S * S, S)), _canonical(Min(S, S - 1)), _canonical(Min(S, B))) == (S, S - 1, Min(S, B))
    assert _canonical(half + third + 1) == half + third + 1
