"""Marks of the tests in tests/gpu, and a comparison for sums whose order of rounding differs from eager mode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from support.comparisons.compare import assert_equal

MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and a CUDA build of torch"),
]
# The largest difference relative to the largest element, by dtype.
PART = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}


@pytest.fixture
def full_precision() -> Iterator[None]:
    """Disables TF32, so that eager mode computes in float32."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


def assert_close(actual: Any, expected: Any, part: float | None = None) -> None:
    """Compares metadata as assert_equal does, and values by their largest difference.

    Args:
        actual: the results.
        expected: the results of eager mode.
        part: the largest difference relative to the largest element, by default that of the dtype.
    """
    assert_equal(actual, expected, values=False)
    for mine, theirs in zip(pytree.tree_leaves(actual), pytree.tree_leaves(expected), strict=True):
        if not isinstance(theirs, torch.Tensor) or not theirs.is_floating_point():
            assert_equal(mine, theirs)
        elif theirs.numel():
            assert torch.equal(mine.isfinite(), theirs.isfinite())
            difference = (mine.detach().double() - theirs.detach().double()).nan_to_num(0, 0, 0).abs().max().item()
            largest = theirs.detach().double().nan_to_num(0, 0, 0).abs().max().item()
            assert difference <= (PART[theirs.dtype] if part is None else part) * max(largest, 1e-6), f"off by {difference} of {largest}"


def assert_close_together(actual: list[torch.Tensor], expected: list[torch.Tensor], part: float) -> None:
    """As assert_close, relative to the largest element of all tensors.

    Some gradients are only rounding errors, such as that of a bias before a batch norm.
    """
    assert_equal(actual, expected, values=False)
    assert_close(*(torch.cat([tensor.detach().flatten().float() for tensor in tensors]) for tensors in (actual, expected)), part)
