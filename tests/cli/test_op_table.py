"""Which way each op goes."""

from __future__ import annotations

import torch

from dynaxla.cli import op_table
from dynaxla.cli.op_table import op_support


def test_ops_lists_every_core_op() -> None:
    kinds = {str(way.op): way.kind for way in op_support("cpu") if torch.Tag.core in way.op.tags}
    assert len(kinds) > 150
    # Those whose result's size or number depends on a tensor's values: no XLA program can hold them.
    assert {op for op, kind in kinds.items() if kind == "kernel"} == {"aten.nonzero.default", "aten._local_scalar_dense.default"}


def test_ways_are_those_of_the_platform() -> None:
    kinds = {str(way.op): way for way in op_support("cpu")}
    assert kinds["aten.cumsum.default"].kind == "lowering"
    assert kinds["aten.cumsum.default"].where.startswith("scans:")
    assert kinds["aten.addcmul.default"].kind == kinds["aten.hardshrink.default"].kind == "lowering"
    assert kinds["aten.linalg_norm.default"].kind == "decomposition"
    assert kinds["aten.nonzero.default"].kind == "kernel"
    assert "aten.add_.Tensor" not in kinds, "no functional graph holds it"
    assert "aten.add.out" not in kinds
    assert "aten.can_cast.default" not in kinds, "it is not about tensors"


def test_the_totals_tell_the_core_set_apart() -> None:
    aten = torch.ops.aten
    found = [
        op_table.OpSupport(op, kind)
        for op, kind in ((aten.add.Tensor, "lowering"), (aten.cholesky_inverse.default, "lowering"), (aten.nonzero.default, "kernel"))
    ]
    assert [list(column.cells) for column in op_table.totals_table(found).columns] == [
        ["lowering", "decomposition", "kernel", "total"],
        ["2", "0", "1", "3"],
        ["1", "0", "1", "2"],
    ]
