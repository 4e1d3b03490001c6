"""Runtime checks of values that eager mode refuses.

A compiled call raises an exception of the same type, and the same program accepts valid values. Indices whose range follows from the graph
are not checked at run time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from support import internals
from support.comparisons.compare import assert_equal, check
from support.releases import cases

X, V = torch.arange(12.0).reshape(3, 4), torch.arange(5.0)
ROW = X[:, :1]


def T(*values: float) -> torch.Tensor:
    return torch.tensor(values)


# A function, arguments that it accepts, and arguments that it refuses.
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], list[tuple[Any, ...]]]] = {
    "index": (lambda x, i, j: x[i, j], (X, T(-3, 2), T(3, -4)), [(X, T(3, 0), T(0, 0)), (X, T(0, 0), T(0, -5))]),
    "index_put": (lambda x, i: x.clone().index_put_((i,), x[0]), (X, T(-1)), [(X, T(3)), (X, T(-4))]),
    "index_select": (lambda x, i: x.index_select(0, i), (X, T(2)), [(X, T(3)), (X, T(-1))]),
    "index_select_columns": (lambda x, i: x.index_select(1, i), (X, T(3)), [(X, T(4)), (X, T(-1))]),
    "gather": (lambda x, i: x.gather(0, i), (V, T(4, 0)), [(V, T(5, 0)), (V, T(-1, 0))]),
    "take": (torch.take, (X, T(11, -12)), [(X, T(12)), (X, T(-13))]),
    "put": (lambda x, i, y: x.put(i, y), (X, T(11, -12), T(1.0, 2.0)), [(X, T(12), T(1.0)), (X, T(-13), T(1.0))]),
    "scatter": (lambda x, i: x.scatter(0, i, 1.0), (V, T(4)), [(V, T(5)), (V, T(-1))]),
    "scatter_add": (lambda x, i, y: x.scatter_add(1, i, y), (X, T(3)[:, None], ROW), [(X, T(4)[:, None], ROW), (X, T(-1)[:, None], ROW)]),
    "scatter_reduce": (lambda x, i: x.scatter_reduce(0, i, x, "amax"), (V, T(4)), [(V, T(5)), (V, T(-1))]),
    "index_add": (lambda x, i, y: x.index_add(0, i, y), (V, T(4), T(1.0)), [(V, T(5), T(1.0)), (V, T(-1), T(1.0))]),
    "index_add_columns": (lambda x, i, y: x.index_add(1, i, y), (X, T(3), ROW), [(X, T(4), ROW), (X, T(-1), ROW)]),
    "index_copy": (lambda x, i, y: x.index_copy(1, i, y), (X, T(3), ROW), [(X, T(4), ROW), (X, T(-1), ROW)]),
    "index_fill": (lambda x, i: x.index_fill(1, i, 7), (X, T(3, -4)), [(X, T(4)), (X, T(-5))]),
    "index_reduce": (lambda x, i, y: x.index_reduce(1, i, y, "prod"), (X, T(3), ROW), [(X, T(4), ROW), (X, T(-1), ROW)]),
    "embedding": (functional.embedding, (T(2, 0), X), [(T(3, 0), X), (T(-1, 0), X)]),
    "embedding_bag": (
        functional.embedding_bag,
        (T(2, 0), X, T(0, 1)),
        [(T(3, 0), X, T(0, 1)), (T(-1, 0), X, T(0, 1)), (T(2, 0), X, T(1, 1)), (T(2, 0), X, T(0, 3))],
    ),
    "nll_loss": (functional.nll_loss, (X, T(3, -100, 0)), [(X, T(4, 0, 0)), (X, T(0, -1, 0))]),
    "cross_entropy": (functional.cross_entropy, (X, T(3, -100, 0)), [(X, T(4, 0, 0)), (X, T(0, -1, 0))]),
    "max_unpool": (
        lambda x, i: functional.max_unpool2d(x[None, None, :1, :2], i.reshape(1, 1, 1, 2), 2),
        (X, T(5, 1)),
        [(X, T(8, 0)), (X, T(-1, 0))],
    ),
    "one_hot": (lambda x: functional.one_hot(x, 5), (T(4, 0),), [(T(5, 0),), (T(-1, 0),)]),
    "binary_cross_entropy": (
        functional.binary_cross_entropy,
        (T(0.5, 1.0), T(0.0, 0.5)),
        [(T(1.5, 0.0), T(0.0, 1.0)), (T(math.nan, 0.0), T(0.0, 1.0)), (T(0.5, 0.5), T(-0.5, 1.0))],
    ),
    "masked_scatter": (lambda x, y: x.masked_scatter(x > 8, y), (X, T(1.0, 2.0, 3.0)), [(X, T(1.0, 2.0))]),
    "masked_put": (lambda x, y: x.clone().index_put_((x > 8,), y), (X, T(1.0, 2.0, 3.0)), [(X, T(1.0, 2.0))]),
    "searchsorted": (lambda x, i: torch.searchsorted(x, x, sorter=i), (V, T(0, 1, 2, 3, 4)), [(V, T(0, 1, 2, 3, 5))]),
    "floor_divide": (torch.floor_divide, (T(7, -7), T(2, 3)), [(T(7, 7), T(2, 0))]),
    "div_trunc": (lambda x, y: torch.div(x, y, rounding_mode="trunc"), (T(7, -7), T(2, 3)), [(T(7, 7), T(2, 0))]),
    "remainder": (torch.remainder, (T(7, -7), T(2, 3)), [(T(7, 7), T(2, 0))]),
    "fmod": (torch.fmod, (T(7, -7), T(2, 3)), [(T(7, 7), T(2, 0))]),
}
DRAWS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], list[tuple[Any, ...]]]] = {
    "multinomial": (
        lambda x: torch.multinomial(x, 1),
        (T(0.0, 3.0),),
        [(T(0.5, -0.5),), (T(0.5, math.nan),), (T(0.5, math.inf),), (T(0.0, 0.0),)],
    ),
    "poisson": (torch.poisson, (T(0.0, 3.0),), [(T(-1.0, 3.0),), (T(math.nan, 1.0),)]),
    "bernoulli": (torch.bernoulli, (T(0.0, 1.0),), [(T(-0.1, 1.0),), (T(0.5, 1.1),), (T(math.nan, 1.0),)]),
    "normal": (torch.normal, (T(0.0), T(0.0)), [(T(0.0), T(-1.0)), (T(0.0), T(math.nan))]),
}


def check_refusals(function: Callable[..., Any], compiled: Callable[..., Any], good: tuple[Any, ...], bad: list[tuple[Any, ...]]) -> None:
    for args in bad:
        with pytest.raises((RuntimeError, IndexError)) as theirs:
            function(*args)
        with pytest.raises((RuntimeError, IndexError)) as mine:
            compiled(*args)
        assert mine.type is theirs.type
    compiled(*good)


@pytest.mark.sample(usual=5)
@pytest.mark.parametrize("case", cases(CASES, {"one_hot": "a graph of one_hot has no check"}))
def test_invalid_arguments_raise(case: str) -> None:
    function, good, bad = CASES[case]
    compiled = torch.compile(function, backend="dynaxla", fullgraph=True, dynamic=False)
    check_refusals(function, compiled, good, bad)
    assert_equal(compiled(*good), function(*good))


@pytest.mark.parametrize("case", DRAWS)
def test_invalid_parameters_of_draws_raise(case: str) -> None:
    function, good, bad = DRAWS[case]
    check_refusals(function, torch.compile(function, backend="dynaxla", fullgraph=True, dynamic=False), good, bad)


def test_draws_with_unusual_parameters_terminate() -> None:
    """For the parameters for which eager mode terminates: a binomial draw with nan trials does not."""

    def draw(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch._standard_gamma(x), torch._sample_dirichlet(x[:, None].expand(-1, 3)), torch.binomial(torch.full_like(x, 50), x)

    x = torch.tensor([math.nan, math.inf, -1.0, 0.0, 1e-40, 1e300], dtype=torch.float64)
    gammas, dirichlet, binomial = torch.compile(draw, backend="dynaxla")(x)
    expected = draw(x)
    assert_equal(binomial, expected[2])
    assert_equal(gammas.isfinite() & (gammas > 0), expected[0].isfinite() & (expected[0] > 0))
    assert ((dirichlet > 0) & (dirichlet <= 1)).all()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.bernoulli_(1.5),
        lambda x: x.uniform_(2, 1),
        lambda x: x.int() // 0,
        lambda x: x.int() % 0,
        lambda x: torch.multinomial(x.long(), 1),
        lambda x: torch.bucketize(x, x[None]),
        lambda x: x.masked_scatter(x.byte(), x),
    ],
)
def test_invalid_numbers_and_dtypes_raise(function: Callable[..., Any]) -> None:
    for call in (function, torch.compile(function, backend="dynaxla", fullgraph=True)):
        with pytest.raises(RuntimeError, match=r"expects|ZeroDivisionError|only supports|must be 1 dimension"):
            call(torch.ones(3))


def test_no_input_is_written_if_a_check_fails() -> None:
    @torch.compile(backend="dynaxla", fullgraph=True)
    def step(x: torch.Tensor, y: torch.Tensor, i: torch.Tensor) -> None:
        y.mul_(2)
        x.index_add_(0, i, y)

    x, y = torch.ones(3), torch.ones(2)
    with pytest.raises(IndexError):
        step(x, y, torch.tensor([0, 3]))
    assert x.tolist() == [1, 1, 1]
    assert y.tolist() == [1, 1]
    step(x, y, torch.tensor([0, 2]))
    assert x.tolist() == [3, 1, 3]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[torch.clamp(torch.arange(2), 2, -7)],  # with min > max, every result is max
        lambda x: x[torch.ops.aten.add.Scalar(torch.arange(2), 2, 2)],
        lambda x: x[torch.ops.aten.sub.Scalar(torch.arange(2), 2, 3)],
    ],
    ids=["clamp", "add", "sub"],
)
def test_indices_beyond_their_apparent_range_raise(function: Callable[..., Any]) -> None:
    check_refusals(function, torch.compile(function, backend="dynaxla", fullgraph=True), (torch.ones(8, 2),), [(X,)])


def test_empty_indices_are_not_checked() -> None:
    check(lambda x, i: (x[:0].gather(0, i[:0]), x[:, :0][i], x[:0][:, i], i // i[:0, None]), X, torch.tensor([9]), calls=1)


def test_indices_into_an_empty_tensor() -> None:
    """Each index into an empty tensor raises, unless a mask excludes the index."""
    functions: list[Callable[..., Any]] = [
        lambda x, i: x[i],
        lambda x, i: x.gather(0, i[:, None]),
        lambda x, i: functional.nll_loss(x.mT, i.expand(4)),
    ]
    for function in functions:
        compiled = torch.compile(function, backend="dynaxla", fullgraph=True)
        check_refusals(function, compiled, (X[:1], T(0)), [(X[:0], T(0))])
    mask, unread = torch.zeros(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64)
    check(
        lambda x, m, i: (torch.ops.aten._unsafe_masked_index(x, m, [i], 3.0), functional.nll_loss(x.expand(2, 0), i, ignore_index=0)),
        V[:0],
        mask,
        unread,
        calls=1,
    )


def test_masked_indices_are_clamped() -> None:
    mask, indices = torch.tensor([True, True, False, False]), T(-2, 4, 9, -9)
    check(
        lambda x, m, i: (
            torch.ops.aten._unsafe_masked_index(x, m, [i], 7.0),
            torch.ops.aten._unsafe_masked_index_put_accumulate(x, m, [i], x[:4]),
        ),
        V,
        mask,
        indices,
        calls=1,
    )


def count_checks(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], *args: Any) -> int:
    recorded = internals.checks(monkeypatch)
    torch.compile(function, backend="dynaxla", fullgraph=True, dynamic=False)(*args)
    return len(recorded)


@pytest.mark.parametrize(
    ("function", "checks"),
    [
        (lambda x: x[torch.arange(3)[:, None], torch.arange(4)], 0),
        (lambda x: x.gather(1, x.argmax(1, keepdim=True)), 0),
        (lambda x: x.gather(1, x.sort(dim=1)[1].flip(0)), 0),
        (lambda x: x.index_select(0, torch.randperm(3)), 0),
        (lambda x: x.take(torch.arange(-6, 6) * 2), 0),
        (lambda x: x.take(torch.arange(-6, 6) * 2 + 1), 0),
        (lambda x: x.take(torch.arange(-6, 6) * 2 + 2), 1),
        (lambda x: x[x.argmax(1).clamp(0, 2)], 0),
        (lambda x: x[x.argmax(1)], 1),
        (lambda x: x[x.argmax(1) % 3], 0),
        (lambda x: x[x.long()], 1),
    ],
)
def test_indices_with_a_known_range_are_not_checked(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], checks: int) -> None:
    assert count_checks(monkeypatch, function, X / 12) == checks
