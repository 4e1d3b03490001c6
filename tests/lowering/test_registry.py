"""The registry of lowerings: lowerings of overloads, of names and of platforms, and loading on demand."""

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


def test_lowering_of_a_name_applies_to_every_overload() -> None:
    dynaxla.lowers("dynaxla_registry_test::several")(several)
    x = torch.ones(3)
    for call in (lambda x: ops.several.number(x, 2.0), lambda x: ops.several.tensor(x, x), lambda x: ops.several.number(x, 3.0)):
        torch._dynamo.reset()
        assert torch.equal(torch.compile(call, backend="dynaxla", options={"fallback": "error"})(x), x * 100)


def test_overload_with_another_signature_has_no_lowering() -> None:
    registry = Registry()
    registry.register_name("dynaxla_registry_test::several", lambda x, by: x)
    assert registry.find(ops.several.bare) is None
    assert registry.find(ops.several.default) is None
    assert registry.find(ops.several.number) is not None
    assert registry.ops() == {ops.several.number, ops.several.tensor}


def test_lowering_that_fits_no_overload_raises() -> None:
    registry = Registry()
    registry.register_name("dynaxla_registry_test::single", lambda x, by, too_many: x)
    for _ in range(2):
        with pytest.raises(TypeError, match="takes 3 positional arguments"):
            registry.find(ops.single.default)


def test_lowering_of_an_overload_precedes_that_of_its_name() -> None:
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


def test_find_changes_nothing() -> None:
    registry = Registry()
    registry.register_name("dynaxla_registry_test::several", several)
    registry.register_name("dynaxla_registry_test::of_tomorrow", several)
    count, known = len(registry), registry.ops()
    for op in (ops.several.default, ops.several.tensor, ops.single.default):
        registry.find(op)
    assert (len(registry), registry.ops()) == (count, known)


def test_variadic_lowering_takes_all_arguments() -> None:
    def lowering(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    registry = Registry()
    registry.register(torch.ops.aten.sum.dim_IntList, lowering)
    rule = registry.find(torch.ops.aten.sum.dim_IntList)
    assert rule is not None
    assert rule.bind(("x", [0]), {"dtype": torch.float32}) == (["x", [0], False], {"dtype": np.dtype("float32")})


def test_lowering_of_a_platform_precedes_the_general_one() -> None:
    registry, op = Registry(), torch.ops.aten.atan2.default
    registry.register(op, lambda x, y: x)
    registry.register(op, several, platforms=("tpu", "cuda"))
    registry.register_name("dynaxla_registry_test::several", lambda x, by: x)
    registry.register_name("dynaxla_registry_test::several", several, platforms=("cuda",))
    for overload in (op, ops.several.number):
        assert registry.find(overload, "cuda").function is several
        assert registry.find(overload, "cpu").function is not several
    with pytest.raises(ValueError, match=rf"two lowerings for cuda: at {__name__}:\d+ and at {__name__}:\d+"):
        registry.register(op, lambda x, y: x, platforms=("cuda",))
    assert registry.ops() == {op, ops.several.number, ops.several.tensor}


def test_arguments_that_a_lowering_lacks_must_have_their_defaults() -> None:
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


def test_arguments_for_placement_are_dropped() -> None:
    registry, op = Registry(), torch.ops.aten.full_like.default
    registry.register(op, lambda x, value, *, dtype: x)
    placement = {"layout": torch.strided, "device": torch.device("cpu"), "pin_memory": True, "memory_format": torch.channels_last}
    rule = registry.find(op)
    assert rule is not None
    assert rule.bind(("x", 7), {"dtype": torch.int8, **placement}) == (["x", 7], {"dtype": np.dtype("int8")})


def test_tables_and_promotion(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = internals.empty_registry(monkeypatch)
    aten = torch.ops.aten
    lower_table({aten.atan2.default: lax.atan2}, promote=Promotion.INT_TO_FLOAT)
    lower_table({aten.sin.default: jnp.sin})
    rule = registry.find(aten.atan2.default)
    assert rule is not None
    assert rule.location.startswith("jax."), "the location of the function, not of the wrapper that promotes its operands"
    assert (result := rule.function(jnp.zeros((2, 1), jnp.int32), jnp.ones(3, jnp.int32))).dtype == np.float32
    assert result.shape == (2, 3)
    assert registry.find(aten.sin.default).function is jnp.sin
    with pytest.raises(TypeError, match="promotion needs the op's schema"):
        dynaxla.lowers("dynaxla_registry_test::single", promote=Promotion.DEFAULT)(lambda x: x)


def unchanged(x: Any) -> Any:
    return x


def lazy_registry() -> tuple[Registry, list[str]]:
    """Returns a registry that loads one lowering on demand, and a list with an entry for each load."""
    loads: list[str] = []

    def load() -> None:
        loads.append("loaded")
        assert registry.find(ops.several.number) is None, "loading may look up lowerings"
        registry.register(ops.single.default, unchanged, by="dynaxla.lowering.ops.mine")

    registry = Registry(load)
    return registry, loads


@pytest.mark.parametrize(
    "access",
    [
        lambda registry: registry.find(ops.several.default),
        lambda registry: registry.ops(),
        len,
        lambda registry: registry.register(ops.several.number, several),
        lambda registry: registry.register_name("dynaxla_registry_test::several", several),
    ],
    ids=["find", "ops", "count", "register", "register_name"],
)
def test_own_lowerings_are_loaded_once_at_the_first_access(access: Any) -> None:
    registry, loads = lazy_registry()
    registry.register(ops.several.tensor, lambda x, by: x, by="dynaxla.lowering.ops.others")
    assert registry.external_lowerings() == []
    assert not loads
    access(registry)
    assert loads == ["loaded"]
    assert registry.find(ops.single.default) is not None
    assert loads == ["loaded"]


def test_second_lowering_for_an_op_not_yet_loaded_raises() -> None:
    registry, _ = lazy_registry()
    with pytest.raises(ValueError, match="two lowerings"):
        registry.register(ops.single.default, unchanged)


def test_failed_load_is_repeated() -> None:
    failing = [ImportError("interrupted")]

    def load() -> None:
        if failing:
            raise failing.pop()

    registry = Registry(load)
    with pytest.raises(ImportError):
        registry.fill()
    registry.fill()
    assert registry.find(ops.single.default) is None


def test_external_lowerings_do_not_depend_on_loading() -> None:
    """The key of a cached program stays the same when dynaxla's own lowerings are loaded, and changes when others are registered."""
    registry, _ = lazy_registry()
    before = registry.external_lowerings()
    registry.fill()
    assert registry.external_lowerings() == before == []
    registry.register(ops.several.number, lax.add)
    (lowering,) = registry.external_lowerings() or []
    assert lowering.startswith("dynaxla_registry_test.several.number None jax."), "the function is JAX's, but not the registration"
    registry.register(ops.several.tensor, lambda x, by: x)
    assert registry.external_lowerings() is None


def test_kept_alive_names_what_a_node_refers_to() -> None:
    registry, graph = Registry(), torch.fx.Graph()
    nodes = [graph.call_function(op, (graph.placeholder("x"),)) for op in (torch.ops.aten.sin.default, torch.ops.aten.cos.default)]
    registry.keep_alive(torch.ops.aten.sin.default, lambda node: str(node.args[0]))
    assert [registry.kept_alive(node) for node in nodes] == ["x", None]
