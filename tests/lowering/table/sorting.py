"""Sorting, selection by rank, search, and histograms."""

import torch

from lowering.table.rows import FLOATS, NO_SHAPES, PAIR, REAL, Keywords, Make, Op, aten, either, of


def bounded(make: Make) -> torch.Tensor:
    """Sorted boundaries for a search."""
    return make(5).sort(-1).values


ROWS: list[Op] = [
    # Eager mode leaves the indices of equal elements undefined except for stable sorts. In these dtypes no elements are equal.
    *(
        Op(op, samples, PAIR)
        for op, samples in (
            (aten.sort.default, either((0,), (-1, True))),
            (aten.argsort.default, either((0,), (-1, True))),
            (aten.topk.default, either((2,), (3, 0), (1, 1, False))),
            (aten.kthvalue.default, either((2,), (1, 0, True))),
            (aten.mode.default, either((), (0, True))),
        )
    ),
    Op(aten.sort.stable, lambda make, n: [(make(n, 3), Keywords(stable=True, dim=dim, descending=dim == 0)) for dim in (0, -1)],
       (*REAL, torch.bool)),
    Op(aten.argsort.stable, lambda make, n: [(make(n, 3), Keywords(stable=True, dim=dim, descending=dim == 0)) for dim in (0, -1)],
       (*REAL, torch.bool)),
    Op(aten.median.default, of(), REAL),
    Op(aten.nanmedian.default, of(), REAL),
    Op(aten.median.dim, either((0,), (-1, True)), PAIR),
    Op(aten.nanmedian.dim, either((0,), (-1, True)), PAIR),
    # Search
    Op(aten.searchsorted.Tensor, lambda make, n: [(bounded(make), make(n, 3), Keywords(right=right)) for right in (False, True)], REAL,
       gradient=False),
    Op(aten.searchsorted.Scalar, lambda make, n: [(bounded(make), 1, Keywords(out_int32=True))], REAL, gradient=False),
    Op(aten.bucketize.Tensor, lambda make, n: [(make(n, 3), bounded(make), Keywords(right=right)) for right in (False, True)], REAL,
       gradient=False),
    Op(aten.bucketize.Scalar, lambda make, n: [(1, bounded(make), Keywords(out_int32=True))], REAL, gradient=False),
    # Histograms
    Op(aten.histc.default, either((4,), (5, -2, 2)), FLOATS, gradient=False),
    *(
        Op(op, samples, PAIR, gradient=False, without=NO_SHAPES)
        for op, samples in (
            (aten.histogram.bin_ct, lambda make, n: [
                (make(n, 3), 4, Keywords(weight=make(n, 3))), (make(n, 3), 4, Keywords(density=True)),
            ]),
            (aten.histogram.bins_tensor, lambda make, n: [(make(n, 3), bounded(make), Keywords(weight=make(n, 3)))]),
            (aten._histogramdd_bin_edges.default, lambda make, n: [(make(n, 2), [3, 4])]),
            (aten._histogramdd_from_bin_cts.default, lambda make, n: [(make(n, 2), [3, 4], Keywords(weight=make(n)))]),
            (aten._histogramdd_from_bin_tensors.default, lambda make, n: [
                (make(n, 2), [bounded(make), bounded(make)], Keywords(density=True)),
            ]),
        )
    ),
]  # fmt: skip

# The ops without a row, by the file that tests them.
ELSEWHERE: dict[str, str] = {}
