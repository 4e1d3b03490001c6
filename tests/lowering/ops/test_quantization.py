"""Fake quantization, and products of quantized matrices."""

from __future__ import annotations

import jax
import pytest
import torch

from commands.lower_everywhere.capture import of_function
from commands.lower_everywhere.lower import stablehlo
from dynaxla.errors import UnsupportedOp
from dynaxla.lowering import Interpreter
from dynaxla.lowering.function import Function
from dynaxla.lowering.ops.quantization import FLOAT8_PRODUCT, Float8Product, _broadcast_scale, _scales_v2
from support.comparisons.compare import assert_equal
from support.comparisons.gradients import check_gradients
from support.comparisons.single_op import check_op, run_op
from support.releases import IS_OLDEST

aten = torch.ops.aten
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INT32 = torch.int32


def values(dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(3, 4, 5) * 3
    x[0, 0] = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.05, -0.15])
    return x.to(dtype)


@pytest.mark.optimized
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_per_tensor(dtype: torch.dtype) -> None:
    x = values(dtype).transpose(0, 2)
    check_op(aten.fake_quantize_per_tensor_affine_cachemask.default, x, 0.1, 3, -10, 20)
    scale, zero = torch.tensor([0.1]), torch.tensor([3], dtype=INT32)
    op = aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default
    for enabled in (0, 1):
        check_op(op, x, scale, zero, torch.tensor([enabled]), -10, 20)
    check_op(aten.fake_quantize_per_tensor_affine_cachemask.default, x[:0], 0.1, 3, -10, 20)


@pytest.mark.optimized
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_per_channel(dtype: torch.dtype) -> None:
    x, op = values(dtype), aten.fake_quantize_per_channel_affine_cachemask.default
    x[0, 0, 1] = 0  # the op converts to an integer, which C++ leaves undefined for inf
    scale = torch.rand(4) + 0.05
    check_op(op, x, scale, torch.tensor([-3, 0, 4, 20], dtype=INT32), 1, -10, 20)
    check_op(op, x, scale, torch.tensor([-3.4, 0, 4.5, 50.2]), 1, -10, 20)
    with pytest.raises(RuntimeError, match="zero_point"):
        run_op(op, x, scale, torch.tensor([-3, 0, 4, 21], dtype=INT32), 1, -10, 20)


def test_learnable() -> None:
    x = torch.randn(3, 4) * 5

    def per_tensor(x, scale, zero):
        return aten._fake_quantize_learnable_per_tensor_affine(x, scale, zero, -8, 7, 0.5)

    def per_channel(x, scale, zero):
        return aten._fake_quantize_learnable_per_channel_affine(x, scale, zero, 1, -8, 7, 0.5)

    for zero in (1.4, 1.6, -20.0):
        check_gradients(per_tensor, x, torch.tensor([0.4]), torch.tensor([zero]))
    check_gradients(per_channel, x, torch.rand(4) + 0.1, torch.tensor([0.2, -1.6, 30.0, 2.5]))


def test_public_functions() -> None:
    def fake_quantized(x, scales, zero_points):
        return (
            torch.fake_quantize_per_tensor_affine(x, 0.1, 2, -8, 7),
            torch.fake_quantize_per_tensor_affine(x, scales[:1], zero_points[:1], -8, 7),
            torch.fake_quantize_per_channel_affine(x, scales, zero_points, 1, -8, 7),
        )

    check_gradients(fake_quantized, torch.randn(3, 4), constants=[torch.rand(4) + 0.1, torch.tensor([1, 0, -3, 2], dtype=INT32)])

    def observed(x, running_min, running_max, scale, zero_point):
        on = torch.ones(1, dtype=torch.int64)
        return torch.fused_moving_avg_obs_fake_quant(x, on, on, running_min, running_max, scale, zero_point, 0.1, 0, 255, -1)

    state = [torch.tensor([-1.0]), torch.tensor([2.0]), torch.ones(1), torch.zeros(1, dtype=INT32)]
    check_gradients(observed, torch.randn(3, 4), constants=state)


@pytest.mark.sample(usual=1)
@pytest.mark.parametrize("symmetric", [False, True])
def test_fused_observer(symmetric: bool) -> None:
    op = aten._fused_moving_avg_obs_fq_helper_functional.default
    bounds = [(-1.0, 1.5), (0.0, 0.0), (-2e-4, 1e-4), (0.5, 2.0)]
    states = [(torch.tensor([low]), torch.tensor([high]), torch.tensor([0.3]), torch.tensor([2], dtype=INT32)) for low, high in bounds]
    unseen = (torch.tensor([float("inf")]), torch.tensor([-float("inf")]), *states[0][2:])
    rows = torch.tensor([-1.0, -2, -3]), torch.tensor([3.0, 0, 1]), torch.ones(3), torch.zeros(3, dtype=INT32)

    def function(x, observe, quantize, states, rows):
        per_tensor = [op(x, observe, quantize, *state, 0.1, 0, 255, -1, False, symmetric) for state in states]
        return [*per_tensor, op(x, observe, quantize, *rows, 0.1, -128, 127, 0, True, symmetric)]

    on, off = torch.tensor([1]), torch.tensor([0])
    x = torch.randn(3, 4, 2)
    compiled = torch.compile(function, backend="dynaxla", fullgraph=True, options={"fallback": "error"})
    for switches in ((on, on), (on, off), (off, on)):
        all_states = [*states, states[0] if switches[0] is off else unseen]
        assert_equal(compiled(x, *switches, all_states, rows), function(x, *switches, all_states, rows))
    with pytest.raises(RuntimeError, match="min should be less than or equal to max"):
        run_op(op, x, off, on, *unseen, 0.1, 0, 255, -1, False, symmetric)


def test_products() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.randint(-128, 127, (8, 32)).to(torch.int8)
        check_op(aten._weight_int8pack_mm.default, torch.randn(3, 32).to(dtype), weight, torch.rand(8).to(dtype))
    x, y = torch.randn(16, 32).to(torch.float8_e4m3fn), torch.randn(48, 32).to(torch.float8_e4m3fn).t()
    bias = torch.randn(48).bfloat16()
    per_tensor_scales, row_and_column_scales = (torch.tensor(0.5), torch.tensor(3.0)), (torch.rand(16, 1), torch.rand(1, 48))
    check_op(aten._scaled_mm.default, x, y, *per_tensor_scales, None, None, torch.float32)
    check_op(aten._scaled_mm.default, x, y, *per_tensor_scales, bias, None, torch.bfloat16)
    if not IS_OLDEST:  # torch 2.11 takes one scale for each operand
        check_op(aten._scaled_mm.default, x, y, *row_and_column_scales, None, None, torch.bfloat16)
    with pytest.raises(UnsupportedOp, match="a result of"):
        run_op(aten._scaled_mm.default, x, y, *per_tensor_scales)


def exact_product(x: torch.Tensor, y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The product in float64. torch 2.11 has neither a CPU kernel for recipes nor scales for rows and columns."""
    return (x.double() @ y.double() * a * b + bias).to(bias.dtype)


@pytest.mark.parametrize(("recipe", "sizes"), [(0, [(1,), (1,)]), (1, [(16, 1), (1, 48)])])
def test_products_by_recipes(recipe: int, sizes: list[tuple[int, ...]]) -> None:
    x, y = torch.randn(16, 32).to(torch.float8_e4m3fn), torch.randn(48, 32).to(torch.float8_e4m3fn).t()
    (a, b), bias = (torch.rand(size) for size in sizes), torch.randn(48).bfloat16()
    result = run_op(aten._scaled_mm_v2.default, x, y, [a], [recipe], [], [b], [recipe], [0], bias, torch.bfloat16, [], True)
    assert_equal(result, exact_product(x, y, a, b, bias), tolerance=(1e-2, 1e-2))


def test_scales_for_blocks_raise() -> None:
    x, y = torch.randn(16, 256).to(torch.float8_e4m3fn), torch.randn(48, 256).to(torch.float8_e4m3fn).t()
    a, b = torch.rand(2, 16).t(), torch.rand(2, 48)
    with pytest.raises(UnsupportedOp, match="for each block"):
        run_op(aten._scaled_mm.default, x, y, a, b, None, None, torch.bfloat16)
    with pytest.raises(UnsupportedOp, match=r"blockwise or swizzled scales: recipe \[4\]"):
        run_op(aten._scaled_mm_v2.default, x, y, [a], [4], [], [b.t()], [4], [], None, torch.bfloat16)


@pytest.mark.parametrize("position", range(4))
def test_blockwise_or_swizzled_scales_of_one_operand_raise(position: int) -> None:
    """ATen's own checks accept some of these. `position`: which of the operands' recipes and swizzles is not plain."""
    scale = jax.numpy.ones(())
    recipe_a, swizzle_a, recipe_b, swizzle_b = ([4 if position == number else 0] for number in range(4))
    with pytest.raises(UnsupportedOp, match="blockwise or swizzled scales: recipe"):
        _scales_v2([scale], recipe_a, swizzle_a, [scale], recipe_b, swizzle_b)


@pytest.mark.parametrize(
    "scale", [((), "bfloat16"), ((16, 1), "bfloat16"), ((1, 16), "float32"), ((16,), "float32"), ((16, 2), "float32")], ids=str
)
def test_unsupported_scales_raise(scale: tuple[tuple[int, ...], str]) -> None:
    """Scales for the rows of a 16x48 matrix."""
    with pytest.raises(UnsupportedOp, match=f"a scale {scale[1]}"):
        _broadcast_scale(jax.numpy.ones(*scale), (16, 48), 0)


@pytest.mark.parametrize(("fast", "recipes"), [(False, False), (True, False), (True, True)])
def test_float8_products_for_cuda(fast: bool, recipes: bool) -> None:
    """The program multiplies float8 numbers. The test runs it on the CPU."""
    x, y = torch.randn(16, 32).to(torch.float8_e4m3fn), torch.randn(48, 32).to(torch.float8_e4m3fn)
    scales, bias = (torch.rand(16, 1), torch.rand(1, 48)), torch.randn(48).bfloat16()
    operands = (x, y, *scales, bias)

    def function(x: torch.Tensor, y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        if recipes:
            return torch._scaled_mm_v2(x, y.t(), [a], [1], [], [b], [1], [], bias, torch.bfloat16, use_fast_accum=fast)
        return torch._scaled_mm(x, y.t(), a, b, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=fast)

    (graph,) = of_function(function, operands, "cuda")
    program = Function(Interpreter(graph, "cuda", kernels=False))
    with jax.enable_x64(True):
        (result,) = jax.jit(program)([jax.dlpack.from_dlpack(operand) for operand in operands]).outputs
    assert_equal(torch.from_dlpack(result), exact_product(x, y.t(), *scales, bias), tolerance=(1e-2, 1e-2))
    (product,) = (line for line in stablehlo(graph, "cuda").splitlines() if "dot_general" in line)
    assert product.count("f8E4M3FN") == 2
    assert ("HIGHEST" in product) != fast


@pytest.mark.parametrize("platform", ["cpu", "rocm", "tpu"])
def test_other_platforms_multiply_in_float32(platform: str) -> None:
    assert [implementation.name for implementation in FLOAT8_PRODUCT.available(Float8Product(True, platform), {})] == ["float32"]
