"""Single functions on activations."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from benchmarks import functions, suites
from support.fakes.tiny_benchmark import check_case


@pytest.mark.parametrize("name", functions.FUNCTIONS)
def test_functions_can_be_compared(name: str) -> None:
    (case,) = suites.choose("functions", [name])
    check_case(case)


def test_functions_are_those_of_their_names() -> None:
    """Along the last dimension of each row, where there are rows."""
    x = torch.randn(2, 3, functions.WIDTH)
    made = {name: make() for name, (make, _) in functions.FUNCTIONS.items()}
    expected = {
        "gelu": F.gelu(x),
        "gelu_tanh": F.gelu(x, approximate="tanh"),
        "silu": F.silu(x),
        "tanh": x.tanh(),
        "exp": x.exp(),
        "softmax": x.softmax(-1),
        "layer_norm": F.layer_norm(x, x.shape[-1:]),
    }
    assert made.keys() - expected.keys() == {"cross_entropy"}
    for name, result in expected.items():
        assert torch.equal(made[name](x), result), name
    logits, classes = functions.logits(1, torch.Generator().manual_seed(0))
    assert torch.equal(made["cross_entropy"](logits, classes), F.cross_entropy(logits, classes))
