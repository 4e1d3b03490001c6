"""What eager mode does on one platform alone is in the program for that platform, and in no other."""

from __future__ import annotations

from collections.abc import Callable
from platform import machine
from typing import Any

import jax
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from dynaxla.lowering import Interpreter
from dynaxla.lowering.eager import eager_on
from dynaxla.lowering.forms import expected
from dynaxla.lowering.function import Function

aten = torch.ops.aten
X86 = machine().lower() in ("x86_64", "amd64")


def traced(function: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...], platform: str) -> str:
    """The program for a platform, which need not be here."""
    module = make_fx(lambda *tensors: (function(*tensors),), tracing_mode="fake")(*inputs)
    module.graph.eliminate_dead_code()
    program = Function(Interpreter(module, platform), choose=expected)
    with jax.enable_x64(True):
        return str(jax.make_jaxpr(program)([jax.ShapeDtypeStruct(spec.shape, spec.jax_dtype) for spec in program.specs.values()]))


@pytest.mark.parametrize(
    ("function", "inputs", "operation", "platforms"),
    [
        pytest.param(torch.remainder, (torch.arange(4), torch.arange(4)), "reduce_and", ["cpu"], id="zero divisors are refused"),
        pytest.param(lambda x: x / 7, (torch.ones(4),), "optimization_barrier", ["cpu"], id="division is exact"),
        pytest.param(
            lambda x, y, z: aten._addmm_activation(x, y, z, use_gelu=True),
            (torch.ones(4), torch.ones(3, 2), torch.ones(2, 4)),
            "tanh",
            ["cuda"],
            id="a fused GELU is the one by tanh",
        ),
        pytest.param(lambda x: x.to(torch.int32), (torch.ones(4),), "select_n", ["cpu"] if X86 else [], id="integers wrap as on x86"),
        pytest.param(
            lambda x: aten.max_pool2d_with_indices(x, [2, 2])[0], (torch.ones(1, 2, 8, 8),), "reduce_window", ["cuda"], id="windows"
        ),
        pytest.param(
            lambda x, mean, variance: aten._native_batch_norm_legit_no_training(x, None, None, mean, variance, 0.1, 1e-5)[0],
            (torch.ones(2, 4, 3), torch.zeros(4), torch.ones(4)),
            " neg ",
            ["cpu"],
            id="batch norms add a shift",
        ),
    ],
)
def test_programs_differ(function: Callable[..., Any], inputs: tuple[torch.Tensor, ...], operation: str, platforms: list[str]) -> None:
    assert [name for name in ("cpu", "cuda") if operation in traced(function, inputs, name)] == platforms


def test_names_of_platforms() -> None:
    """Every platform but the CPU does what CUDA does."""
    assert eager_on("cuda") == eager_on("rocm") == eager_on("tpu")
    assert eager_on("cpu").refuses_zero_divisors != eager_on("cuda").refuses_zero_divisors
    assert eager_on("cpu").widens_small_scales != eager_on("cuda").widens_small_scales
