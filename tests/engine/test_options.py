"""XLA's options for a program: vectors of 512 bits only where XLA's functions for them are right."""

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


def chosen(function: Callable[..., Any], *inputs: torch.Tensor) -> object:
    with jax.enable_x64(True):
        traced = jax.jit(function).trace(*(jax.ShapeDtypeStruct(x.shape, str(x.dtype).removeprefix("torch.")) for x in inputs))
    return options_for("cpu", traced.jaxpr).get(VECTORS)


def nested(x: Array) -> Array:
    return jax.jit(lambda y: lax.cond(True, lax.atan, lax.neg, y))(x)


def test_programs_without_atan_are_as_wide_as_any() -> None:
    widest = 512 if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else None
    assert chosen(lambda x: lax.exp(x), torch.ones(3)) == default_options("cpu").get(VECTORS) == widest


@pytest.mark.parametrize("function", [lax.atan, lambda x: lax.atan2(x, x), nested, lambda x: lax.real(lax.log(lax.complex(x, x)))])
def test_programs_with_atan_are_not(function: Callable[..., Any]) -> None:
    assert chosen(function, torch.ones(3)) is None


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
def test_atan_of_many_numbers(function: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> None:
    x = torch.linspace(-3, 3, 256, dtype=torch.float64).to(dtype)
    torch.testing.assert_close(torch.compile(function, backend="dynaxla")(x), function(x))


def test_programs_for_cuda_round_as_eager_mode_does_and_add_in_one_order_if_torch_asks() -> None:
    program = jax.make_jaxpr(lax.neg)(1.0)
    kept = {"xla_allow_excess_precision": False, "xla_gpu_enable_command_buffer": mock.ANY}
    assert options_for("cuda", program) == kept, "known to this XLA"
    fixed = {"xla_gpu_exclude_nondeterministic_ops": True}
    assert options_for("cuda", program, Settings(deterministic=True)) == {**kept, **fixed}
    assert not {*kept, *fixed} & {*options_for("cpu", program), *options_for("tpu", program)}


def test_cuda_graphs_hold_all_that_they_do_by_default_and_convolutions() -> None:
    """Kinds of commands have the same numbers everywhere: XLA's default is read in its options as they are sent."""
    field = 258  # DebugOptions.xla_gpu_enable_command_buffer in xla.proto
    numbers = {"FUSION": 1, "CUBLAS": 2, "CUDNN": 3, "CONDITIONAL": 5, "CUSTOM_CALL": 7, "CUBLASLT": 8, "DYNAMIC_SLICE_FUSION": 9}
    numbers |= {"CONVOLUTION": 11, "COLLECTIVES_KERNEL": 13}
    key = bytes([field << 3 & 0x7F | 2 | 0x80, field << 3 >> 7])
    sent = jaxlib._jax.CompileOptions().SerializeAsString()
    length = sent[sent.index(key) + 2]
    default = set(sent[sent.index(key) + 3 :][:length])
    named = {numbers[name] for name in default_options("cuda")["xla_gpu_enable_command_buffer"].split(",")}
    assert named == default | {numbers["CONVOLUTION"]}


def test_what_the_environment_says_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "--xla_gpu_enable_command_buffer= --xla_allow_excess_precision"
    monkeypatch.setenv("XLA_FLAGS", said)
    assert default_options.__wrapped__("cuda") == {}
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=x")
    assert default_options.__wrapped__("cuda") == default_options("cuda")


def test_products_without_tiles_are_cublas_ones() -> None:
    asked: list[Mapping[str, Any]] = []

    def compile(options: Mapping[str, Any]) -> str:
        asked.append(options)
        if len(asked) == 1:
            raise jax.errors.JaxRuntimeError("INTERNAL: Couldn't find output tile sizes that satisfy hlo: %dot = f32[8,8] dot(%x, %y)")
        return "compiled"

    assert compile_with_cublas_fallback(compile, {"xla_dump_to": "somewhere"}) == "compiled"
    assert asked == [{"xla_dump_to": "somewhere"}, {"xla_dump_to": "somewhere", "xla_gpu_enable_triton_gemm": False}]


def test_what_else_xla_refuses_stays_refused() -> None:
    asked: list[Mapping[str, Any]] = []

    def compile(options: Mapping[str, Any]) -> str:
        asked.append(options)
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        compile_with_cublas_fallback(compile, {})
    assert asked == [{}]
