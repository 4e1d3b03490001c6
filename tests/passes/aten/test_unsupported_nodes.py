"""Tests of passes/aten/unsupported_nodes.py: nodes that run between programs, and that the fallback refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives

import dynaxla
from dynaxla.capture.graph import AtenGraph
from dynaxla.config import Options
from dynaxla.engine.scheduler import engine_for
from dynaxla.lowering import Context
from dynaxla.lowering.fallback import call_kernel
from dynaxla.observe import coverage
from dynaxla.passes.aten.unsupported_nodes import ASYNCHRONOUS, DATA_DEPENDENT, NOT_DENSE, WRITES, unsupported_nodes
from support.models.graph_builder import Builder, begin_sum

aten = torch.ops.aten


def test_asynchronous_op_and_its_wait() -> None:
    build = Builder()
    started = build.call(begin_sum._opoverload, build.input(3))
    waited = build.call(torch.ops._c10d_functional.wait_tensor.default, started)
    plain = build.call(begin_sum._opoverload, waited)
    assert unsupported_nodes(build.module(plain)) == {started: ASYNCHRONOUS, waited: ASYNCHRONOUS}


def test_other_reasons() -> None:
    build = Builder()
    x, y = build.input(3), build.input(3)
    number = build.call(aten._local_scalar_dense.default, x, value=5)  # a symbol with a known value
    sparse = build.call(aten._to_sparse.default, y, value=torch.eye(2).to_sparse())
    written = build.call(aten.copy_.default, x, y)
    assert unsupported_nodes(build.module(number, sparse)) == {number: DATA_DEPENDENT, sparse: NOT_DENSE, written: WRITES}


@pytest.mark.parametrize("op", [torch.ops._c10d_functional.wait_tensor.default, aten.add_.Tensor], ids=str)
def test_fallback_refuses(op: Any) -> None:
    build = Builder()
    ctx = Context(
        "cpu",
    )
    ctx.node = build.call(op, build.input(3), build.input(3))
    with pytest.raises(dynaxla.errors.UnsupportedOp, match="in the background or writes"):
        call_kernel(ctx, (), {})


def test_fallback_error_refuses_collective() -> None:
    build = Builder()
    waited = build.call(torch.ops._c10d_functional.wait_tensor.default, build.input(3))
    with pytest.raises(dynaxla.errors.UnsupportedOp, match="collective"):
        engine_for(Options(fallback="error")).runner(AtenGraph("refused", build.module(waited)))


def test_write_at_the_end_is_not_a_fallback() -> None:
    coverage.reset()
    build = Builder()
    x = build.input(3)
    doubled = build.call(aten.mul.Tensor, x, 2)
    build.call(aten.copy_.default, x, doubled)
    program = engine_for(Options(fallback="error")).runner(AtenGraph("writes", build.module(doubled)))
    for _ in range(2):
        given = torch.ones(3)
        version = given._version
        (result,) = program([given])
        assert torch.equal(given, torch.full((3,), 2.0))
        assert torch.equal(result, given)
        assert given._version > version, "autograd must see the write"
    assert not any(counts["fallback"] for counts in coverage.snapshot().values())


def test_nothing_is_written_when_the_program_fails() -> None:
    build = Builder()
    x = build.input(3)
    doubled = build.call(aten.mul.Tensor, x, 2)
    condition = build.call(aten.all.default, build.call(aten.gt.Scalar, x, 0))
    for node in (condition, condition.args[0]):
        node.meta["val"] = node.meta["val"].bool()
    condition.meta["val"] = build.fake().bool()
    build.call(aten._assert_async.msg, condition, "not positive").meta["val"] = None
    build.call(aten.copy_.default, x, doubled)
    program = engine_for(Options()).runner(AtenGraph("fails", build.module(doubled)))
    given = torch.tensor([1.0, -1.0, 2.0])
    with pytest.raises(RuntimeError, match="not positive"):
        program([given])
    assert torch.equal(given, torch.tensor([1.0, -1.0, 2.0]))
