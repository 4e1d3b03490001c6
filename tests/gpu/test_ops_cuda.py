"""Tests of ops with another implementation on a GPU than on the CPU, and of ops that depend on values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from support.comparisons.gpu_comparison import MARKS, assert_close
from support.comparisons.gpu_comparison import full_precision as full_precision

pytestmark = [*MARKS, pytest.mark.usefixtures("full_precision")]

DEVICE = "cuda"


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


def below(limit: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, limit, shape, device=DEVICE)


def distinct(*shape: int) -> torch.Tensor:
    """Returns distinct numbers, so that their order is unique."""
    count = int(torch.tensor(shape).prod())
    return torch.randperm(count).view(shape).float().to(DEVICE)


def positive_definite(count: int, size: int) -> torch.Tensor:
    x = numbers(count, size, size)
    return x @ x.mT + size * torch.eye(size, device=DEVICE)


def on_a_copy(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function, applied to a copy of its first argument."""
    return lambda x, *rest: function(x.clone(), *rest)


OPS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "solve": (torch.linalg.solve, lambda: (positive_definite(3, 6), numbers(3, 6, 2))),
    "cholesky": (torch.linalg.cholesky, lambda: (positive_definite(3, 6),)),
    "inverse": (torch.linalg.inv, lambda: (positive_definite(3, 6),)),
    "determinant": (torch.linalg.slogdet, lambda: (positive_definite(3, 6),)),
    "eigenvalues": (torch.linalg.eigvalsh, lambda: (positive_definite(3, 6),)),
    "singular values": (torch.linalg.svdvals, lambda: (numbers(3, 6, 4),)),
    "triangular": (
        lambda a, b: torch.linalg.solve_triangular(a.triu(), b, upper=True),
        lambda: (positive_definite(3, 6), numbers(3, 6, 2)),
    ),
    "fft": (lambda x: torch.view_as_real(torch.fft.fft(x)), lambda: (numbers(4, 30),)),
    "real fft and back": (lambda x: torch.fft.irfft2(torch.fft.rfft2(x) * 2, s=x.shape[-2:]), lambda: (numbers(2, 15, 16),)),
    "complex product": (lambda x, y: torch.view_as_real(x @ y.mH), lambda: (numbers(5, 5, dtype=torch.complex64),) * 2),
    "sort": (lambda x: torch.sort(x, -1, descending=True), lambda: (distinct(4, 100),)),
    "stable sort": (lambda x: torch.sort(x, stable=True), lambda: (below(5, 200),)),
    "topk": (lambda x: torch.topk(x, 7), lambda: (distinct(4, 100),)),
    "kthvalue": (lambda x: torch.kthvalue(x, 7), lambda: (distinct(4, 100),)),
    "median": (lambda x: torch.median(x, -1), lambda: (distinct(4, 101),)),
    "searchsorted": (torch.searchsorted, lambda: (distinct(50).sort().values, numbers(20) * 50)),
    "cumulative": (lambda x: (x.cumsum(-1), x.cumprod(-1), x.cummax(-1), x.logcumsumexp(-1)), lambda: (numbers(4, 300),)),
    "argmax": (lambda x: (x.argmax(-1), x.amax(0), x.max(-1)), lambda: (distinct(4, 300),)),
    "gather": (lambda x, i: x.gather(1, i), lambda: (numbers(4, 9), below(9, 4, 5))),
    "scatter_add": (on_a_copy(lambda x, i, y: x.scatter_add_(1, i, y)), lambda: (numbers(4, 9), below(9, 4, 20), numbers(4, 20))),
    "scatter_reduce": (
        on_a_copy(lambda x, i, y: x.scatter_reduce_(1, i, y, "amax", include_self=True)),
        lambda: (numbers(4, 9), below(9, 4, 20), numbers(4, 20)),
    ),
    "index_put": (on_a_copy(lambda x, i, y: x.index_put_((i,), y, accumulate=True)), lambda: (numbers(9, 4), below(9, 30), numbers(30, 4))),
    "index_add": (on_a_copy(lambda x, i, y: x.index_add_(0, i, y)), lambda: (numbers(9, 4), below(9, 30), numbers(30, 4))),
    "masked_fill": (lambda x: x.masked_fill(x > 0, -torch.inf).softmax(-1), lambda: (numbers(4, 50),)),
    "one_hot": (lambda i: F.one_hot(i, 9), lambda: (below(9, 20),)),
    "cross entropy": (lambda x, i: F.cross_entropy(x, i, ignore_index=3, label_smoothing=0.1), lambda: (numbers(20, 9), below(9, 20))),
    "conv1d": (lambda x, w: F.conv1d(x, w, stride=2, padding=2), lambda: (numbers(2, 6, 30), numbers(8, 6, 5))),
    "depthwise": (lambda x, w: F.conv2d(x, w, padding="same", groups=6), lambda: (numbers(2, 6, 9, 9), numbers(12, 1, 3, 3))),
    "dilated": (lambda x, w: F.conv2d(x, w, dilation=(2, 1), groups=2), lambda: (numbers(2, 6, 9, 9), numbers(4, 3, 3, 2))),
    "transposed": (lambda x, w: F.conv_transpose2d(x, w, stride=2, output_padding=1), lambda: (numbers(2, 6, 9, 9), numbers(6, 4, 3, 3))),
    "conv3d": (lambda x, w: F.conv3d(x, w, padding=1), lambda: (numbers(1, 2, 6, 6, 6), numbers(4, 2, 3, 3, 3))),
    "group norm": (lambda x, w: F.group_norm(x, 3, w, w), lambda: (numbers(2, 6, 9, 9), numbers(6))),
    "batch norm": (lambda x, w: F.batch_norm(x, None, None, w, w, True), lambda: (numbers(4, 6, 9, 9), numbers(6))),
    "pooling": (
        lambda x: (F.max_pool2d(x, 3, 2, 1), F.avg_pool2d(x, 3, 2, 1), F.adaptive_avg_pool2d(x, 4)),
        lambda: (numbers(2, 6, 9, 9),),
    ),
    "grid_sample": (
        lambda x, grid: F.grid_sample(x, grid.tanh(), mode="bilinear", align_corners=False),
        lambda: (numbers(2, 3, 9, 9), numbers(2, 5, 5, 2)),
    ),
    "attention": (F.scaled_dot_product_attention, lambda: tuple(numbers(2, 4, 12, 16) for _ in range(3))),
    "attention with a mask": (
        lambda q, mask: F.scaled_dot_product_attention(q, q, q, attn_mask=mask > 0),
        lambda: (numbers(2, 4, 12, 16), torch.tril(torch.ones(12, 12, device=DEVICE))),
    ),
    "float64": (lambda x: (x @ x.mT).exp().sum(-1), lambda: (numbers(9, 9, dtype=torch.float64),)),
    "integers": (lambda x, y: (x // (y + 1), x % (y + 1), x << 2, x ^ y), lambda: (below(1000, 50), below(50, 50))),
    "special functions": (
        lambda x: (torch.erfinv(x.tanh()), torch.lgamma(x), torch.special.i0e(x), torch.digamma(x)),
        lambda: (numbers(200),),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPS)
def test_op(name: str) -> None:
    function, inputs = OPS[name]
    args = inputs()
    compiled = torch.compile(function, backend="dynaxla")
    for _ in range(2):
        assert_close(compiled(*args), function(*args), 1e-3)


@pytest.mark.parametrize("name", ["solve", "cholesky", "inverse", "fft", "sort", "gather", "scatter_add", "depthwise", "grid_sample"])
def test_gradient(name: str) -> None:
    function, inputs = OPS[name]
    args = inputs()
    gradients = []
    for call in (torch.compile(function, backend="dynaxla"), function):
        leaves = [arg.detach().clone().requires_grad_(arg.is_floating_point()) for arg in args]
        result = call(*leaves)
        (result[0] if isinstance(result, tuple) else result).square().sum().backward()
        gradients.append([leaf.grad for leaf in leaves])
    assert_close(*gradients, 1e-2)


def calls_in_turn(compiled: Callable[..., torch.Tensor], *args: torch.Tensor) -> list[torch.Tensor]:
    """Returns the results of calls, each of which is finished before the next begins."""
    results = []
    for arg in args:
        results.append(compiled(arg))
        if DEVICE == "cuda":
            torch.cuda.synchronize()
    return results


def test_index_out_of_range() -> None:
    """No call waits for the device, so a later call of the program raises the error. The next call works."""
    table = numbers(9, 4)
    compiled = torch.compile(lambda i: F.embedding(i, table), backend="dynaxla")
    good, bad = below(9, 5), torch.tensor([1, 9, 2, 3, 4], device=DEVICE)
    assert_close(calls_in_turn(compiled, good), [table[good]])
    with pytest.raises((IndexError, RuntimeError)):
        calls_in_turn(compiled, bad, good, good)
    assert_close(calls_in_turn(compiled, good), [table[good]])


def test_numbers_out_of_the_range_of_the_dtype() -> None:
    x = torch.tensor([1, 0, 100], dtype=torch.int8, device=DEVICE)
    for function in (lambda x: x.clamp(max=300), lambda x: F.pad(x, (1, 1), value=300), lambda x: x + 300):
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="dynaxla")
        try:
            expected = function(x)
        except RuntimeError as error:
            with pytest.raises(RuntimeError, match=str(error)):
                calls_in_turn(compiled, x, x, x)
        else:
            assert_close(calls_in_turn(compiled, x), [expected])


def test_singular_matrix() -> None:
    compiled = torch.compile(torch.linalg.inv, backend="dynaxla")
    good = positive_definite(1, 4)[0]
    assert_close(calls_in_turn(compiled, good), [torch.linalg.inv(good)], 1e-3)
    with pytest.raises(RuntimeError):
        calls_in_turn(compiled, torch.zeros_like(good), good, good)
    assert_close(calls_in_turn(compiled, good), [torch.linalg.inv(good)], 1e-3)


def test_size_that_depends_on_values() -> None:
    compiled = torch.compile(lambda x: x[x > 0].sum() + torch.nonzero(x).shape[0], backend="dynaxla")
    x = numbers(50)
    assert_close(compiled(x), x[x > 0].sum() + 50)


def test_op_without_a_lowering() -> None:
    """torch's kernel runs on the GPU, within a program or between programs."""
    with torch.library._scoped_library("on_gpu", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        torch.library.register_fake("on_gpu::twice", lambda x: torch.empty_like(x), lib=library)
        x = numbers(20)
        assert_close(torch.compile(lambda x: torch.ops.on_gpu.twice(x + 1) - 1, backend="dynaxla")(x), (x + 1) * 2 - 1)


def test_new_addresses_in_each_call() -> None:
    """If XLA replays a recorded command buffer, it must use the new addresses."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x.exp() @ y).softmax(-1)

    compiled = torch.compile(function, backend="dynaxla")
    y, calls = numbers(16, 16), []
    for _ in range(12):
        x = numbers(16, 16)
        calls.append((x, compiled(x, y)))
    for x, result in calls:
        assert_close(result, function(x, y))
