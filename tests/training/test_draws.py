"""Tests of training/draws.py: a random op is identified by the generator's state before it, and by all arguments that decide its result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import Graph

from dynaxla.training.draws import Draws, _generator, depends_on_values, have_equal_values, is_random_draw, preserve_rng_state

aten = torch.ops.aten
CPU = torch.device("cpu")
X = torch.full((3,), 0.5)


def test_equal_state_and_arguments_give_equal_keys() -> None:
    draws, graph = Draws(), Graph()
    with preserve_rng_state():
        state = torch.get_rng_state()
        first = draws.next_key(aten.rand_like.default, (X,), {}, CPU)
        second = draws.next_key(aten.rand_like.default, (X,), {}, CPU)
        assert first != second
        draws.add(first, graph.placeholder("drawn"), X)
        torch.set_rng_state(state)
        again = draws.next_key(aten.rand_like.default, (X,), {}, CPU)
        assert draws.first(again) is not None
        assert draws.first(second) is None
        for other in (
            (aten.randn_like.default, (X,), {}),
            (aten.rand_like.default, (X[:2],), {}),
            (aten.rand_like.default, (X.double(),), {}),
        ):
            torch.set_rng_state(state)
            assert draws.first(draws.next_key(*other, CPU)) is None
        torch.set_rng_state(state)
        uniform = draws.next_key(aten.uniform_.default, (X, 0.0, 1.0), {}, CPU)
        torch.set_rng_state(state)
        assert draws.next_key(aten.uniform_.default, (X, 0.0, 2.0), {}, CPU) != uniform


def test_generator_is_restored_after_exception() -> None:
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="invalid shape"), preserve_rng_state():
        torch.rand(3).view(-3)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("op", "args", "expected"),
    [
        (aten.rand.default, ([3],), True),
        (aten.add.Tensor, (X, X), False),
        (aten._scaled_dot_product_flash_attention.default, (X, X, X, 0.5), True),
        (aten._scaled_dot_product_flash_attention.default, (X, X, X, 0.0), False),
        (aten._scaled_dot_product_flash_attention.default, (X, X, X), False),
    ],
    ids=str,
)
def test_is_random_draw(op: Any, args: Any, expected: bool) -> None:
    assert is_random_draw(op, args, {}) == expected


def test_depends_on_values() -> None:
    ops = [aten.bernoulli.default, aten.multinomial.default, aten.normal.Tensor_Tensor, aten.poisson.default, aten.bernoulli_.Tensor]
    assert all(map(depends_on_values, ops))
    ops = [aten.rand_like.default, aten.bernoulli.p, aten.bernoulli_.float, aten.normal_.default, aten.randint.low, aten.uniform_.default]
    assert not any(map(depends_on_values, ops))


def test_have_equal_values() -> None:
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")

    def double(source: Any, alpha: float = 1) -> Any:
        return graph.call_function(aten.add.Tensor, (source, source), {"alpha": alpha})

    assert have_equal_values(double(x), double(x), {}, [])
    assert have_equal_values(double(double(x)), double(graph.call_function(aten.detach.default, (double(x),))), {}, [])
    assert not have_equal_values(double(x), double(y), {}, [])
    assert have_equal_values(double(x), double(y), {y: x}, [])
    assert not have_equal_values(double(x), double(x, 2), {}, [])
    assert not have_equal_values(double(x), graph.call_function(aten.mul.Tensor, (x, x), {"alpha": 1}), {}, [])
    assert (have_equal_values([1, x], (1, x), {}, []), have_equal_values([1], [True], {}, [])) == (True, False)


def test_generator_of_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "default_generators", ("first", "second"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert [_generator(torch.device(name)) for name in ("cuda:0", "cuda:1", "cuda")] == ["first", "second", "second"]
    assert _generator(torch.device("cpu")) is torch.default_generator
