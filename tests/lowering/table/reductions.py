"""Reductions and scans."""

import torch

from lowering.table.rows import EVERY, FEW, FLOATS, NO_SHAPES, NUMERIC, PAIR, PRIM, REAL, Op, along_each_dim, aten, either, of, prims

ORDERED = (*REAL, torch.bool)
each_and_all = either(([0],), ([-1], True), ([0, 1],))

ROWS: list[Op] = [
    # Sums and products
    Op(aten.sum.default, of(), EVERY),
    Op(aten.sum.dim_IntList, each_and_all, EVERY),
    Op(aten.nansum.default, either((), ([0],), ([-1], True)), (*FLOATS, torch.int64)),
    Op(aten.mean.default, of(), (*FLOATS, torch.complex64)),
    Op(aten.mean.dim, each_and_all, (*FLOATS, torch.complex64)),
    Op(aten.prod.default, of(), EVERY),
    Op(aten.prod.dim_int, either((0,), (-1, True)), EVERY),
    Op(aten.trace.default, of(), NUMERIC),
    Op(aten.var.correction, either(([0],), ([-1],), ([0, 1],)), FLOATS),
    Op(aten.std.correction, either(([0],), ([0, 1],)), FLOATS),
    Op(aten.var_mean.correction, either(([0],), ([0, 1],)), FLOATS),
    Op(aten.std_mean.correction, either(([0],), ([0, 1],)), FLOATS),
    Op(aten.logsumexp.default, either(([0],), ([-1], True)), FLOATS),
    Op(aten.linalg_vector_norm.default, either((), (1,), (2, [0])), FLOATS),
    Op(aten.dist.default, lambda make, n: [(make(n, 3), make(3)), (make(n, 3), make(n, 3), 3)], FLOATS),
    # Extrema
    *(Op(op, either(([0],), ([-1], True)), ORDERED) for op in (aten.amax.default, aten.amin.default)),
    *(Op(op, of(), ORDERED) for op in (aten.max.default, aten.min.default, aten.aminmax.default)),
    *(Op(op, along_each_dim, ORDERED) for op in (aten.max.dim, aten.min.dim)),
    Op(aten._aminmax.default, of(), FEW, without=NO_SHAPES),
    Op(aten._aminmax.dim, along_each_dim, FEW, without=NO_SHAPES),
    *(Op(op, along_each_dim, REAL, gradient=False) for op in (aten.argmax.default, aten.argmin.default)),
    # Any, all and counts
    *(Op(op, of(), EVERY, gradient=False) for op in (aten.any.default, aten.all.default, aten.count_nonzero.default)),
    *(Op(op, along_each_dim, EVERY, gradient=False) for op in (aten.any.dim, aten.all.dim)),
    *(Op(op, each_and_all, EVERY, gradient=False) for op in (aten.any.dims, aten.all.dims)),
    Op(aten.count_nonzero.dim_IntList, either(([0],), ([0, 1],)), EVERY, gradient=False),
    *(Op(op, of(), (torch.bool,), gradient=False) for op in (aten._is_all_true.default, aten._is_any_true.default)),
    Op(aten.hash_tensor.default, either((), ([0],), ([-1],)), ORDERED, gradient=False),
    # Scans
    Op(aten.cumsum.default, along_each_dim, EVERY),
    Op(aten.cumprod.default, along_each_dim, EVERY),
    Op(aten.cummax.default, along_each_dim, ORDERED),
    Op(aten.cummin.default, along_each_dim, ORDERED),
    Op(aten.logcumsumexp.default, along_each_dim, FLOATS),
    Op(aten._logcumsumexp.default, along_each_dim, PAIR, without=NO_SHAPES),
    # Prims
    *(
        Op(op, either(([0],), ([0, 1],)), (*FEW, torch.bfloat16), **PRIM)
        for op in (prims.sum.default, prims.prod.default, prims.amax.default, prims.amin.default)
    ),
    # For empty operands, torch warns that there are too few degrees of freedom.
    Op(prims.var.default, either(([0], 1.0), ([0, 1], 0.5)), gradient=False, without=["rank 0", "empty"]),
]  # fmt: skip

# The ops without a row, by the file that tests them.
ELSEWHERE: dict[str, str] = {
    # torch has no kernel for the first op; the signs of the second's results are not unique.
    "lowering/ops/test_prims.py": "prims.xor_sum.default prims.svd.default",
}
