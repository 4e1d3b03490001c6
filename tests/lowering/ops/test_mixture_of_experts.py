"""Grouped matrix products, and lowerings registered by name before their op exists."""

from __future__ import annotations

import pytest
import torch

import dynaxla
from dynaxla.bench.suites import import_package
from support.comparisons.gradients import check_gradients
from support.releases import fails_in_oldest


@pytest.mark.filterwarnings("ignore")  # warnings of the model library's import
@fails_in_oldest("it cannot trace the backward pass of transformers, which looks at sizes that are values")
@pytest.mark.parametrize("ends", [[2, 2, 8], [0, 0, 0], [4, 7, 10]], ids=str)
def test_grouped_mm_of_transformers(ends: list[int]) -> None:
    import_package("transformers")
    import_package("transformers.integrations.moe")  # defines the ops
    check_gradients(
        torch.ops.transformers.grouped_mm_fallback,
        torch.randn(10, 4, dtype=torch.float64),
        torch.randn(3, 4, 5, dtype=torch.float64),
        torch.tensor(ends),
    )


def test_lowering_is_registered_before_its_op() -> None:
    dynaxla.lowers("dynaxla_test::defined_later")(lambda x: x * 3)

    @torch.library.custom_op("dynaxla_test::defined_later", mutates_args=())
    def defined_later(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    defined_later.register_fake(torch.empty_like)
    compiled = torch.compile(lambda x: defined_later(x), backend="dynaxla", fullgraph=True, options={"fallback": "error"})
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 3.0))
    with pytest.raises(TypeError, match="promotion"):
        dynaxla.lowers("dynaxla_test::other", promote=object())(lambda x: x)
