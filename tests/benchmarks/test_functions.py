"""Tests of the suite of single functions on activations."""

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


def test_functions_compute_what_their_names_say() -> None:
    """Functions of rows compute along the last dimension."""
    x = torch.randn(2, 3, functions.WIDTH)
    functions_by_name = {name: build() for name, (build, _) in functions.FUNCTIONS.items()}
    expected = {
        "gelu": F.gelu(x),
        "gelu_tanh": F.gelu(x, approximate="tanh"),
        "silu": F.silu(x),
        "tanh": x.tanh(),
        "exp": x.exp(),
        "softmax": x.softmax(-1),
        "layer_norm": F.layer_norm(x, x.shape[-1:]),
    }
    assert functions_by_name.keys() - expected.keys() == {"cross_entropy"}
    for name, result in expected.items():
        assert torch.equal(functions_by_name[name](x), result), name
    logits, classes = functions.logits(1, torch.Generator().manual_seed(0))
    assert torch.equal(functions_by_name["cross_entropy"](logits, classes), F.cross_entropy(logits, classes))
