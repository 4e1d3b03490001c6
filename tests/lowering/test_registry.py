"""Lowerings registered by name: every overload that they fit, and nothing changes by looking."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import lax

import dynaxla
from dynaxla.lowering.promotion import Promotion
from dynaxla.lowering.registry import Registry, lower_table
from support import internals

library = torch.library.Library("dynaxla_registry_test", "FRAGMENT")
for schema in (
    "several(Tensor x) -> Tensor",
    "several.number(Tensor x, float by) -> Tensor",
    "several.tensor(Tensor x, Tensor by) -> Tensor",
    "several.bare() -> Tensor",
    "single(Tensor x) -> Tensor",
):
    library.define(schema)
    library.impl(
        schema.partition("(")[0],
        lambda *args: args[0] * 2 if len(args) < 2 else args[0] + args[1],
        "CompositeExplicitAutograd",
    )
ops: Any = torch.ops.dynaxla_registry_test


def several(x: Any, by: Any = 7) -> Any:
    return x * 100


def test_every_overload_gets_the_lowering() -> None:
    dynaxla.lowers("dynaxla_registry_test::several")(several)
    x = torch.ones(3)
    for call in (lambda x: ops.several.number(x, 2.0), lambda x: ops.several.tensor(x, x), lambda x: ops.several.number(x, 3.0)):
        torch._dynamo.reset()
        assert torch.equal(torch.compile(call, backend="dynaxla", options={"fallback": "error"})(x), x * 100)


def test_an_overload_that_it_does_not_fit_has_no_lowering() -> None:
    registry = Registry()
    registry.register_name("dynaxla_registry_test::several", lambda x, by: x)
    assert registry.find(ops.several.bare) is None
    assert registry.find(ops.several.default) is None
    assert registry.find(ops.several.number) is not None
    assert registry.ops() == {ops.several.number, ops.several.tensor}


def test_one_that_fits_no_overload_is_refused() -> None:
    registry = Registry()
    registry.register_name("dynaxla_registry_test::single", lambda x, by, too_many: x)
    for _ in range(2):
        with pytest.raises(TypeError, match="takes 3 positional arguments"):
            registry.find(ops.single.default)


def test_an_overloads_own_lowering_goes_first_whichever_came_first() -> None:
    for own_first in (False, True):
        registry = Registry()
        if own_first:
            registry.register(ops.several.number, lambda x, by: x)
        registry.register_name("dynaxla_registry_test::several", several)
        if not own_first:
            assert registry.find(ops.several.number).function is several
            registry.register(ops.several.number, lambda x, by: x)
        assert registry.find(ops.several.number).function is not several
        assert registry.find(ops.several.tensor).function is several


def test_a_name_has_one_lowering_per_platform() -> None:
    registry = Registry()
    registry.register_name("dynaxla_registry_test::single", lambda x: x)
    registry.register_name("dynaxla_registry_test::single", several, platforms=("cuda",))
    assert registry.find(ops.single.default, "cpu").function is not several
    with pytest.raises(ValueError, match="two lowerings"):
        registry.register_name("dynaxla_registry_test::single", lambda x: x)


def test_looking_changes_nothing() -> None:
    registry = Registry()
    registry.register_name("dynaxla_registry_test::several", several)
    registry.register_name("dynaxla_registry_test::of_tomorrow", several)
    count, known = len(registry), registry.ops()
    for op in (ops.several.default, ops.several.tensor, ops.single.default):
        registry.find(op)
    assert (len(registry), registry.ops()) == (count, known)


def test_a_lowering_takes_whatever_arguments_there_are() -> None:
    def lowering(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    registry = Registry()
    registry.register(torch.ops.aten.sum.dim_IntList, lowering)
    rule = registry.find(torch.ops.aten.sum.dim_IntList)
    assert rule is not None
    assert rule.bind(("x", [0]), {"dtype": torch.float32}) == (["x", [0], False], {"dtype": np.dtype("float32")})


def test_a_platforms_own_lowering_goes_first() -> None:
    registry, op = Registry(), torch.ops.aten.atan2.default
    registry.register(op, lambda x, y: x)
    registry.register(op, several, platforms=("tpu", "cuda"))
    registry.register_name("dynaxla_registry_test::several", lambda x, by: x)
    registry.register_name("dynaxla_registry_test::several", several, platforms=("cuda",))
    for found in (op, ops.several.number):
        assert registry.find(found, "cuda").function is several
        assert registry.find(found, "cpu").function is not several
    with pytest.raises(ValueError, match=rf"two lowerings for cuda: at {__name__}:\d+ and at {__name__}:\d+"):
        registry.register(op, lambda x, y: x, platforms=("cuda",))
    assert registry.ops() == {op, ops.several.number, ops.several.tensor}


def test_what_a_lowering_leaves_out_keeps_its_default() -> None:
    registry, op = Registry(), torch.ops.aten.sum.dim_IntList
    registry.register(op, lambda x, dim: x)
    rule = registry.find(op)
    assert rule is not None
    assert rule.bind(("x", [0], False), {"dtype": None}) == (["x", [0]], {})
    for args, kwargs, message in (((True,), {}, "keepdim=False, not True"), ((), {"dtype": torch.int8}, "dtype=None, not dtype")):
        with pytest.raises(dynaxla.errors.UnsupportedOp, match=message):
            rule.bind(("x", [0], *args), kwargs)
    with pytest.raises(dynaxla.errors.UnsupportedOp, match=r"dtype=torch\.quint8: JAX has no such dtype"):
        rule.bind(("x", [0]), {"dtype": torch.quint8})
    with pytest.raises(TypeError, match="no keyword-only argument 'keepdim'"):
        registry.register(torch.ops.aten.sum.default, lambda x, *, keepdim: x)


def test_where_a_result_lies_need_not_be_known() -> None:
    registry, op = Registry(), torch.ops.aten.full_like.default
    registry.register(op, lambda x, value, *, dtype: x)
    places = {"layout": torch.strided, "device": torch.device("cpu"), "pin_memory": True, "memory_format": torch.channels_last}
    rule = registry.find(op)
    assert rule is not None
    assert rule.bind(("x", 7), {"dtype": torch.int8, **places}) == (["x", 7], {"dtype": np.dtype("int8")})


def test_tables_and_promotion(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = internals.empty_registry(monkeypatch)
    aten = torch.ops.aten
    lower_table({aten.atan2.default: lax.atan2}, promote=Promotion.INT_TO_FLOAT)
    lower_table({aten.sin.default: jnp.sin})
    rule = registry.find(aten.atan2.default)
    assert rule is not None
    assert rule.location.startswith("jax."), "the place of the function, not of what promotes its operands"
    assert (found := rule.function(jnp.zeros((2, 1), jnp.int32), jnp.ones(3, jnp.int32))).dtype == np.float32
    assert found.shape == (2, 3)
    assert registry.find(aten.sin.default).function is jnp.sin
    with pytest.raises(TypeError, match="promotion needs the op's schema"):
        dynaxla.lowers("dynaxla_registry_test::single", promote=Promotion.DEFAULT)(lambda x: x)


def unchanged(x: Any) -> Any:
    return x


def filled_later() -> tuple[Registry, list[str]]:
    """A registry that has one lowering to load, and what tells how often it did."""
    loads: list[str] = []

    def load() -> None:
        loads.append("loaded")
        assert registry.find(ops.several.number) is None, "what is loaded may look for lowerings"
        registry.register(ops.single.default, unchanged, by="dynaxla.lowering.ops.mine")

    registry = Registry(load)
    return registry, loads


@pytest.mark.parametrize(
    "look",
    [
        lambda registry: registry.find(ops.several.default),
        lambda registry: registry.ops(),
        len,
        lambda registry: registry.register(ops.several.number, several),
        lambda registry: registry.register_name("dynaxla_registry_test::several", several),
    ],
    ids=["find", "ops", "count", "register", "register_name"],
)
def test_own_lowerings_are_loaded_once_when_one_is_looked_for_or_others_come(look: Any) -> None:
    registry, loads = filled_later()
    registry.register(ops.several.tensor, lambda x, by: x, by="dynaxla.lowering.ops.others")
    assert registry.external_lowerings() == []
    assert not loads
    look(registry)
    look(Registry())
    assert registry.find(ops.single.default) is not None
    assert loads == ["loaded"]


def test_a_second_lowering_for_an_op_that_is_not_loaded_yet_is_refused() -> None:
    registry, _ = filled_later()
    with pytest.raises(ValueError, match="two lowerings"):
        registry.register(ops.single.default, unchanged)


def test_what_failed_to_load_is_loaded_again() -> None:
    failing = [ImportError("interrupted")]

    def load() -> None:
        if failing:
            raise failing.pop()

    registry = Registry(load)
    with pytest.raises(ImportError):
        registry.fill()
    registry.fill()
    assert registry.find(ops.single.default) is None


def test_places_are_those_of_others_lowerings_loaded_or_not() -> None:
    """A name of a kept program is the same before and after dynaxla's own are there, and another one as soon as others are."""
    registry, _ = filled_later()
    before = registry.external_lowerings()
    registry.fill()
    assert registry.external_lowerings() == before == []
    registry.register(ops.several.number, lax.add)
    (place,) = registry.external_lowerings() or []
    assert place.startswith("dynaxla_registry_test.several.number None jax."), "a function of JAX's, but for an op that others chose"
    registry.register(ops.several.tensor, lambda x, by: x)
    assert registry.external_lowerings() is None


def test_what_a_node_only_names_is_held() -> None:
    registry, graph = Registry(), torch.fx.Graph()
    nodes = [graph.call_function(op, (graph.placeholder("x"),)) for op in (torch.ops.aten.sin.default, torch.ops.aten.cos.default)]
    registry.keep_alive(torch.ops.aten.sin.default, lambda node: str(node.args[0]))
    assert [registry.kept_alive(node) for node in nodes] == ["x", None]
