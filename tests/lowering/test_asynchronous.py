"""Asynchronous ops are found by namespace, by schema, or by the types of their arguments and results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives
import torch.distributed._symmetric_memory

from dynaxla.lowering.asynchronous import NAMESPACES, is_asynchronous
from support.models.graph_builder import Builder, begin_sum
from support.releases import ops_here

aten = torch.ops.aten


@pytest.mark.parametrize(
    "op",
    [
        torch.ops.c10d.allreduce_.default,
        torch.ops.symm_mem.one_shot_all_reduce.default,
        torch.ops._c10d_functional.all_reduce.default,
        *ops_here("_c10d_functional.isend.default"),
        torch.ops._dtensor.shard_dim_alltoall.default,
        torch.ops.quantized.linear_prepack.default,  # it returns an object of a class
        aten.record_stream.default,
    ],
    ids=str,
)
def test_op_is_asynchronous_by_namespace_or_schema(op: Any) -> None:
    build = Builder()
    node = build.call(op, build.input(3))
    assert is_asynchronous(node)
    assert is_asynchronous(build.call(torch.ops.higher_order.with_effects, build.input(0), op, node))


def test_all_collectives_are_asynchronous() -> None:
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        if namespace in NAMESPACES:
            op = getattr(getattr(getattr(torch.ops, namespace), name), schema.overload_name or "default")
            assert is_asynchronous(Builder().call(op)), op


def test_futures_as_results_or_arguments_are_asynchronous() -> None:
    build = Builder()
    assert is_asynchronous(build.call(aten.add.Tensor, build.input(3), 1, value=torch.futures.Future()))
    work = build.graph.placeholder("work")
    work.meta["val"] = torch.futures.Future()
    assert is_asynchronous(build.call(begin_sum._opoverload, work))
    assert not is_asynchronous(build.call(aten.add.Tensor, build.input(3), 1))


@pytest.mark.parametrize(
    "op", [aten.rand.generator, aten.uniform_.default, aten.sort.default, aten.item.default, aten._print.default], ids=str
)
def test_ordinary_ops_are_not_asynchronous(op: Any) -> None:
    build = Builder()
    assert not is_asynchronous(build.call(op, build.input(3)))


def test_awaited_node_is_asynchronous() -> None:
    """A collective that a library defines may have no other sign."""
    build = Builder()
    waited, read = (build.call(aten.neg.default, build.input(3)) for _ in range(2))
    assert not is_asynchronous(waited)
    build.call(torch.ops._c10d_functional.wait_tensor.default, waited)
    build.call(torch.ops._c10d_functional.all_reduce.default, read, "sum", "group")
    assert is_asynchronous(waited)
    assert not is_asynchronous(read)
