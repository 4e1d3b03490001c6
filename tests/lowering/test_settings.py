"""torch's settings of precision, as programs keep them: only CUDA has less than all of float32."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from jax import lax

from dynaxla.lowering.settings import EXACT, Settings


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    precision = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(precision)


@pytest.mark.parametrize(("precision", "coarse"), [("highest", False), ("high", True), ("medium", True)])
@pytest.mark.parametrize("allowed", [False, True])
def test_what_torch_is_set_to(precision: str, coarse: bool, allowed: bool) -> None:
    torch.set_float32_matmul_precision(precision)
    with torch.backends.cudnn.flags(enabled=torch.backends.cudnn.enabled, allow_tf32=allowed):  # torch's own tests forbid the assignment
        assert Settings.current("cuda") == Settings(matmul_tf32=coarse, convolution_tf32=allowed)
        assert Settings.current("cpu") == Settings.current("tpu") == EXACT


def test_precision_of_programs() -> None:
    """The two are set apart from each other."""
    settings = [EXACT, Settings(matmul_tf32=True), Settings(convolution_tf32=True)]
    exact, coarse = lax.Precision.HIGHEST, lax.Precision.DEFAULT
    assert [item.matmul_precision for item in settings] == [exact, coarse, exact]
    assert [item.convolution_precision for item in settings] == [exact, exact, coarse]
