"""Random integers: uniform over their range, and bounds that raise as in eager mode. Also Poisson, binomial and similar draws."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from support.comparisons.compare import assert_equal
from support.comparisons.single_op import run_op

N = 200_000
# The largest deviation of chi-square, in standard deviations. For the numbers of classes here, chance exceeds it in less than 1 of 10**6
# cases.
MAX_DEVIATION = 6.0
DRAW = torch.ops.aten.randint.low
INTEGERS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]

RANGES = [
    (0, 3),
    (-7, 4),
    (0, 100_003),
    (0, 2**28 + 2**27),
    (0, 2**31 + 12_345),
    (0, 3 * 2**30),
    (0, 2**32 - 5),
    (-(2**31), 2**30 + 7),
    (0, 2**32),
    (0, 2**32 + 2**31),
    (-(2**40), 2**39),
    (-(2**62), 2**62 + 2**61),
    (-(2**63), 2**62),
    (-(2**63), 2**63 - 1),
    (2**63 - 10, 2**63 - 1),
]


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    torch.manual_seed(11)
    return torch.compile(function, backend="dynaxla", fullgraph=True)


def deviation(counts: Any, expected: Any) -> float:
    """The number of standard deviations by which the chi-square statistic exceeds its mean."""
    counts, expected = np.asarray(counts, np.float64), np.asarray(expected, np.float64)
    expected = expected * (counts.sum() / expected.sum())
    assert counts[expected == 0].sum() == 0
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = max(len(counts) - 1, 1)
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


def classes(drawn: torch.Tensor, low: int, high: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Counts numbers in equal parts of [low, high), and by their remainders. Returns pairs of counts and the sizes of the classes."""
    values = (drawn.numpy().astype(np.int64).view(np.uint64) - np.uint64(low % 2**64)).astype(np.uint64)
    span = high - low
    assert (values < np.uint64(span)).all()
    parts = min(span, 64)
    edges = [span * index // parts for index in range(1, parts + 1)]
    counts = np.bincount(np.searchsorted(np.array(edges, np.uint64), values, side="right"), minlength=parts)
    pairs = [(counts, np.diff(np.array([0, *edges], dtype=object)).astype(np.float64))]
    if span > 10_000:
        pairs.append((np.bincount((values % np.uint64(61)).astype(np.int64), minlength=61), np.ones(61)))
    return pairs


@pytest.mark.sample(usual=3)
@pytest.mark.parametrize(("low", "high"), RANGES)
def test_integers_are_uniform(low: int, high: int) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.randint(low, high, (N,)), torch.randint_like(x, low, high)

    for drawn in compiled(function)(torch.zeros(N, dtype=torch.int64)):
        for counts, sizes in classes(drawn, low, high):
            assert deviation(counts, sizes) < MAX_DEVIATION


@pytest.mark.parametrize("high", [5, 3 * 2**30, 2**62 + 2**61])
def test_bound_is_a_tensor(high: int) -> None:
    drawn = run_op(torch.ops.aten.randint_like.Tensor, torch.zeros(N, dtype=torch.int64), torch.tensor(high))
    for counts, sizes in classes(drawn, 0, high):
        assert deviation(counts, sizes) < MAX_DEVIATION


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS], ids=str)
def test_whole_range_of_a_dtype(dtype: torch.dtype) -> None:
    """random_ without bounds. With a lower bound alone no graph contains it: torch.fx cannot print `random.from`."""
    drawn = run_op(torch.ops.aten.random.default, torch.zeros(N, dtype=dtype))
    last = 1 if dtype == torch.bool else torch.iinfo(dtype).max if dtype in INTEGERS else round(2 / torch.finfo(dtype).eps)
    for counts, sizes in classes(drawn.long(), 0, last + 1):
        assert deviation(counts, sizes) < MAX_DEVIATION


BOUNDS = [(0, 1), (0, 2), (-1, 1), (0, 256), (0, 257), (-129, 0), (0, 2**31 + 1)]
BOUNDS += [(2047, 2051), (-70_000, 70_000), (0, 65_504), (2**24 - 3, 2**24 + 9), (-(2**63), 2**63 - 1)]


def error_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The first line of the error that the call raises; empty if it raises none."""
    try:
        function(*args, **kwargs)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


@pytest.mark.sample(usual=1)
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.filterwarnings("ignore:.*is out of bounds")
def test_bounds_match_eager_mode(dtype: torch.dtype) -> None:
    """Bounds are accepted and respected, or refused with the same message."""
    x = torch.zeros(2000, dtype=dtype)
    for low, high in BOUNDS:
        expected = error_of(lambda low, high: x.clone().random_(low, high), low, high)
        assert error_of(run_op, DRAW, low, high, [2000], dtype=dtype, device="cpu") == expected
        if expected:
            continue
        drawn = run_op(DRAW, low, high, [2000], dtype=dtype, device="cpu").double()
        assert low <= drawn.min()
        # In the dtype, the last number may round to the bound itself.
        assert drawn.max() <= torch.tensor(high - 1).to(dtype).double()
        if high - low <= 64:
            assert drawn.unique().tolist() == x.random_(low, high).double().unique().tolist()


def test_invalid_bounds_raise_in_compiled_calls() -> None:
    for low, high, dtype in [(0, 300, torch.uint8), (0, 2**62, torch.float16), (0, 2, torch.bool), (0, 2, torch.int8)]:
        call = functools.partial(torch.randint, low, high, (3,), dtype=dtype)
        assert error_of(compiled(call)) == error_of(call)


@pytest.mark.sample(usual=1)
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float16], ids=str)
def test_permutations_of_a_dtype(dtype: torch.dtype) -> None:
    for n in (0, 128, 129, 257, 2050):
        expected = error_of(torch.randperm, n, dtype=dtype)
        assert error_of(run_op, torch.ops.aten.randperm.default, n, dtype=dtype, device="cpu") == expected
        if not expected:
            drawn = run_op(torch.ops.aten.randperm.default, n, dtype=dtype, device="cpu")
            assert_equal(drawn.sort().values, torch.randperm(n, dtype=dtype).sort().values)


def test_permutations_are_uniform() -> None:
    function = compiled(lambda: torch.stack([torch.randperm(4) for _ in range(4)]))
    drawn = torch.cat([function() for _ in range(1500)])
    counts = (drawn * torch.tensor([64, 16, 4, 1])).sum(1).bincount()
    assert (counts > 0).sum() == 24
    assert deviation(counts[counts > 0].numpy(), np.ones(24)) < MAX_DEVIATION


@pytest.mark.sample(usual=1)
@pytest.mark.optimized
@pytest.mark.parametrize(("rate", "dtype"), [(0.01, torch.float32), (9.9, torch.float64), (10.0, torch.float32), (1e6, torch.float32)])
def test_poisson(rate: float, dtype: torch.dtype) -> None:
    n = 500_000
    drawn = compiled(torch.poisson)(torch.full((n,), rate, dtype=dtype)).long().numpy()
    rate = float(torch.tensor(rate, dtype=dtype))
    width = 5 * math.sqrt(rate)
    low, high = max(0, int(rate - width)), int(rate + width + 8)
    k = np.arange(low, high)
    logs = k * math.log(rate) - rate - np.array([math.lgamma(value + 1) for value in k])
    inside = (drawn >= low) & (drawn < high)
    assert (~inside).sum() < 20
    expected = np.exp(logs)
    counts = np.bincount(drawn[inside] - low, minlength=high - low)
    common = expected * n > 5
    assert deviation(counts[common], expected[common]) < MAX_DEVIATION


def test_poisson_with_extreme_rates() -> None:
    rates = torch.tensor([0.0, 1e-30, 1e18, 1e19, float("inf"), 60.0], dtype=torch.float64)
    mine, theirs = compiled(torch.poisson)(rates), torch.poisson(rates)
    assert_equal(mine[:2], theirs[:2])
    assert (mine[2] / theirs[2] - 1).abs() < 1e-6
    assert_equal(mine[3:5], theirs[3:5])


@pytest.mark.optimized
@pytest.mark.parametrize("p", [1e-6, 0.3, 0.5, 1 - 1e-6, 0.0, 1.0])
def test_bernoulli(p: float) -> None:
    """Also for probabilities near 0 and 1."""
    n = 20_000_000 if min(p, 1 - p) < 1e-3 else 2_000_000
    count = compiled(lambda x: x.bernoulli_(p))(torch.zeros(n, dtype=torch.bool)).sum().item()
    assert abs(count - n * p) <= MAX_DEVIATION * math.sqrt(n * p * (1 - p))


def test_geometric() -> None:
    small, large = compiled(lambda x: (x.clone().geometric_(0.3), x.clone().geometric_(1e-9)))(torch.zeros(N, dtype=torch.int64))
    counts = small.clamp(max=20).bincount(minlength=21)[1:].numpy()
    expected = [0.7**k * 0.3 for k in range(19)] + [0.7**19]
    assert deviation(counts, expected) < MAX_DEVIATION
    assert abs(large.double().mean() / 1e9 - 1) < 0.02
    assert deviation((large % 64).bincount(minlength=64).numpy(), np.ones(64)) < MAX_DEVIATION


@pytest.mark.optimized
def test_multinomial_with_many_choices() -> None:
    """The probabilities of the choices are close to the resolution of float32."""
    choices = 1 << 22
    drawn = compiled(lambda w: torch.multinomial(w, 2 * choices, replacement=True))(torch.arange(choices).remainder(7).float())
    assert deviation(drawn.bincount(minlength=choices).numpy(), np.arange(choices) % 7) < MAX_DEVIATION


def test_binomial_with_many_trials() -> None:
    drawn = compiled(torch.binomial)(torch.full((N,), 1e6), torch.full((N,), 0.9)).double()
    assert abs(drawn.mean() - 1e6 * float(torch.tensor(0.9))) < MAX_DEVIATION * math.sqrt(9e4 / N)
    assert abs(drawn.var() / 9e4 - 1) < 0.02


def test_seed_repeats_draws() -> None:
    def function() -> tuple[torch.Tensor, ...]:
        return torch.randint(0, 3 * 2**30, (50,)), torch.randint(-(2**63), 2**62, (50,)), torch.poisson(torch.full((50,), 30.0))

    call = compiled(function)
    torch.manual_seed(5)
    first, other = call(), call()
    torch.manual_seed(5)
    assert_equal(call(), first)
    assert not torch.equal(other[0], first[0])
