"""Tests of the table of ops, with the kind of support of each op."""

from __future__ import annotations

import torch

from dynaxla.cli import op_table
from dynaxla.cli.op_table import op_support


def test_all_core_ops_are_listed() -> None:
    kinds = {str(support.op): support.kind for support in op_support("cpu") if torch.Tag.core in support.op.tags}
    assert len(kinds) > 150
    # The size of the first op's result, and the second op's result, depend on a tensor's values: no XLA program can contain them.
    assert {op for op, kind in kinds.items() if kind == "kernel"} == {"aten.nonzero.default", "aten._local_scalar_dense.default"}


def test_kinds_of_support_on_the_cpu() -> None:
    support_by_op = {str(support.op): support for support in op_support("cpu")}
    assert support_by_op["aten.cumsum.default"].kind == "lowering"
    assert support_by_op["aten.cumsum.default"].where.startswith("scans:")
    assert support_by_op["aten.addcmul.default"].kind == support_by_op["aten.hardshrink.default"].kind == "lowering"
    assert support_by_op["aten.linalg_norm.default"].kind == "decomposition"
    assert support_by_op["aten.nonzero.default"].kind == "kernel"
    assert "aten.add_.Tensor" not in support_by_op, "no functional graph contains this op"
    assert "aten.add.out" not in support_by_op
    assert "aten.can_cast.default" not in support_by_op, "the op takes no tensors"


def test_totals_count_core_ops_separately() -> None:
    aten = torch.ops.aten
    support = [
        op_table.OpSupport(op, kind)
        for op, kind in ((aten.add.Tensor, "lowering"), (aten.cholesky_inverse.default, "lowering"), (aten.nonzero.default, "kernel"))
    ]
    assert [list(column.cells) for column in op_table.totals_table(support).columns] == [
        ["lowering", "decomposition", "kernel", "total"],
        ["2", "0", "1", "3"],
        ["1", "0", "1", "2"],
    ]
