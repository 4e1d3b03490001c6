"""The interpreter: it runs needed nodes and effects, compares each result with torch's metadata, and names op and line in errors."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from jax import Array
from torch.fx import Node

from dynaxla.errors import LoweringError, UnsupportedOp
from dynaxla.lowering import Context, Interpreter
from dynaxla.lowering.interpreter import draws_random, is_plain_python
from dynaxla.lowering.registry import Registry
from support.models.graph_builder import Builder

aten = torch.ops.aten
LINE = '  File "/home/me/model.py", line 41, in forward\n    return f(x)'


def registry(**lowerings: Any) -> Registry:
    found = Registry()
    for name, function in lowerings.items():
        found.register(getattr(aten, name).default, function)
    return found


def one_op(build: Builder, op: Any = aten.relu.default) -> Node:
    node = build.call(op, build.input(3))
    node.meta["stack_trace"] = LINE
    return node


def run(build: Builder, *outputs: Node, registered: Registry) -> list[Any]:
    interpreter = Interpreter(build.module(*outputs), "cpu", registered, kernels=False)
    with jax.enable_x64(True):
        return interpreter.run_all([jnp.ones(3, jnp.float32)], Context("cpu"))


def fails(x: Array) -> Array:
    raise KeyError("defect")


@pytest.mark.parametrize(
    ("lowering", "message"),
    [
        (lambda x: x[:2], r"returned float32\[2\], and PyTorch returns float32\[3\]"),
        (lambda x: x.astype(jnp.float64), r"returned float64\[3\], and PyTorch returns float32\[3\]"),
        (lambda x: 1.0, r"returned 1\.0, and PyTorch returns"),
        (fails, r"failed: KeyError: 'defect'"),
    ],
)
def test_wrong_lowering_raises(lowering: Any, message: str) -> None:
    build = Builder()
    with pytest.raises(LoweringError, match=message) as raised:
        run(build, one_op(build), registered=registry(relu=lowering))
    assert raised.value.op == "aten.relu.default"
    assert raised.value.inputs == "f32[3]"
    assert raised.value.where == "/home/me/model.py:41, in forward"


def test_each_of_several_results_is_compared() -> None:
    build = Builder()
    node = build.call(aten.aminmax.default, build.input(3), value=(build.fake(3), build.fake(3)))
    with pytest.raises(LoweringError, match=r"returned float32\[2\], and PyTorch returns float32\[3\]"):
        run(build, node, registered=registry(aminmax=lambda x, *, dim, keepdim: (x, x[:2])))


def test_ops_without_a_lowering_are_all_named() -> None:
    build = Builder()
    node = build.call(aten.tanh.default, build.call(aten.sin.default, one_op(build)))
    with pytest.raises(UnsupportedOp, match="no lowering for aten") as raised:
        run(build, node, registered=registry())
    assert "also without a lowering in this graph: aten.sin.default, aten.tanh.default" in raised.value.hint
    assert raised.value.where == "/home/me/model.py:41, in forward"


def test_refusal_by_a_lowering_names_inputs_and_line() -> None:
    def refuses(x: Array) -> Array:
        raise UnsupportedOp("relu of three numbers", op="aten.relu.default")

    build = Builder()
    with pytest.raises(UnsupportedOp, match="three numbers") as raised:
        run(build, one_op(build), registered=registry(relu=refuses))
    assert (raised.value.inputs, raised.value.where) == ("f32[3]", "/home/me/model.py:41, in forward")


def test_only_needed_nodes_and_effects_run() -> None:
    ran: list[str] = []

    def recording(name: str) -> Any:
        return lambda x: (ran.append(name), x)[1]

    build = Builder()
    x = build.input(3)
    unused = build.call(aten.sin.default, x)
    build.call(aten.cos.default, unused)
    checked = build.call(aten.tanh.default, x)
    assertion = build.call(aten._assert_async.default, checked)
    assertion.meta["val"] = None
    used = build.call(aten.relu.default, x)
    lowerings = {name: recording(name) for name in ("sin", "cos", "tanh", "relu")}
    module_registry = registry(**lowerings, _assert_async=lambda x: ran.append("assert"))
    run(build, used, registered=module_registry)
    assert ran == ["tanh", "assert", "relu"]


def test_numbers_and_constants() -> None:
    """Python's arithmetic on sizes runs unchanged, also with three operands. A tensor of the graph becomes an array, with conj and neg bits
    resolved."""
    build = Builder()
    x, size = build.input(3), build.graph.placeholder("size")
    size.meta["val"] = 4
    total = build.call(operator.add, size, 2, 3, value=9)
    scaled = build.call(aten.mul.Tensor, x, total)
    build.root.constant = torch.tensor([1 + 2j]).conj().imag
    constant = build.graph.get_attr("constant")
    constant.meta["val"] = build.fake(1)
    module = build.module(scaled, constant, total)
    interpreter = Interpreter(module, "cpu")
    with jax.enable_x64(True):
        product, value, number = interpreter.run_all((jnp.ones(3, jnp.float32), 4), Context("cpu"))
    assert (product.tolist(), value.tolist(), number) == ([9, 9, 9], [-2], 9)


def test_draws_random() -> None:
    build = Builder()
    x = build.input(3)
    attention = aten._scaled_dot_product_flash_attention.default
    nodes = [build.call(aten.rand_like.default, x), build.call(attention, x, x, x, 0.5), build.call(attention, x, x, x)]
    nodes[-1].kwargs = {"dropout_p": 0.5}
    assert all(map(draws_random, nodes))
    nodes = [build.call(aten.relu.default, x), build.call(attention, x, x, x), build.call(attention, x, x, x, 0.0), x]
    assert not any(map(draws_random, nodes))


def test_draws_random_in_nested_branches() -> None:
    for op, draws in ((aten.rand_like.default, True), (aten.relu.default, False)):
        inner: Any = op
        for _ in range(3):
            build = Builder()
            x = build.input(3)
            if inner is op:
                node = build.call(op, x)
            else:
                build.root.branch = inner
                branch = build.graph.get_attr("branch")
                condition = build.graph.placeholder("condition")
                condition.meta["val"] = build.fake().bool()
                node = build.call(torch.ops.higher_order.cond, condition, branch, branch, (x,), value=(build.fake(3),))
            inner = build.module(node)
        assert Interpreter(inner, "cpu").draws_random == draws


def test_is_plain_python() -> None:
    build = Builder()
    x = build.input(3)
    assert is_plain_python(build.call(operator.add, 1, 2, value=3))
    assert is_plain_python(build.call(operator.getitem, x, 0))
    assert not is_plain_python(build.call(operator.add, x, x))


def test_lowerings_are_looked_up_at_evaluation_if_all_are_known_to_exist() -> None:
    """The needed nodes and the effects are the same as with an early look-up."""
    build = Builder()
    x = build.input(3)
    checked = build.call(aten._assert_async.msg, x, "no")
    node = build.call(aten.relu.default, x)
    build.call(aten.neg.default, x)
    module, looked_up = build.module(node), []

    class RecordingRegistry(Registry):
        def find(self, op: Any, platform: str | None = None) -> Any:
            looked_up.append(op)
            return super().find(op, platform)

    def interpreter(is_lowered: bool) -> Interpreter:
        recording = RecordingRegistry()
        for op in (aten.relu.default, aten.neg.default, aten._assert_async.msg):
            recording.register(op, lambda *args: args[0] * 2)
        return Interpreter(module, "cpu", recording, is_lowered=is_lowered)

    lazy = interpreter(is_lowered=True)
    needed = lazy.needed([node])
    assert lazy.has_effects
    assert not looked_up
    early = interpreter(is_lowered=False)
    assert looked_up
    assert early.has_effects
    assert needed == early.needed([node]) == {x, checked, node}
    (value,) = lazy.run([jnp.full(3, -1.0)], Context("cpu"), [node])
    assert (value == -2).all()
