"""A draw is known by the generator's state before it, and by all that decides what it gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import Graph

from dynaxla.training.draws import Draws, _generator, depends_on_values, have_equal_values, is_random_draw, preserve_rng_state

aten = torch.ops.aten
CPU = torch.device("cpu")
X = torch.full((3,), 0.5)


def test_the_same_state_is_the_same_place() -> None:
    found, graph = Draws(), Graph()
    with preserve_rng_state():
        state = torch.get_rng_state()
        first = found.next_key(aten.rand_like.default, (X,), {}, CPU)
        second = found.next_key(aten.rand_like.default, (X,), {}, CPU)
        assert first != second
        found.add(first, graph.placeholder("drawn"), X)
        torch.set_rng_state(state)
        again = found.next_key(aten.rand_like.default, (X,), {}, CPU)
        assert found.first(again) is not None
        assert found.first(second) is None
        for other in (
            (aten.randn_like.default, (X,), {}),
            (aten.rand_like.default, (X[:2],), {}),
            (aten.rand_like.default, (X.double(),), {}),
        ):
            torch.set_rng_state(state)
            assert found.first(found.next_key(*other, CPU)) is None
        torch.set_rng_state(state)
        uniform = found.next_key(aten.uniform_.default, (X, 0.0, 1.0), {}, CPU)
        torch.set_rng_state(state)
        assert found.next_key(aten.uniform_.default, (X, 0.0, 2.0), {}, CPU) != uniform


def test_generators_are_as_before() -> None:
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="invalid shape"), preserve_rng_state():
        torch.rand(3).view(-3)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("op", "args", "wanted"),
    [
        (aten.rand.default, ([3],), True),
        (aten.add.Tensor, (X, X), False),
        (aten._scaled_dot_product_flash_attention.default, (X, X, X, 0.5), True),
        (aten._scaled_dot_product_flash_attention.default, (X, X, X, 0.0), False),
        (aten._scaled_dot_product_flash_attention.default, (X, X, X), False),
    ],
    ids=str,
)
def test_what_draws(op: Any, args: Any, wanted: bool) -> None:
    assert is_random_draw(op, args, {}) == wanted


def test_what_depends_on_values() -> None:
    ops = [aten.bernoulli.default, aten.multinomial.default, aten.normal.Tensor_Tensor, aten.poisson.default, aten.bernoulli_.Tensor]
    assert all(map(depends_on_values, ops))
    ops = [aten.rand_like.default, aten.bernoulli.p, aten.bernoulli_.float, aten.normal_.default, aten.randint.low, aten.uniform_.default]
    assert not any(map(depends_on_values, ops))


def test_nodes_that_are_computed_alike() -> None:
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")

    def double(source: Any, alpha: float = 1) -> Any:
        return graph.call_function(aten.add.Tensor, (source, source), {"alpha": alpha})

    assert have_equal_values(double(x), double(x), {})
    assert have_equal_values(double(double(x)), double(graph.call_function(aten.detach.default, (double(x),))), {})
    assert not have_equal_values(double(x), double(y), {})
    assert have_equal_values(double(x), double(y), {y: x})
    assert not have_equal_values(double(x), double(x, 2), {})
    assert not have_equal_values(double(x), graph.call_function(aten.mul.Tensor, (x, x), {"alpha": 1}), {})
    assert (have_equal_values([1, x], (1, x), {}), have_equal_values([1], [True], {})) == (True, False)


def test_the_generator_is_the_gpus_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "default_generators", ("first", "second"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert [_generator(torch.device(name)) for name in ("cuda:0", "cuda:1", "cuda")] == ["first", "second", "second"]
    assert _generator(torch.device("cpu")) is torch.default_generator
