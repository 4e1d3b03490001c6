"""torch's kernels that replace XLA code inside programs: equal results, and calls only if they are allowed and faster."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import dynaxla
from dynaxla.config import Options
from dynaxla.lowering.cpu.measurements import SAVINGS
from dynaxla.lowering.fallback import _out_variant
from lowering.table import ROWS
from lowering.table.rows import Op
from lowering.test_every_op import calls
from support.comparisons.compare import assert_equal
from support.comparisons.single_op import run_ops
from support.forced_implementations import backend_with

FASTER = [row for row in ROWS if row.op in SAVINGS]
ROWS_PER_PROGRAM = 8
ELEMENTS = 200_000
# By default, torch's kernels would run a whole graph of such ops.
PROGRAMS = {"graph": "xla"}


def kernel_calls(function: Callable[[], object]) -> int:
    """The number of torch's kernels that programs call while the function runs."""
    before = dynaxla.metrics.snapshot().get("kernels", 0)
    function()
    return dynaxla.metrics.snapshot().get("kernels", 0) - before


@pytest.mark.sample(usual=2)
@pytest.mark.parametrize("first", range(0, len(FASTER), ROWS_PER_PROGRAM), ids=lambda first: str(FASTER[first]))
def test_values_and_strides(first: int) -> None:
    rows: list[Op] = FASTER[first : first + ROWS_PER_PROGRAM]
    cases = [
        (row, *item)
        for row in rows
        for item in calls(row, [dtype for dtype in row.dtypes if dtype in SAVINGS[row.op]], ["dense", "transposed", "with gaps", "empty"])
    ]
    options = Options(implementations={"kernel": "torch", **PROGRAMS})
    results = []
    assert kernel_calls(lambda: results.extend(run_ops([call for _, _, _, call, _ in cases], options))) > len(cases) // 2
    for (row, form, dtype, call, expected), result in zip(cases, results, strict=True):
        try:
            assert_equal(result, expected, tolerance=row.tolerance.get(dtype))
        except AssertionError as error:
            raise AssertionError(f"{row}, {form}, {dtype}, of {call.args}: {error}") from error


def test_every_op_has_a_row_and_an_out_variant() -> None:
    """The out variant writes results into the program's memory."""
    assert sorted(map(str, SAVINGS.keys() - {row.op for row in FASTER})) == []
    assert [str(op) for op in SAVINGS if _out_variant(op) is None] == []


@pytest.mark.sample(usual=3)
@pytest.mark.parametrize(
    ("function", "x", "expected"),
    [
        (torch.cos, torch.ones(ELEMENTS), 1),
        (torch.cos, torch.ones(1000), 0),
        (torch.cos, torch.ones(ELEMENTS, dtype=torch.bfloat16), 0),
        (lambda x: x**3, torch.ones(ELEMENTS), 0),
        (lambda x: x**0.3, torch.ones(ELEMENTS), 1),
        (lambda x: x.topk(3).values, torch.ones(ELEMENTS), 0),
        (lambda x: x.topk(3, largest=False).values, torch.ones(ELEMENTS), 1),
        (lambda x: torch.div(x, 3, rounding_mode="trunc"), torch.ones(ELEMENTS), 0),
        (lambda x: torch.div(x, 3, rounding_mode="floor"), torch.ones(ELEMENTS), 1),
        (lambda x: torch.floor_divide(x, x), torch.ones(ELEMENTS), 1),
        (lambda x: torch.complex(x, x).cos().real, torch.ones(ELEMENTS), 0),
        (lambda x: torch.fft.fft(x), torch.randn(400, 512), 1),
        (lambda x: torch.fft.irfft(torch.complex(x, x)), torch.randn(400, 513), 1),
        (lambda x: torch.fft.fft(x), torch.randn(400, 514), 0),  # 2 * 257
        (lambda x: torch.fft.fft(x), torch.randn(1, 1 << 18, dtype=torch.float64), 0),  # a single transform
        (lambda x: torch.matrix_exp(x), torch.randn(128, 128) / 30, 1),
        (lambda x: torch.matrix_exp(x), torch.randn(2000, 8, 8), 0),
    ],
)  # fmt: skip
def test_kernels_are_called_if_they_are_faster(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, expected: int) -> None:
    compiled = torch.compile(function, backend=backend_with(PROGRAMS), fullgraph=True)
    assert_equal(compiled(x), function(x), tolerance=(1e-2, 1e-2) if x.dtype == torch.bfloat16 else None)
    assert kernel_calls(lambda: compiled(x)) == expected
    for implementations, options in (({"kernel": "xla", **PROGRAMS}, {}), ({}, {"fallback": "error"})):
        compiled = torch.compile(function, backend=backend_with(implementations), fullgraph=True, options=options)
        assert kernel_calls(lambda compiled=compiled: compiled(x)) == 0


def test_gradients() -> None:
    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y = F.layer_norm(x.sin(), (1000,), w, b)
        return y.cumsum(-1).sort(-1).values.median(-1).values

    results_by_run = []
    for run in (function, torch.compile(function, backend="dynaxla", fullgraph=True)):
        generator = torch.Generator().manual_seed(0)
        leaves = [torch.randn(shape, generator=generator).requires_grad_() for shape in ((300, 1000), (1000,), (1000,))]
        result = run(*leaves)
        result.sum().backward()
        results_by_run.append([result.detach(), *(leaf.grad for leaf in leaves)])
    assert_equal(results_by_run[1], results_by_run[0], tolerance=(1e-4, 1e-4))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_gradients_of_bags(mode: str) -> None:
    """The gradients read values that the kernel has saved. The second bag is empty."""
    indices, offsets = torch.tensor([1, 2, 4, 1, 0, 3, 3, 1, 2]), torch.tensor([0, 3, 3, 7])

    def function(w: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
        bag = functools.partial(F.embedding_bag, indices, w, mode=mode)
        bags = [bag(offsets), bag(offsets, padding_idx=1), bag(F.pad(offsets, (0, 1), value=9), include_last_offset=True)]
        return [*bags, bag(offsets, per_sample_weights=weights)] if mode == "sum" else bags

    results_by_run = []
    for run in (function, torch.compile(function, backend=backend_with({"kernel": "torch", **PROGRAMS}), fullgraph=True)):
        leaves = [torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_() for shape in ((5, 3), (9,))]
        results = run(*leaves)
        grads = torch.autograd.grad(sum(result.sin().sum() for result in results), leaves, materialize_grads=True, allow_unused=True)
        results_by_run.append([*(result.detach() for result in results), *grads])
    assert_equal(results_by_run[1], results_by_run[0])
    assert kernel_calls(lambda: run(*leaves)) == len(results)


def test_no_kernels_in_a_jax_function() -> None:
    """JAX must be able to differentiate and batch the function."""
    import jax

    function = dynaxla.to_jax(lambda x: torch.cos(x).sum())
    x = jax.numpy.linspace(0, 1, ELEMENTS)
    before = dynaxla.metrics.snapshot().get("kernels", 0)
    gradient = jax.grad(function)(x)
    assert_equal(torch.from_dlpack(gradient), -torch.sin(torch.linspace(0, 1, ELEMENTS)), tolerance=(1e-5, 1e-5))
    assert dynaxla.metrics.snapshot().get("kernels", 0) == before
