"""Ops without a lowering: torch's kernel runs inside the program, or the graph is split around the op."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import dynaxla
from dynaxla.observe import coverage, metrics
from support.comparisons.compare import check

kernel_strides: list[tuple[int, ...]] = []


@torch.library.custom_op("dynaxla_test::scale", mutates_args=())
def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    kernel_strides.append(x.stride())
    return torch.from_numpy(x.numpy() * factor).to(x.dtype)


@scale.register_fake
def _(x: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype)


scale.register_autograd(
    lambda ctx, grad: (scale(grad.contiguous(), ctx.factor), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", inputs[1]),
)


@torch.library.custom_op("dynaxla_test::add_and_halve", mutates_args=("x",))
def add_and_halve(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x.add_(y)
    return x / 2, x.sum()


@add_and_halve.register_fake
def _(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), x.new_empty(())


@torch.library.custom_op("dynaxla_test::liar", mutates_args=())
def liar(x: torch.Tensor) -> torch.Tensor:
    return x.double()


@liar.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("dynaxla_test::picky", mutates_args=())
def picky(x: torch.Tensor) -> torch.Tensor:
    if bool((x < 0).any()):
        raise ArithmeticError("picky takes no negative numbers")
    return x.sqrt()


@picky.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.fixture(autouse=True)
def reset() -> None:
    torch._dynamo.reset()
    metrics.reset()
    coverage.reset()


def compile_whole(function: Any, **options: Any) -> Any:
    return torch.compile(function, backend="dynaxla", fullgraph=True, options=options)


@pytest.mark.sample(usual=6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.complex64], ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (0, 2), (2, 3, 4)], ids=str)
def test_custom_op_in_a_graph(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    @torch.library.custom_op("dynaxla_test::plus_one", mutates_args=())
    def plus_one(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    plus_one.register_fake(torch.empty_like)
    x = torch.ones(shape, dtype=dtype)
    check(lambda x: plus_one(x * 2) * 3, x, fallback="kernel")
    check(lambda x: plus_one(x), x.expand(2, *shape) if shape else x, fallback="kernel")


def test_kernel_gets_eager_modes_strides() -> None:
    x = torch.randn(4, 5)
    kernel_strides.clear()
    compiled = compile_whole(lambda x: scale((x * 2).t(), 3.0))
    torch.testing.assert_close(compiled(x), (x * 6).t().contiguous())
    assert kernel_strides == [(1, 5)]


def test_gradients_and_counters() -> None:
    x = torch.randn(4, 5, requires_grad=True)
    compiled = compile_whole(lambda x: scale(x.sin(), 3.0).cos().sum())
    (expected,) = torch.autograd.grad((x.sin() * 3).cos().sum(), x)
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            (actual,) = torch.autograd.grad(compiled(x), x)
        torch.testing.assert_close(actual, expected)
    assert coverage.snapshot()["dynaxla_test.scale.default"] == {"lowered": 0, "fallback": 2}, "forward and backward"
    assert metrics.snapshot()["kernels"] == 4, "each called twice"


def test_custom_op_mutates_a_view_of_an_input() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        half, total = add_and_halve(x[1:], y)
        return half + 1, total, x.sum()

    check(function, torch.randn(4, 3), torch.randn(3, 3), fallback="kernel")


def test_fallback_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    @torch.library.custom_op("dynaxla_test::logged", mutates_args=())
    def logged(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    logged.register_fake(torch.empty_like)
    with caplog.at_level(logging.WARNING, logger="dynaxla"):
        for size in (2, 3):
            torch._dynamo.reset()
            compile_whole(lambda x: logged(logged(x)))(torch.randn(size))
    (record,) = caplog.records
    assert "dynaxla_test.logged.default" in record.getMessage()
    assert "test_fallback.py" in record.getMessage()


def test_error_of_a_kernel_reaches_the_caller_before_any_write() -> None:
    x = torch.tensor([1.0, 4.0])
    compiled = compile_whole(lambda x: picky(x.mul_(2)) + 1)
    compiled(x)
    x.neg_()
    with pytest.raises(ArithmeticError, match="picky takes no negative numbers"):
        compiled(x)
    assert torch.equal(x, torch.tensor([-2.0, -8.0]))
    torch.testing.assert_close(compiled(x.abs()), (x.abs() * 2).sqrt() + 1)


def test_wrong_dtype_of_a_fake_implementation_raises() -> None:
    with pytest.raises(RuntimeError, match=r"liar(.|\n)*float64(.|\n)*declared torch.float32"):
        compile_whole(lambda x: liar(x) + 1)(torch.randn(3))


def test_arguments_that_a_lowering_lacks_fall_back() -> None:
    """A lowering does not support non-default values of arguments that its signature leaves out."""

    @torch.library.custom_op("dynaxla_test::shift", mutates_args=())
    def shift(x: torch.Tensor, by: int = 1) -> torch.Tensor:
        return x + by

    shift.register_fake(lambda x, by=1: torch.empty_like(x))
    dynaxla.lowers(torch.ops.dynaxla_test.shift.default)(lambda x: x + 1)
    x = torch.randn(3)
    assert torch.equal(compile_whole(lambda x: shift(x) + shift(x, 5))(x), x + 1 + (x + 5))
    assert coverage.snapshot()["dynaxla_test.shift.default"] == {"lowered": 1, "fallback": 1}
    with pytest.raises(dynaxla.errors.UnsupportedOp, match="by=1"):
        compile_whole(lambda x: shift(x, 6), fallback="error")(x)


def test_random_kernels_draw_new_numbers_and_repeat_with_a_seed() -> None:
    rates = torch.full((1000,), 10.0)

    @torch.library.custom_op("dynaxla_test::draw", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
    def draw(x: torch.Tensor) -> torch.Tensor:
        return torch.poisson(x)

    draw.register_fake(torch.empty_like)
    compiled = compile_whole(lambda x: (draw(x), draw(x)))
    torch.manual_seed(3)
    first, second = compiled(rates)
    assert not torch.equal(first, second), "two draws must not be merged"
    torch.manual_seed(3)
    again = compiled(rates)
    assert torch.equal(first, again[0])
    assert torch.equal(second, again[1])


def test_check_in_the_program_raises_before_any_write() -> None:
    @torch.library.custom_op("dynaxla_test::positive", mutates_args=())
    def positive(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    positive.register_fake(torch.empty_like)

    @dynaxla.lowers(torch.ops.dynaxla_test.positive.default)
    def lowering(x: Any, *, ctx: Any) -> Any:
        ctx.require(x > 0, ValueError, "not positive")
        ctx.require(x < 9, OverflowError, "too large")
        return x

    compiled = compile_whole(lambda x: positive(x.mul_(2)))
    x = torch.tensor([1.0, 2.0])
    assert torch.equal(compiled(x), torch.tensor([2.0, 4.0]))
    for bad, error, message in [(-1.0, ValueError, "not positive"), (5.0, OverflowError, "too large"), (-1.0, ValueError, "not pos")]:
        x.fill_(bad)
        with pytest.raises(error, match=message):
            compiled(x)
        assert torch.equal(x, torch.full((2,), bad))


@pytest.mark.parametrize("threads", [1, 2])
def test_kernels_in_several_programs_at_once(threads: int) -> None:
    """Kernels that hold Python's lock and use torch's own threads, called from programs that several threads run at the same time."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        compiled = compile_whole(lambda x: (scale((x @ x).contiguous(), 2.0) @ x, scale(x.sin(), 3.0).sum()))
        x = torch.randn(128, 128)
        expected = ((x @ x) * 2.0 @ x, (x.sin() * 3).sum())
        compiled(x)
        with ThreadPoolExecutor(4) as pool:
            for result in pool.map(lambda _: compiled(x), range(40)):
                torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-2)
    finally:
        torch.set_num_threads(before)


def test_result_that_aliases_its_operand_warns_once() -> None:
    """torch warns at the first call of a compiled function, and only if it sees the op that the program calls."""
    library = torch.library.Library("dynaxla_test_aliases", "DEF")
    library.define("same(Tensor x) -> Tensor")
    library.impl("same", lambda x: x, "CompositeExplicitAutograd")
    torch.library.register_fake("dynaxla_test_aliases::same", torch.empty_like, lib=library)
    compiled = torch.compile(lambda x: torch.ops.dynaxla_test_aliases.same(x * 2) + 1, backend="dynaxla")
    with torch._functorch.config.patch(error_on_custom_op_aliasing=False):
        with pytest.warns(UserWarning, match="must not also be an input") as warnings:
            assert compiled(torch.ones(3)).tolist() == [3, 3, 3]
        compiled(torch.ones(3))  # a second warning would be an error
    assert len(warnings) == 1
    torch._dynamo.reset()
    with torch._functorch.config.patch(error_on_custom_op_aliasing=True), pytest.raises(RuntimeError, match="must not also be an input"):
        compiled(torch.ones(3))
