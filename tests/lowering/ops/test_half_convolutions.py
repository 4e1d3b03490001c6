"""Convolutions of half types on CUDA have half-type results: for a float32 result, XLA would make cuDNN multiply in float32."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from dynaxla.lowering import Interpreter, dtypes
from dynaxla.lowering.function import Function
from dynaxla.lowering.implementations import choose_by_rules

aten = torch.ops.aten
Outputs = Sequence[torch.Tensor]
Case = tuple[Callable[..., Outputs], list[tuple[int, ...]]]


def forward(x: tuple[int, ...], weight: tuple[int, ...], *settings: Any) -> Case:
    transposed, groups = settings[3], settings[-1]
    out = weight[1] * groups if transposed else weight[0]
    return lambda x, weight, bias: (aten.convolution(x, weight, bias, *settings),), [x, weight, (out,)]


def backward(out: tuple[int, ...], x: tuple[int, ...], weight: tuple[int, ...], *settings: Any) -> Case:
    return lambda grad, x, weight: aten.convolution_backward(grad, x, weight, [out[1]], *settings, [True] * 3), [out, x, weight]


PLAIN = ([1], [1], [1], False, [0], 1)
CASES: dict[str, Case] = {
    "one dimension": forward((2, 4, 9), (6, 4, 3), *PLAIN),
    "two dimensions": forward((2, 4, 6, 7), (6, 4, 3, 3), *PLAIN),
    "three dimensions": forward((2, 4, 4, 3, 5), (6, 4, 3, 3, 3), *PLAIN),
    "strided and dilated": forward((2, 4, 9, 8), (6, 4, 3, 2), [2, 3], [1, 0], [2, 1], False, [0, 0], 1),
    "grouped": forward((2, 4, 6, 7), (6, 2, 3, 3), [1], [1], [1], False, [0], 2),
    "depthwise": forward((2, 4, 6, 7), (4, 1, 3, 3), [1], [1], [1], False, [0], 4),
    "transposed": forward((2, 4, 5, 6), (4, 6, 3, 2), [2, 3], [1, 0], [1, 1], True, [1, 2], 1),
    "transposed and grouped": forward((2, 4, 5, 6), (4, 3, 3, 3), [2], [1], [1], True, [0], 2),
    "gradients": backward((2, 6, 6, 7), (2, 4, 6, 7), (6, 4, 3, 3), *PLAIN),
    "gradients, strided": backward((2, 6, 3, 4), (2, 4, 6, 7), (6, 4, 3, 3), [2], [1], [1], False, [0], 1),
    "gradients, depthwise": backward((2, 4, 6, 7), (2, 4, 6, 7), (4, 1, 3, 3), [1], [1], [1], False, [0], 4),
    "gradients, transposed": backward((2, 6, 9, 11), (2, 4, 5, 6), (4, 6, 3, 3), [2], [1], [1], True, [0], 1),
    "time first": (lambda x, weight, bias: (aten.conv_tbc(x, weight, bias, 1),), [(9, 2, 4), (3, 4, 6), (6,)]),
}
HALVES = {"bf16": torch.bfloat16, "f16": torch.float16}


def program(case: str, dtype: torch.dtype, platform: str) -> tuple[Function, list[torch.Tensor]]:
    """Returns the program for a platform, which this machine need not have, and operands."""
    function, shapes = CASES[case]
    torch.manual_seed(0)
    tensors = [torch.randn(shape).to(dtype) for shape in shapes]
    module = make_fx(function, tracing_mode="fake")(*tensors)
    module.graph.eliminate_dead_code()
    return Function(Interpreter(module, platform), choose=choose_by_rules), tensors


def convolutions(case: str, dtype: torch.dtype, platform: str) -> list[list[str]]:
    """The dtypes of the operands and the result of each lowered convolution."""
    function, tensors = program(case, dtype, platform)
    arrays = [jax.ShapeDtypeStruct(tuple(tensor.shape), dtypes.to_jax(dtype)) for tensor in tensors]
    with jax.enable_x64(True):
        text = jax.jit(function).trace(arrays).lower(lowering_platforms=(platform,)).as_text()
    signatures = re.findall(r"stablehlo\.convolution\(.*: \((.*)\) -> (.*)", text)
    return [re.findall(r"tensor<[\dx]*x(\w+)>", " ".join(parts)) for parts in signatures]


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("case", CASES)
def test_operands_and_result_have_one_dtype(case: str, name: str) -> None:
    types_of_convolutions = convolutions(case, HALVES[name], "cuda")
    assert len(types_of_convolutions) == (2 if "gradients" in case else 1)
    assert all(types == [name] * 3 for types in types_of_convolutions)


@pytest.mark.parametrize("case", ["two dimensions", "gradients", "time first"])
def test_result_is_float32_on_other_platforms(case: str) -> None:
    """Other compilers may add in the dtype of the result."""
    assert all(types == ["bf16", "bf16", "f32"] for types in convolutions(case, torch.bfloat16, "tpu"))
    for platform in ("cuda", "tpu"):
        assert all(types == ["f32"] * 3 for types in convolutions(case, torch.float32, platform))


@pytest.mark.sample(usual=5)
@pytest.mark.parametrize("case", CASES)
def test_values(case: str) -> None:
    """The sum is rounded, and rounded again after the bias is added, as in eager mode on CUDA."""
    function, tensors = program(case, torch.bfloat16, "cuda")
    arrays = [np.asarray(tensor.float()).astype(dtypes.to_jax(tensor.dtype)) for tensor in tensors]
    with jax.enable_x64(True):
        results = jax.jit(function)(arrays).outputs
    exact = CASES[case][0](*(tensor.double() for tensor in tensors))
    unit = torch.finfo(torch.bfloat16).eps
    for mine, theirs in zip(results, exact, strict=True):
        assert mine.dtype == dtypes.to_jax(torch.bfloat16)
        limit = unit * float(theirs.abs().max())
        torch.testing.assert_close(torch.from_numpy(np.asarray(mine, np.float64)), theirs, rtol=0, atol=limit)
