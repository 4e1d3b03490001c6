"""Changes of rows for torch 2.11: defects of that version of torch, by op."""

from __future__ import annotations

import dataclasses
from typing import Any

from lowering.table.rows import HALVES, NUMERIC, Op, Samples
from support.releases import IS_OLDEST


def transform_samples(*dims: int, rest: tuple[Any, ...]) -> Samples:
    return lambda make, n: [(make(n, 3, 4), list(dims), *rest)]


_NO_FORMULA = {"gradient": False}
_ONLY_LAST = "its shape function has other strides than its kernel, but along the last dimension"

CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "aten.aminmax.default": ("it has no gradient", _NO_FORMULA),
    "aten.narrow_copy.default": ("it has no gradient", _NO_FORMULA),
    "prims.fma.default": ("it has no gradient", _NO_FORMULA),
    "aten.convolution_backward.default": ("its gradient takes no symbolic sizes", _NO_FORMULA),
    "aten.diagonal_backward.default": ("its shape function refuses what its kernel takes", {"without": ["rank 0"]}),
    "aten.lift.default": ("TorchDynamo fails to trace it", {"without": ["changing sizes"]}),
    "aten._convolution.default": ("its shape function takes no symbolic sizes", {"without": ["changing sizes"]}),
    "aten._transformer_encoder_layer_fwd.default": ("it has no shape function", {"without": ["changing sizes", "transposed"]}),
    "aten.zero.default": ("its shape function has other strides than its kernel", {"without": ["transposed"]}),
    "aten.trace.default": (
        "it has no kernel for halves, and its gradient takes no symbolic sizes",
        {"dtypes": [dtype for dtype in NUMERIC if dtype not in HALVES], "without": ["changing sizes"]},
    ),
    "aten._fft_c2c.default": (_ONLY_LAST, {"samples": transform_samples(2, rest=(1, True)), "without": ["transposed"]}),
    "aten._fft_r2c.default": (_ONLY_LAST, {"samples": transform_samples(2, rest=(2, True)), "without": ["transposed"]}),
}


def as_in_this_torch(rows: list[Op]) -> list[Op]:
    """The rows for the installed torch: with torch 2.11, rows are changed as `CHANGES` says."""
    if not IS_OLDEST:
        return rows
    assert CHANGES.keys() <= {str(row) for row in rows}
    return [dataclasses.replace(row, **CHANGES[str(row)][1]) if str(row) in CHANGES else row for row in rows]
