"""Calls that eager mode refuses because of a dtype, a dimension or a number.

Programs refuse them with the same exception and message, although fake tensors and XLA would accept them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.exc import TorchRuntimeError
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from cases.conformance.entries import entries
from dynaxla.errors import UnsupportedOp
from dynaxla.lowering import kernel_refusals

LONG, HALF, COMPLEX = torch.int64, torch.float16, torch.complex64


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def error_of(function: Callable[..., Any], *args: Any) -> Exception | None:
    try:
        with torch.no_grad():
            function(*args)
    except Exception as error:
        return error
    return None


CALLS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "mm": (torch.mm, (ones(20, 30), ones(30, 2, dtype=LONG))),
    "mm float64": (torch.mm, (ones(2, 3), ones(3, 2, dtype=torch.float64))),
    "mm bool": (torch.mm, (ones(2, 3).bool(), ones(3, 2).bool())),
    "bmm bool": (torch.bmm, (ones(2, 3, 4).bool(), ones(2, 4, 3).bool())),
    "linear": (F.linear, (ones(2, 3), ones(4, 3, dtype=LONG))),
    "linear of three dimensions": (F.linear, (ones(2, 5, 3), ones(4, 3, dtype=LONG), ones(4))),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 2), (ones(1, 2, 64, 64, dtype=LONG),)),
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, 2), (ones(1, 2, 64, 64, dtype=LONG),)),
    "adaptive_avg_pool3d": (lambda x: F.adaptive_avg_pool3d(x, 2), (ones(1, 2, 4, 4, 4, dtype=COMPLEX),)),
    "softmax": (lambda x: x.softmax(-1), (ones(2, 3, dtype=LONG),)),
    "gelu": (F.gelu, (ones(3, dtype=LONG),)),
    "softplus": (F.softplus, (ones(3, dtype=LONG),)),
    "lcm": (torch.lcm, (ones(3), ones(3))),
    "bitwise": (torch.bitwise_and, (ones(3), ones(3))),
    "lgamma": (torch.lgamma, (ones(3, dtype=COMPLEX),)),
    "empty": (torch.lgamma, (ones(1, 0, 3, dtype=COMPLEX),)),
    "log_ndtr": (torch.special.log_ndtr, (ones(3, dtype=HALF),)),
    "cross": (torch.linalg.cross, (ones(3, dtype=torch.bool), ones(3, dtype=torch.bool))),
    "poisson": (torch.poisson, (ones(3).bool(),)),
    "bernoulli": (torch.bernoulli, (ones(3, dtype=LONG),)),
    "randperm": (lambda: torch.randperm(5, dtype=torch.bool), ()),
    "grid_sample": (lambda x, grid: F.grid_sample(x, grid, align_corners=True), (ones(1, 2, 4, 4), ones(1, 3, 3, 2).double())),
    "lu_solve": (torch.linalg.lu_solve, (torch.eye(3).half(), torch.arange(1, 4).int(), ones(3, 1, dtype=HALF))),
    "max_unpool2d": (lambda x, index: F.max_unpool2d(x, index, 2), (ones(1, 1, 2, 2, dtype=LONG), ones(1, 1, 2, 2, dtype=LONG))),
}


BYTES = ones(3, dtype=torch.int8)
LARGE = ones(100, 100)
EMPTY = ones(0, 3)
IMAGE, KERNEL = ones(1, 2, 40, 40), ones(2, 2, 3, 3)

CALLS |= {
    "softmax out of range": (lambda x: x.softmax(7), (ones(2, 3),)),
    "softmax out of range, large": (lambda x: x.softmax(-3), (LARGE,)),
    "sort": (lambda x: x.sort(2), (ones(2, 3),)),
    "sort, large": (lambda x: x.sort(2), (LARGE,)),
    "slice_scatter": (lambda x: torch.slice_scatter(x, x, 2), (ones(2, 3),)),
    "slice_scatter, large": (lambda x: torch.slice_scatter(x, x, 0, 9, 20), (LARGE,)),
    "select_scatter": (lambda x: torch.select_scatter(x, x[0], 2, 0), (ones(2, 3),)),
    "max of an empty tensor": (torch.max, (EMPTY,)),
    "min of an empty tensor": (torch.min, (ones(0),)),
    "max over an empty dimension": (lambda x: x.max(0), (EMPTY,)),
    "max over an empty dimension, large": (lambda x: x.max(2), (ones(100, 100, 0),)),
    "median": (lambda x: x.median(0), (EMPTY,)),
    "nanmedian": (lambda x: x.nanmedian(0), (EMPTY,)),
    "mode": (lambda x: x.mode(0), (EMPTY,)),
    "pooling of an empty tensor": (lambda x: F.adaptive_avg_pool2d(x, 2), (ones(1, 0, 4, 4)[..., :0],)),
    "celu": (lambda x: F.celu(x, 0.0), (ones(3),)),
    "celu, large": (lambda x: F.celu(x, 0.0), (LARGE,)),
    "smooth_l1_loss": (lambda x: F.smooth_l1_loss(x, -x, beta=-1.0), (ones(3),)),
    "smooth_l1_loss, large": (lambda x: F.smooth_l1_loss(x, -x, beta=-1.0), (LARGE,)),
    "native_dropout": (lambda x: torch.native_dropout(x, -0.5, True), (ones(3),)),
    "dilation": (lambda x, weight: F.conv2d(x, weight, dilation=0), (IMAGE[..., :5], KERNEL)),
    "dilation, large": (lambda x, weight: F.conv2d(x, weight, dilation=0), (IMAGE, KERNEL)),
    "output_padding": (lambda x, weight: F.conv_transpose1d(x, weight, output_padding=2), (ones(1, 2, 4), ones(2, 2, 3))),
    "output_padding, large": (lambda x, weight: F.conv_transpose2d(x, weight, output_padding=2), (IMAGE, KERNEL)),
    "where": (lambda x: torch.where(x > 0, x, 1e39), (ones(3),)),
    "pad": (lambda x: F.pad(x, (1, 1), value=300), (BYTES,)),
    "fill_": (lambda x: x.clone().fill_(300), (BYTES,)),
    "fill_, large": (lambda x: x.clone().fill_(1e6), (ones(300, 300, dtype=HALF),)),
    "full": (lambda x: x + torch.full((3,), 300, dtype=torch.int8), (BYTES,)),
    "masked_fill": (lambda x: x.masked_fill(x > 0, 300), (BYTES,)),
    "logspace": (lambda x: x + torch.logspace(300, -3, 1), (ones(3),)),
    "index_add": (lambda x, index: x.index_add(0, index, x.t()), (ones(2, 3), torch.tensor([0, 1, 1]))),
    "diagonal_scatter": (lambda x: torch.diagonal_scatter(x, x[0], 2), (ones(3, 3),)),
    "as_strided_scatter": (lambda x: torch.as_strided_scatter(x, x[0], (3,), (1,), -1), (ones(3, 3),)),
}


@pytest.mark.sample(usual=20)
@pytest.mark.parametrize("name", CALLS)
def test_refused_call_raises_eager_modes_error(name: str) -> None:
    function, args = CALLS[name]
    torch._dynamo.reset()
    eager_error, error = error_of(function, *args), error_of(torch.compile(function, backend="dynaxla", fullgraph=True), *args)
    assert eager_error is not None
    assert isinstance(error, type(eager_error))
    assert "dynaxla" not in str(error)
    if not isinstance(error, TorchRuntimeError):  # a newer torch's fake tensors may refuse it first, in words of TorchDynamo's
        assert str(eager_error) in str(error)


# Functions of a tensor and of a number that differs between calls, such as a size.
WITH_NUMBERS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "clamp": lambda x, n: x.clamp(-n, n),
    "clamp, upper bound alone": lambda x, n: x.clamp(max=-n),
    "hardtanh": lambda x, n: F.hardtanh(x, -n, n),
    "full": lambda x, n: torch.full((2,), n, dtype=x.dtype),
    "where": lambda x, n: torch.where(x > 0, x, n),
    "masked_fill": lambda x, n: x.masked_fill(x > 0, n),
    "pad": lambda x, n: F.pad(x, (1, 1), value=n),
    "add": lambda x, n: x + n,
}


@pytest.mark.usefixtures("quick_xla")
@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        pytest.param(torch.int8, "buckets", marks=pytest.mark.quick),
        pytest.param(torch.int8, "exact", marks=pytest.mark.thorough),
        pytest.param(HALF, "buckets", marks=pytest.mark.thorough),
        (HALF, "exact"),
    ],
)
def test_numbers_that_differ_between_calls(dtype: torch.dtype, sizes: str) -> None:
    """The dtype can represent the numbers of some calls only."""
    x = torch.tensor([1, 0, 100]).to(dtype)
    for name, function in WITH_NUMBERS.items():
        torch._dynamo.reset()

        def with_size(x: torch.Tensor, y: torch.Tensor, function: Any = function) -> tuple[torch.Tensor, torch.Tensor]:
            return function(x, y.shape[0]), y.sum()  # with buckets, the summed tensor is padded

        compiled = torch.compile(with_size, backend="dynaxla", dynamic=True, options={"sizes": sizes})
        for size in (100, 300 if dtype == torch.int8 else 70_000, 90):
            eager_error, error = error_of(function, x, size), error_of(compiled, x, ones(size))
            assert isinstance(error, type(eager_error)), f"{name} of {size}: {error!r}"
            assert str(eager_error) in str(error), f"{name} of {size}"
            if eager_error is None:
                torch.testing.assert_close(compiled(x, ones(size))[0], function(x, size), msg=f"{name} of {size}")


def test_refusal_is_repeated_for_other_sizes() -> None:
    compiled = torch.compile(torch.mm, backend="dynaxla", fullgraph=True)
    for rows in (2, 3, 4):
        with pytest.raises(RuntimeError, match="same dtype, but got: float != long int"):
            compiled(ones(rows, 5), ones(5, 2, dtype=LONG))
    assert compiled(ones(2, 5), ones(5, 2))[0, 0] == 5


def test_refusal_comes_before_any_write() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x @ y

    x = torch.zeros(2, 3)
    with pytest.raises(RuntimeError, match="same dtype"):
        torch.compile(function, backend="dynaxla", fullgraph=True)(x, ones(3, 2, dtype=LONG))
    assert x.eq(0).all()


def test_refusal_without_fallback() -> None:
    with pytest.raises(UnsupportedOp, match="torch's kernel refuses it: expected m1 and m2"):
        torch.compile(torch.mm, backend="dynaxla", options={"fallback": "error"})(ones(2, 3), ones(3, 2, dtype=LONG))


def test_ops_of_a_decomposition_are_not_refused() -> None:
    """std decomposes into ops that may lack a kernel for half types; eager mode has a kernel for std itself."""
    for function, args in [(torch.std, (torch.randn(50).half(),)), (torch.nanmean, (torch.randn(9).bfloat16(),))]:
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(function, backend="dynaxla", fullgraph=True)(*args), function(*args))


def test_refusal_draws_no_random_numbers() -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    assert kernel_refusals.refusal(torch.ops.aten.bernoulli.default, (ones(3, dtype=torch.float64),), {}) == ""
    assert "not implemented" in kernel_refusals.refusal(torch.ops.aten.bernoulli.default, (ones(3, dtype=LONG),), {})
    noise = ones(3), ones(3), 0.1, 0.3, True
    for generator in ((), (None,)):
        assert kernel_refusals.refusal(torch.ops.aten.rrelu_with_noise_functional.default, (*noise, *generator), {}) == ""
    assert torch.equal(torch.rand(3), expected)


# Eager mode has kernels for these ops that torch.compile never calls: torch decomposes the ops before any backend sees them.
DECOMPOSED = {
    "nn.functional.max_pool1d",
    "nn.functional.interpolate.nearest",
    "nn.functional.interpolate.nearest-exact",
    "nn.functional.multilabel_margin_loss",  # from torch 2.15 on
}
# The check would have to pass tables that the kernel does not validate.
UNCHECKED = {"nn.functional.embedding_bag"}
DTYPES = [torch.bool, torch.uint8, LONG, HALF, torch.bfloat16, COMPLEX, torch.float32]
OPERATOR_COUNT = 40


def cases(info: Any) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """The first sample of an op in dtypes that it does not support, and with a last tensor of another dtype."""
    supported = info.supported_dtypes("cpu")
    default_dtype = next((dtype for dtype in (torch.float32, LONG) if dtype in supported), None)
    sample = None if default_dtype is None else next(iter(info.sample_inputs("cpu", default_dtype)), None)
    if sample is None:
        return
    values = ((sample.input, *sample.args), sample.kwargs)
    tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.dtype == default_dtype]
    for dtype in DTYPES:
        if dtype not in supported:
            chosen = {id(tensor) for tensor in tensors}
            yield str(dtype), pytree.tree_map(lambda x, d=dtype, c=chosen: x.detach().to(d) if id(x) in c else x, values)
    if len(tensors) > 1:
        yield "mixed", pytree.tree_map(lambda x: x.detach().double() if x is tensors[-1] else x, values)


def _drawn_operators(seed: int, count: int) -> list[Any]:
    return random.Random(seed).sample(list(entries("op_db").values()), count)


@pytest.mark.filterwarnings("ignore")
def test_operators_refuse_what_eager_mode_refuses() -> None:
    """Operators drawn from PyTorch's database."""
    accepted, tried = [], 0
    for info in _drawn_operators(16, OPERATOR_COUNT):
        if info.full_name in DECOMPOSED | UNCHECKED:
            continue
        for case, (args, kwargs) in cases(info):
            if (error := error_of(lambda i=info, a=args, k=kwargs: i.op(*a, **k))) is None:
                continue
            tried += 1
            if tried % 50 == 0:
                torch._dynamo.reset()
            leaves, tree = pytree.tree_flatten((args, kwargs))
            tensor_indices = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

            def call(
                *tensors: torch.Tensor, info: Any = info, leaves: Any = leaves, tree: Any = tree, tensor_indices: Any = tensor_indices
            ) -> Any:
                values = list(leaves)
                for index, tensor in zip(tensor_indices, tensors, strict=True):
                    values[index] = tensor
                args, kwargs = pytree.tree_unflatten(values, tree)
                return info.op(*args, **kwargs)

            if error_of(torch.compile(call, backend="dynaxla"), *[leaves[index] for index in tensor_indices]) is None:
                accepted.append(f"{info.full_name} {case}: {error}")
    assert not accepted
    assert tried > 50


class _RefusalChecker(TorchDispatchMode):
    """Collects the refusals of ops that eager mode has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong_refusals: set[str] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        if reason := kernel_refusals.refusal(op, args, kwargs or {}):
            self.wrong_refusals.add(f"{op}: {reason}")
        return result


# An index without elements may be of any dtype.
_ALLOWED = ("aten.gather.default: gather(): Expected dtype", "aten.scatter_add.default: scatter(): Expected dtype")


@pytest.mark.filterwarnings("ignore")
def test_operators_accept_what_eager_mode_accepts() -> None:
    """Torch's kernel would compute a refused op, instead of an XLA program."""
    checker = _RefusalChecker()
    for info in _drawn_operators(17, 20):
        for dtype in {torch.float32, LONG, HALF} & info.supported_dtypes("cpu"):
            for sample in itertools.islice(info.sample_inputs("cpu", dtype), 3):
                with checker:
                    error_of(lambda i=info, s=sample: i.op(s.input, *s.args, **s.kwargs))
    assert not [text for text in checker.wrong_refusals if not text.startswith(_ALLOWED)]
