"""Tests of engine/options.py: XLA's options for a program, such as the width of vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import jax
import jaxlib._jax
import pytest
import torch
from jax import Array, lax

from dynaxla.engine.options import compile_with_cublas_fallback, default_options, options_for
from dynaxla.lowering import Settings

VECTORS = "xla_cpu_prefer_vector_width"


def chosen_vector_width(function: Callable[..., Any], *inputs: torch.Tensor) -> object:
    with jax.enable_x64(True):
        traced = jax.jit(function).trace(*(jax.ShapeDtypeStruct(x.shape, str(x.dtype).removeprefix("torch.")) for x in inputs))
    return options_for("cpu", traced.jaxpr).get(VECTORS)


def nested(x: Array) -> Array:
    return jax.jit(lambda y: lax.cond(True, lax.atan, lax.neg, y))(x)


def test_programs_without_atan_have_the_widest_vectors() -> None:
    widest = 512 if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else None
    assert chosen_vector_width(lambda x: lax.exp(x), torch.ones(3)) == default_options("cpu").get(VECTORS) == widest


@pytest.mark.parametrize("function", [lax.atan, lambda x: lax.atan2(x, x), nested, lambda x: lax.real(lax.log(lax.complex(x, x)))])
def test_programs_with_atan_have_the_default_width(function: Callable[..., Any]) -> None:
    assert chosen_vector_width(function, torch.ones(3)) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "function",
    [
        torch.atan,
        lambda x: torch.atan2(x, torch.ones_like(x)),
        lambda x: torch.where(x > 0, x.atan(), x),
        lambda x: torch.complex(torch.ones_like(x).float(), x.float()).log().imag,
    ],
)
def test_values_of_atan(function: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> None:
    x = torch.linspace(-3, 3, 256, dtype=torch.float64).to(dtype)
    torch.testing.assert_close(torch.compile(function, backend="dynaxla")(x), function(x))


def test_cuda_options_for_rounding_and_determinism() -> None:
    program = jax.make_jaxpr(lax.neg)(1.0)
    default = {"xla_allow_excess_precision": False, "xla_gpu_enable_command_buffer": mock.ANY}
    assert options_for("cuda", program) == default, "this XLA knows both options"
    deterministic = {"xla_gpu_exclude_nondeterministic_ops": True}
    assert options_for("cuda", program, Settings(deterministic=True)) == {**default, **deterministic}
    assert not {*default, *deterministic} & {*options_for("cpu", program), *options_for("tpu", program)}


def test_cuda_graphs_contain_the_default_commands_and_convolutions() -> None:
    """XLA's default is read from its serialized options, in which each kind of command has a fixed number."""
    field = 258  # DebugOptions.xla_gpu_enable_command_buffer in xla.proto
    numbers = {"FUSION": 1, "CUBLAS": 2, "CUDNN": 3, "CONDITIONAL": 5, "CUSTOM_CALL": 7, "CUBLASLT": 8, "DYNAMIC_SLICE_FUSION": 9}
    numbers |= {"CONVOLUTION": 11, "COLLECTIVES_KERNEL": 13}
    key = bytes([field << 3 & 0x7F | 2 | 0x80, field << 3 >> 7])
    serialized = jaxlib._jax.CompileOptions().SerializeAsString()
    length = serialized[serialized.index(key) + 2]
    default = set(serialized[serialized.index(key) + 3 :][:length])
    named = {numbers[name] for name in default_options("cuda")["xla_gpu_enable_command_buffer"].split(",")}
    assert named == default | {numbers["CONVOLUTION"]}


def test_options_in_xla_flags_are_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = "--xla_gpu_enable_command_buffer= --xla_allow_excess_precision"
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert default_options.__wrapped__("cuda") == {}
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=x")
    assert default_options.__wrapped__("cuda") == default_options("cuda")


def test_products_without_tiles_fall_back_to_cublas() -> None:
    used_options: list[Mapping[str, Any]] = []

    def compile(options: Mapping[str, Any]) -> str:
        used_options.append(options)
        if len(used_options) == 1:
            raise jax.errors.JaxRuntimeError("INTERNAL: Couldn't find output tile sizes that satisfy hlo: %dot = f32[8,8] dot(%x, %y)")
        return "compiled"

    assert compile_with_cublas_fallback(compile, {"xla_dump_to": "somewhere"}) == "compiled"
    assert used_options == [{"xla_dump_to": "somewhere"}, {"xla_dump_to": "somewhere", "xla_gpu_enable_triton_gemm": False}]


def test_other_errors_of_xla_are_raised() -> None:
    used_options: list[Mapping[str, Any]] = []

    def compile(options: Mapping[str, Any]) -> str:
        used_options.append(options)
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        compile_with_cublas_fallback(compile, {})
    assert used_options == [{}]
