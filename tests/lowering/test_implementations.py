"""Implementations of ops: the choice among them, and the agreement of each with eager mode."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dynaxla.errors import OptionError
from dynaxla.lowering import registry
from dynaxla.lowering.cpu import onednn_support
from dynaxla.lowering.implementations import IMPLEMENTATIONS, Implementations, RecordingChooser, choose_generic
from dynaxla.lowering.ops.matmul import CONTRACTION, Contraction
from dynaxla.observe import events
from support import internals
from support.comparisons.compare import assert_equal
from support.forced_implementations import backend_with

registry.fill()  # registers all implementations
needs_onednn = pytest.mark.skipif(not onednn_support.is_available(), reason="this XLA:CPU has no oneDNN")

TOLERANCE = {torch.float32: (1e-4, 1e-4), torch.bfloat16: (3e-2, 3e-2)}


def compiled(
    function: Callable[..., torch.Tensor], implementations: dict[str, str], dump: Path | None = None
) -> Callable[..., torch.Tensor]:
    return torch.compile(function, backend=backend_with(implementations), fullgraph=True, options={"fallback": "error", "dump": dump})


@contextlib.contextmanager
def recorded_choices() -> Iterator[list[tuple[str, str]]]:
    """Yields a list of the (op, implementation) pairs that are chosen inside the context."""
    found: list[tuple[str, str]] = []
    with events.listening(
        lambda event: found.append((event.op, event.implementation)) if isinstance(event, events.ImplementationChosen) else None
    ):
        yield found


@dataclass(frozen=True)
class SizeProblem:
    size: int
    platform: str = "cpu"


def test_choice_by_platform_support_and_preference(monkeypatch: pytest.MonkeyPatch) -> None:
    internals.no_other_implementations(monkeypatch)
    implementations: Implementations[SizeProblem] = Implementations("test_choice")

    @implementations.implementation(
        "few", platforms=["cpu", "tpu"], supports=lambda problem: problem.size < 100, preferred=lambda problem: problem.size < 10
    )
    def _few(problem: SizeProblem) -> str:
        return "few"

    @implementations.implementation("any")
    def _any(problem: SizeProblem) -> str:
        return "any"

    for problem, forced, name in ((5, "", "few"), (50, "", "any"), (50, "few", "few"), (500, "few", "any"), (5, "any", "any")):
        assert implementations.choose(SizeProblem(problem), {"test_choice": forced} if forced else {}).name == name
    for platform, names in (("cpu", ["few", "any"]), ("tpu", ["few", "any"]), ("cuda", ["any"])):
        assert [implementation.name for implementation in implementations.available(SizeProblem(5, platform), {})] == names
    assert [implementation.name for implementation in implementations.available(SizeProblem(5, "cuda"), {"test_choice": "few"})] == ["any"]


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
def test_last_implementation_supports_everything(op: str) -> None:
    last = list(IMPLEMENTATIONS[op].by_name.values())[-1]
    assert last.platforms == ()
    assert not last.is_refusable
    assert choose_generic(IMPLEMENTATIONS[op], None) is last


@pytest.mark.parametrize("forced", [{}, {"test_choices": "library"}], ids=["", "forced"])
def test_refusable_implementations_can_be_avoided(forced: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    internals.no_other_implementations(monkeypatch)
    implementations: Implementations[SizeProblem] = Implementations("test_choices")
    implementations.implementation("library", supports=lambda problem: problem.size > 1, is_refusable=True)(lambda problem: None)
    implementations.implementation("elsewhere", platforms=["tpu"])(lambda problem: None)
    implementations.implementation("large", preferred=lambda problem: problem.size > 100)(lambda problem: None)
    implementations.implementation("any")(lambda problem: None)
    chooser = RecordingChooser(lambda implementations, problem: implementations.choose(problem, forced))
    assert chooser(implementations, SizeProblem(1)).name == "any"
    assert chooser.refusable == set()
    assert [chooser(implementations, SizeProblem(size)).name for size in (2, 200)] == ["library", "library"]
    assert chooser.refusable == {"test_choices=library"}
    chooser.avoids_refusable = True
    assert [chooser(implementations, SizeProblem(size)).name for size in (1, 2, 200)] == ["any", "any", "large"]


@pytest.mark.parametrize(
    ("implementations", "hint"),
    [
        ({"convolutoin": "xla"}, "did you mean 'convolution'"),
        ({"contraction": "fast"}, "its implementations are: torch, torch_int8, terms, onednn, one_vector, xla"),
    ],
)
def test_unknown_names_raise(implementations: dict[str, str], hint: str) -> None:
    with pytest.raises(OptionError, match=hint):
        compiled(torch.exp, implementations)(torch.ones(2))


def test_errors_in_the_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAXLA_IMPLEMENTATIONS", "convolution")
    with pytest.raises(OptionError, match="op=implementation"):
        torch.compile(torch.exp, backend="dynaxla")(torch.ones(2))
    monkeypatch.setenv("DYNAXLA_IMPLEMENTATIONS", "convolution=slow")
    with pytest.raises(OptionError, match="no implementation 'slow'"):
        torch.compile(torch.exp, backend="dynaxla")(torch.ones(3))


CONVOLUTIONS = [
    pytest.param(space, groups, stride, padding, dilation, id=f"{space}d-groups{groups}-stride{stride}-padding{padding}-dilation{dilation}")
    for space, groups, stride, padding, dilation in (
        (1, 1, 2, 1, 1), (1, 2, 1, 0, 2), (2, 1, 1, 0, 1), (2, 1, 3, 2, 2), (2, 6, 1, 1, 1), (2, 2, 2, 1, 1),
        (3, 1, 2, 1, 1), (3, 2, 1, 1, 2),
    )
]  # fmt: skip


@pytest.mark.sample(usual=3)
@pytest.mark.usefixtures("quick_xla")
@pytest.mark.parametrize("implementations", [("onednn", "torch"), ("torch", "torch"), ("xla", "xla")], ids=["onednn", "torch", "xla"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("space", "groups", "stride", "padding", "dilation"), CONVOLUTIONS)
def test_convolution(
    implementations: tuple[str, str], dtype: torch.dtype, space: int, groups: int, stride: int, padding: int, dilation: int
) -> None:
    """Also the gradients, and the transposed convolution."""
    torch.manual_seed(0)
    chosen = dict(zip(("convolution", "weight_gradient"), implementations, strict=True))
    settings = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    convolve = getattr(F, f"conv{space}d")
    transposed = getattr(F, f"conv_transpose{space}d")
    x = torch.randn(2, 6, *[9, 10, 11][:space], dtype=dtype)
    weight = torch.randn(12, 6 // groups, *[3, 2, 3][:space], dtype=dtype)
    transposed_weight = torch.randn(6, 12 // groups, *[3, 2, 3][:space], dtype=dtype)
    bias = torch.randn(12, dtype=dtype)
    for function, kernel in ((convolve, weight), (transposed, transposed_weight)):
        mine, theirs = [[tensor.clone().requires_grad_() for tensor in (x, kernel, bias)] for _ in range(2)]

        def run(*tensors: torch.Tensor, function: Callable[..., torch.Tensor] = function) -> torch.Tensor:
            return function(*tensors, **settings)

        result, expected = compiled(run, chosen)(*mine), run(*theirs)
        assert_equal(result, expected, values=False)
        # Some processors' kernels add up transposed convolutions in bfloat16: eager mode's are 0.18 off there.
        exact = run(*(tensor.detach().double() for tensor in theirs))
        eager_error = float((expected.detach() - exact).abs().max())
        torch.testing.assert_close(result.detach().double(), exact, rtol=TOLERANCE[dtype][0], atol=TOLERANCE[dtype][1] + eager_error)
        upstream = torch.randn_like(expected)
        result.backward(upstream)
        expected.backward(upstream)
        for tensor, other in zip(mine, theirs, strict=True):
            assert tensor.grad is not None
            assert other.grad is not None
            limit = TOLERANCE[dtype][0] * float(other.grad.abs().max())
            torch.testing.assert_close(tensor.grad, other.grad, rtol=0, atol=limit)


def test_output_padding_beyond_the_stride() -> None:
    """The gradient of such a transposed convolution differs from that of every convolution of the same shapes."""
    torch.manual_seed(0)
    tensors = [torch.randn(2, 2, 4, 4), torch.randn(2, 2, 4, 5), torch.randn(4)]
    settings = {"stride": (3, 2), "padding": (1, 2), "output_padding": (2, 3), "groups": 2, "dilation": (4, 4)}
    mine, theirs = [[tensor.clone().requires_grad_() for tensor in tensors] for _ in range(2)]
    chosen = {"convolution": "torch", "weight_gradient": "torch"}
    result, expected = compiled(lambda *args: F.conv_transpose2d(*args, **settings), chosen)(*mine), F.conv_transpose2d(*theirs, **settings)
    result.sin().sum().backward()
    expected.sin().sum().backward()
    torch.testing.assert_close([tensor.grad for tensor in mine], [tensor.grad for tensor in theirs], rtol=1e-4, atol=1e-4)


WINDOWS = [  # sizes, kernel, stride, padding
    ((12,), (5,), (1,), (2,)), ((9, 10), (5, 5), (1, 2), (2, 2)), ((9, 10), (3, 8), (2, 1), (0, 7)), ((4, 4), (7, 7), (1, 1), (3, 3)),
    ((5, 9), (2, 4), (3, 5), (1, 0)), ((13,), (3,), (2,), (0,)),
]  # fmt: skip


@pytest.mark.sample(usual=6)
@pytest.mark.usefixtures("quick_xla")
@pytest.mark.parametrize(
    ("implementation", "dtype", "sizes", "kernel", "stride", "padding"),
    [("columns", dtype, *window) for dtype in (torch.float32, torch.bfloat16) for window in WINDOWS]
    + [("strips", dtype, *window) for dtype in (torch.float32, torch.bfloat16) for window in WINDOWS if len(window[0]) == 2]
    + [("sums", dtype, *window) for dtype in (torch.float32, torch.bfloat16) for window in WINDOWS if len(window[0]) == 1]
    + [("taps", torch.float32, *window) for window in WINDOWS if len(window[0]) == 1],
)
def test_weight_gradient_by_torch(
    implementation: str,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 6, *sizes, dtype=dtype)
    groups = 6 if implementation in ("strips", "sums") else 1
    weight = torch.randn(6, 6 // groups, *kernel, dtype=dtype)
    function = functools.partial(getattr(F, f"conv{len(sizes)}d"), x, stride=stride, padding=padding, groups=groups)
    mine, theirs = weight.clone().requires_grad_(), weight.double().requires_grad_()
    with recorded_choices() as implementations:
        result = compiled(function, {"weight_gradient": implementation})(mine)
        upstream = torch.randn_like(result)
        result.backward(upstream)
    assert ("weight_gradient", implementation) in implementations
    exact = getattr(F, f"conv{len(sizes)}d")(x.double(), theirs, stride=stride, padding=padding, groups=groups)
    exact.backward(upstream.double())
    assert mine.grad is not None
    assert theirs.grad is not None
    assert mine.grad.stride() == weight.stride()
    limit = TOLERANCE[dtype][0] * float(theirs.grad.abs().max())
    torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=0, atol=limit)


@pytest.mark.sample(usual=2)
@pytest.mark.usefixtures("quick_xla")
@pytest.mark.parametrize("block", [1, 1500, 4000, 1 << 20])
@pytest.mark.parametrize(("sizes", "kernel", "stride", "padding"), [((9, 10), (3, 5), (1, 2), (1, 2)), ((13,), (3,), (2,), (1,))])
def test_columns_in_blocks(
    sizes: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    block: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A block has some rows of one sample, one sample, several samples, or all. The last block is smaller than the others."""
    internals.bytes_of_weight_gradient_blocks(monkeypatch, block)
    torch.manual_seed(0)
    x, weight = torch.randn(5, 6, *sizes), torch.randn(7, 6, *kernel, requires_grad=True)
    function = functools.partial(getattr(F, f"conv{len(sizes)}d"), x, stride=stride, padding=padding)
    upstream = torch.randn_like(function(weight))
    (mine,) = torch.autograd.grad(compiled(function, {"weight_gradient": "columns"})(weight), weight, upstream)
    (theirs,) = torch.autograd.grad(function(weight), weight, upstream)
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.sample(usual=3)
@pytest.mark.parametrize("has_avx2_alone", [False, True])
@pytest.mark.parametrize(
    ("x", "weight", "padding", "groups", "implementation"),
    [
        ((4, 32, 14, 14), (32, 1, 5, 5), 2, 32, "strips"),
        ((4, 64, 14, 14), (64, 1, 3, 3), 1, 64, "torch"),
        ((4, 32, 100), (32, 1, 31), 15, 32, "sums"),
        ((1, 64, 7, 7), (64, 64, 3, 3), 1, 1, "columns"),
        ((4, 64, 14, 14), (64, 64, 3, 3), 1, 1, "columns with AVX2, else torch"),
        ((4, 64, 14, 14), (48, 64, 3, 3), 1, 1, "torch"),
        ((1, 3, 64, 64), (64, 3, 7, 7), 3, 1, "torch"),
        ((1, 16, 6, 6, 6), (64, 16, 3, 3, 3), 1, 1, "torch"),
        ((2, 32, 300), (32, 32, 3), 1, 1, "taps"),
        ((2, 32, 300), (32, 32, 5), 1, 1, "torch"),
    ],
)
def test_choice_of_weight_gradient(
    x: tuple[int, ...],
    weight: tuple[int, ...],
    padding: int,
    groups: int,
    implementation: str,
    has_avx2_alone: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    internals.processor(monkeypatch, avx2_alone=has_avx2_alone)
    if " else " in implementation:
        implementation = implementation.split()[0 if has_avx2_alone else -1]
    kernel = torch.randn(weight, requires_grad=True)
    convolve = getattr(F, f"conv{len(x) - 2}d")
    with recorded_choices() as implementations:
        compiled(lambda kernel: convolve(torch.ones(x), kernel, padding=padding, groups=groups).sin().sum(), {})(kernel).backward()
    assert [name for op, name in implementations if op == "weight_gradient"] == [implementation]


@pytest.mark.usefixtures("quick_xla")
@needs_onednn
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_weight_gradient_by_product(stride: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 6, 9, 10, dtype=dtype), torch.randn(12, 6, 1, 1, dtype=dtype)

    def gradient(weight: torch.Tensor) -> torch.Tensor:
        (grad,) = torch.autograd.grad(F.conv2d(x, weight, stride=stride).square().sum(), weight)
        return grad

    expected = gradient(weight.clone().requires_grad_())
    function = compiled(lambda weight: F.conv2d(x, weight, stride=stride), {"weight_gradient": "product"})
    mine = weight.clone().requires_grad_()
    function(mine).square().sum().backward()
    assert mine.grad is not None
    torch.testing.assert_close(mine.grad, expected, rtol=0, atol=TOLERANCE[dtype][0] * float(expected.abs().max()))


@pytest.mark.sample(usual=5)
@pytest.mark.usefixtures("quick_xla")
@needs_onednn
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("x", "weight", "stride"),
    [
        ((2, 8, 9, 10), (16, 8, 1, 1), 1),
        ((2, 3, 32, 48), (64, 3, 16, 16), 16),
        ((2, 3, 33, 48), (64, 3, 16, 16), 16),
        ((2, 4, 32), (6, 4, 8), 8),
        ((2, 4, 8, 8, 8), (6, 4, 4, 2, 2), (4, 2, 2)),
    ],
)
def test_patches(x: tuple[int, ...], weight: tuple[int, ...], stride: int, transposed: bool, dtype: torch.dtype) -> None:
    """Adjacent windows, which become one matrix product, and windows for which this is not possible."""
    torch.manual_seed(0)
    shape = (x[1], weight[0], *weight[2:]) if transposed else weight
    tensors = [torch.randn(x, dtype=dtype), torch.randn(shape, dtype=dtype), torch.randn(weight[0], dtype=dtype)]
    function = getattr(F, f"conv_transpose{len(x) - 2}d" if transposed else f"conv{len(x) - 2}d")

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        return function(*tensors, stride=stride)

    assert_equal(compiled(run, {"convolution": "patches"})(*tensors), run(*tensors), tolerance=TOLERANCE[dtype])


POOLS = [
    pytest.param(space, settings, id=f"{space}d-" + "-".join(f"{name}{value}" for name, value in settings.items()))
    for space, settings in (
        (2, {"kernel_size": 3, "stride": 2, "padding": 1}),
        (2, {"kernel_size": (2, 3), "stride": 1, "dilation": 2}),
        (2, {"kernel_size": 3, "stride": 3, "ceil_mode": True}),
        (3, {"kernel_size": 2, "padding": 1}),
    )
]


@pytest.mark.sample(usual=5)
@pytest.mark.usefixtures("quick_xla")
@pytest.mark.parametrize("implementations", [("torch", "torch"), ("taps", "taps"), ("taps", "scatter")], ids=["torch", "taps", "scatter"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("channels_last", [False, True], ids=["", "channels_last"])
@pytest.mark.parametrize(("space", "settings"), POOLS)
def test_max_pool(implementations: tuple[str, str], dtype: torch.dtype, channels_last: bool, space: int, settings: dict[str, Any]) -> None:
    """Also the gradient. The first of equal maxima counts."""
    torch.manual_seed(0)
    pool = getattr(F, f"max_pool{space}d")
    x = torch.randint(0, 5, (2, 3, 9, 10, 11)[: space + 2]).to(dtype)
    if channels_last:
        x = x.to(memory_format=torch.channels_last if space == 2 else torch.channels_last_3d)

    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, positions = pool(x, return_indices=True, **settings)
        return out, positions

    function = compiled(run, dict(zip(("max_pool", "max_pool_gradient"), implementations, strict=True)))
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    results, expected = function(mine), run(theirs)
    for result, reference in zip(results, expected, strict=True):
        assert_equal(result, reference, tolerance=(0, 0))
    upstream = torch.randn_like(expected[0])
    results[0].backward(upstream)
    expected[0].backward(upstream)
    assert mine.grad is not None
    assert theirs.grad is not None
    assert_equal(mine.grad, theirs.grad, tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("implementation", ["torch", "onednn", "xla"])
@pytest.mark.parametrize("transposed", [(False, False), (False, True), (True, False), (True, True)])
def test_matrix_products(implementation: str, transposed: tuple[bool, bool]) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(130, 140), torch.randn(140, 150)
    tensors = [item.t().contiguous() if is_transposed else item for item, is_transposed in zip((x, y), transposed, strict=True)]

    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x.t() if transposed[0] else x) @ (y.t() if transposed[1] else y)

    assert_equal(compiled(run, {"contraction": implementation})(*tensors), run(*tensors), tolerance=(1e-4, 1e-4))


@needs_onednn
@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "implementation"),
    [
        (1, 4096, "float32", "one_vector"), (1, 256, "float32", "xla"), (1, 4096, "bfloat16", "one_vector"),
        (2, 256, "float32", "onednn"), (2, 128, "float32", "xla"),
        (16, 256, "float32", "onednn"), (17, 100, "float32", "xla"), (100, 100, "float32", "onednn"),
    ],
)  # fmt: skip
def test_choice_for_a_linear_layer(rows: int, columns: int, dtype: str, implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer has 768 inputs."""
    internals.processor(monkeypatch, intel=False)
    kind = jax.numpy.dtype(dtype)
    problem = Contraction((rows, 768), (columns, 768), ((1,), (1,)), ((), ()), kind, kind, jax.lax.Precision.HIGHEST, "cpu")
    assert CONTRACTION.choose(problem, {}).name == implementation


@needs_onednn
@pytest.mark.parametrize(
    ("x", "y", "contracted", "has_avx2_alone", "implementation"),
    [
        ((512, 2048), (2048, 512), (1, 0), True, "torch"), ((2048, 512), (2048, 512), (0, 0), True, "torch"),
        ((512, 512), (512, 256), (0, 0), True, "torch"), ((512, 2048), (2048, 512), (1, 0), False, "onednn"),
        ((512, 2048), (512, 2048), (1, 1), True, "onednn"), ((2048, 2048), (2048, 512), (1, 0), True, "onednn"),
        ((512, 2048), (2048, 520), (1, 0), True, "onednn"), ((256, 128), (128, 512), (1, 0), True, "onednn"),
        ((1, 8192), (8192, 8192), (1, 0), True, "xla"),
    ],
)  # fmt: skip
def test_sizes_for_which_onednn_is_slow(
    x: tuple[int, ...],
    y: tuple[int, ...],
    contracted: tuple[int, int],
    has_avx2_alone: bool,
    implementation: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With AVX2 alone, and reads at a stride of at least 2 KB."""
    internals.processor(monkeypatch, avx2_alone=has_avx2_alone, intel=False)
    kind, dims = jax.numpy.dtype("float32"), ((contracted[0],), (contracted[1],))
    problem = Contraction(x, y, dims, ((), ()), kind, kind, jax.lax.Precision.HIGHEST, "cpu")
    assert CONTRACTION.choose(problem, {}).name == implementation


def test_mkl_computes_small_products_on_intel_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    internals.processor(monkeypatch, avx2_alone=True)
    kind = jax.numpy.dtype("float32")
    problem = Contraction((256, 128), (128, 512), ((1,), (0,)), ((), ()), kind, kind, jax.lax.Precision.HIGHEST, "cpu")
    for is_intel in (True, False):
        internals.processor(monkeypatch, intel=is_intel)
        assert (CONTRACTION.choose(problem, {}).name == "torch") is is_intel


@needs_onednn
@pytest.mark.parametrize("has_avx2_alone", [True, False])
def test_weight_gradient_for_which_onednn_is_slow(has_avx2_alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel has size 1x1."""
    internals.processor(monkeypatch, avx2_alone=has_avx2_alone)
    torch.manual_seed(0)
    x, weight = torch.randn(2, 512, 14, 14), torch.randn(128, 512, 1, 1, requires_grad=True)
    with recorded_choices() as implementations:
        out = compiled(lambda weight: F.conv2d(x, weight, stride=2), {})(weight)
        upstream = torch.randn_like(out)
        (mine,) = torch.autograd.grad(out, weight, upstream)
    (theirs,) = torch.autograd.grad(F.conv2d(x, weight, stride=2), weight, upstream)
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-3)
    assert [name for op, name in implementations if op == "weight_gradient"] == ["columns" if has_avx2_alone else "product"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_type_layer_of_one_row_converts_no_weight(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    weight, other, bias = (torch.randn(shape, dtype=dtype) for shape in ((72, 256), (72, 264), (72,)))

    def run(x: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.linear(x, weight, bias)) @ other

    x = torch.randn(1, 256, dtype=dtype)
    assert_equal(compiled(run, {}, tmp_path)(x), run(x), tolerance=(2e-2, 0.5))
    (program,) = [path.read_text() for path in tmp_path.glob("*.hlo.txt")]
    assert program.count(" dot(") == 1, "only the last step of the sums of the linear layer"
    assert not re.search(r"(call|fusion|custom-call)\(.*f32\[(72,256|72,264)\]", program.split("ENTRY")[1])


def test_transposes_before_a_product_move_nothing(tmp_path: Path) -> None:
    """Also several transposes: the gradient of a linear layer is a product with the weight as stored."""
    weight = torch.randn(256, 256)
    function = compiled(lambda x: x @ weight.t().detach().transpose(0, 1), {}, tmp_path)
    x = torch.randn(256, 256)
    assert_equal(function(x), x @ weight, tolerance=(1e-3, 1e-3))
    (program,) = [path.read_text() for path in tmp_path.glob("*.hlo.txt")]
    assert " transpose(" not in program
    assert " copy(" not in program


@needs_onednn
def test_activations_stay_channels_last(tmp_path: Path) -> None:
    """No transposes between convolutions: the program only converts its input, if the input is not channels-last."""
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
    ).eval()
    x = torch.randn(2, 3, 32, 32)
    function = compiled(net, {}, tmp_path)
    with torch.no_grad():
        for example in (x, x.to(memory_format=torch.channels_last)):
            assert_equal(function(example), net(example), tolerance=(1e-4, 1e-4))
    programs = [path.read_text().split("ENTRY")[1] for path in sorted(tmp_path.glob("*.hlo.txt"))]
    assert [program.count('custom_call_target="__onednn$convolution"') for program in programs] == [2, 2]
    # A move that is fused with other work is no separate pass over memory.
    moves = ("calls=%wrapped_copy", "calls=%wrapped_transpose", " copy(", " transpose(", "  %transpose_copy_fusion")
    assert [sum(program.count(move) for move in moves) for program in programs] == [1, 0]


@pytest.mark.sample(usual=8)
@pytest.mark.parametrize("implementation", ["onednn", "xla"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "activation",
    [None, F.gelu, lambda x: F.gelu(x, approximate="tanh"), torch.sigmoid, torch.tanh, F.relu],
    ids=["none", "gelu", "gelu_tanh", "sigmoid", "tanh", "relu"],
)
def test_linear(implementation: str, dtype: torch.dtype, activation: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 5, 8, dtype=dtype), torch.randn(6, 8, dtype=dtype), torch.randn(6, dtype=dtype)
    x[0, 0, 0] = torch.nan

    def layer(x: torch.Tensor) -> torch.Tensor:
        out = F.linear(x, weight, bias)
        return out if activation is None else activation(out)

    assert_equal(compiled(layer, {"contraction": implementation})(x), layer(x), tolerance=TOLERANCE[dtype])


@needs_onednn
def test_activation_is_not_fused_if_the_product_is_returned() -> None:
    x, weight, bias = torch.randn(4, 8), torch.randn(6, 8), torch.randn(6)

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = F.linear(x, weight, bias)
        return out, F.gelu(out)

    for mine, theirs in zip(compiled(both, {"contraction": "onednn"})(x), both(x), strict=True):
        assert_equal(mine, theirs, tolerance=(1e-5, 1e-5))


@pytest.mark.parametrize("implementation", ["onednn", "xla"])
@pytest.mark.parametrize("heads_inside", [True, False])
def test_attention(implementation: str, heads_inside: bool) -> None:
    torch.manual_seed(0)
    shape = (2, 7, 3, 8) if heads_inside else (2, 3, 7, 8)
    tensors = [torch.randn(shape) for _ in range(3)]
    views = [tensor.transpose(1, 2) if heads_inside else tensor for tensor in tensors]
    assert_equal(
        compiled(F.scaled_dot_product_attention, {"contraction": implementation})(*views),
        F.scaled_dot_product_attention(*views),
        tolerance=(1e-5, 1e-5),
    )


@pytest.mark.sample(usual=3)
@pytest.mark.usefixtures("quick_xla")
@pytest.mark.parametrize("implementation", ["onednn", "xla"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(("shape", "count"), [((7, 70), 1), ((70,), 1), ((2, 3, 5, 7), 2), ((2, 1, 3, 1, 2, 1, 9), 1), ((0, 5), 1)])
def test_layer_norm(implementation: str, dtype: torch.dtype, affine: bool, shape: tuple[int, ...], count: int) -> None:
    torch.manual_seed(0)
    x = (torch.randn(shape) * 3 + 2).to(dtype)
    inner = shape[len(shape) - count :]
    parameters = [torch.randn(inner, dtype=dtype) for _ in range(2)] if affine else []
    if x.numel():
        x.view(-1)[0] = float("nan")

    def run(x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, inner, *parameters)

    assert_equal(compiled(run, {"layer_norm": implementation})(x, *parameters), run(x, *parameters), tolerance=TOLERANCE[dtype])
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    compiled(run, {"layer_norm": implementation})(mine, *parameters).sum().backward()
    run(theirs, *parameters).sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=TOLERANCE[dtype][0], atol=TOLERANCE[dtype][1], equal_nan=True)
