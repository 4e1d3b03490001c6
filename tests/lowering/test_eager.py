"""Behavior of eager mode on one platform is part of the programs for that platform, and of no others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from platform import machine
from typing import Any

import jax
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from dynaxla.lowering import Interpreter
from dynaxla.lowering.eager import PORTABLE, eager_behavior_on
from dynaxla.lowering.function import Function
from dynaxla.lowering.implementations import Chooser, choose_by_rules, choose_generic

aten = torch.ops.aten
X86 = machine().lower() in ("x86_64", "amd64")


def traced(
    function: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...], platform: str, choose: Chooser = choose_by_rules
) -> str:
    """The program for a platform, which this machine need not have."""
    module = make_fx(lambda *tensors: (function(*tensors),), tracing_mode="fake")(*inputs)
    module.graph.eliminate_dead_code()
    program = Function(Interpreter(module, platform), choose=choose)
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
            id="a fused GELU uses tanh",
        ),
        pytest.param(lambda x: x.to(torch.int32), (torch.ones(4),), "select_n", ["cpu"] if X86 else [], id="integers wrap as on x86"),
        pytest.param(
            lambda x: aten.max_pool2d_with_indices(x, [2, 2])[0],
            (torch.ones(1, 2, 8, 8),),
            "reduce_window",
            ["cuda"],
            id="max pooling reduces windows",
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
def test_operation_is_in_the_programs_of_its_platforms(
    function: Callable[..., Any], inputs: tuple[torch.Tensor, ...], operation: str, platforms: list[str]
) -> None:
    assert [name for name in ("cpu", "cuda") if operation in traced(function, inputs, name)] == platforms


def test_all_platforms_but_the_cpu_behave_like_cuda() -> None:
    assert eager_behavior_on("cuda") == eager_behavior_on("rocm") == eager_behavior_on("tpu")
    assert eager_behavior_on("cpu").refuses_zero_divisors != eager_behavior_on("cuda").refuses_zero_divisors
    assert eager_behavior_on("cpu").widens_small_scales != eager_behavior_on("cuda").widens_small_scales


def test_portable_programs_round_as_on_the_cpu_on_every_machine() -> None:
    portable = eager_behavior_on(PORTABLE)
    assert portable == replace(eager_behavior_on("cpu"), prevents_merging=False, casts_like_x86=False)


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        pytest.param(torch.nn.functional.conv2d, (torch.ones(1, 8, 64, 64), torch.ones(8, 8, 3, 3)), id="convolution"),
        pytest.param(torch.mm, (torch.ones(512, 512), torch.ones(512, 512)), id="product"),
        pytest.param(lambda x: torch.nn.functional.layer_norm(x, [512]), (torch.ones(512, 512),), id="layer norm"),
    ],
)
def test_portable_programs_call_no_library(function: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> None:
    """On the CPU, oneDNN or torch's kernels compute these problems."""
    calls = ("ffi_call", "callback", "custom_call")
    program = traced(function, inputs, PORTABLE, choose_generic)
    assert not [call for call in calls if call in program]
    assert any(call in traced(function, inputs, "cpu") for call in calls)
