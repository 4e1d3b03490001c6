"""Single ops at realistic sizes: 10^5 to 10^7 elements, matrices of size 64 to 1,024, images of 8 x 64 x 56 x 56.

Each case names its entry in PyTorch's operator database (`op_db`). single_ops_left_out.py has the reasons for entries without a case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

Make = Callable[[torch.Generator], torch.Tensor]


@dataclass(frozen=True)
class OpCase:
    """A call of an op.

    Attributes:
        name: the case's name.
        entry: the op's entry in op_db.
        function: the function that is called.
        makes: functions that create its inputs.
        differentiable: True to measure its gradient, too.
        dtype: the dtype of floating-point inputs.
    """

    name: str
    entry: str
    function: Callable[..., Any]
    makes: tuple[Make, ...]
    differentiable: bool = True
    dtype: torch.dtype = torch.float32

    def inputs(self) -> list[torch.Tensor]:
        """Returns the inputs; the same values at each call."""
        generator = torch.Generator().manual_seed(0)
        made = [make(generator) for make in self.makes]
        return [tensor.to(self.dtype) if tensor.is_floating_point() else tensor for tensor in made]


def normal(*shape: int) -> Make:
    return lambda generator: torch.randn(shape, generator=generator)


def uniform(*shape: int, low: float = 0.05, high: float = 0.95) -> Make:
    return lambda generator: torch.rand(shape, generator=generator) * (high - low) + low


def whole(high: int, *shape: int, low: int = 0) -> Make:
    return lambda generator: torch.randint(low, high, shape, generator=generator)


def truth(*shape: int) -> Make:
    return lambda generator: torch.rand(shape, generator=generator) < 0.5


def ordered(*shape: int) -> Make:
    return lambda generator: torch.randn(shape, generator=generator).sort(-1).values


def transposed(*shape: int) -> Make:
    """Makes a tensor whose last two dimensions are transposed in memory."""
    return lambda generator: torch.randn((*shape[:-2], shape[-1], shape[-2]), generator=generator).mT


def channels_last(*shape: int) -> Make:
    return lambda generator: torch.randn(shape, generator=generator).to(memory_format=torch.channels_last)


def positive_definite(*shape: int) -> Make:
    def make(generator: torch.Generator) -> torch.Tensor:
        x = torch.randn(shape, generator=generator)
        return x @ x.mT / shape[-1] + torch.eye(shape[-1])

    return make


MATRIX = (1000, 1000)
ROWS = (4096, 768)
IMAGES = (8, 64, 56, 56)
TOKENS = (8, 197, 768)


def _cases() -> Iterator[OpCase]:
    yield from _elementwise()
    yield from _reductions()
    yield from _order_and_scans()
    yield from _layouts()
    yield from _indexing()
    yield from _products()
    yield from _networks()
    yield from _losses()


def _elementwise() -> Iterator[OpCase]:
    real = """abs atan asinh ceil cos deg2rad erf erfc exp2 expm1 floor frac i0 nan_to_num neg positive rad2deg relu round sgn sigmoid sign
        sin sinc sinh square tan tanh trunc exp cosh special.entr special.erfcx special.i0e special.i1 special.i1e special.log_ndtr
        special.ndtr special.bessel_j0 special.bessel_j1 nn.functional.celu nn.functional.elu nn.functional.gelu nn.functional.hardshrink
        nn.functional.hardsigmoid nn.functional.hardswish nn.functional.hardtanh nn.functional.leaky_relu nn.functional.logsigmoid
        nn.functional.mish nn.functional.relu6 nn.functional.selu nn.functional.silu nn.functional.softplus nn.functional.softshrink
        nn.functional.softsign nn.functional.tanhshrink"""
    inside = "acos asin atanh digamma erfinv lgamma log log10 log1p log2 logit reciprocal rsqrt sqrt special.ndtri"
    tests = "isfinite isinf isnan isneginf isposinf logical_not signbit"
    for name in _names(real):
        entry = "nn.functional.relu" if name == "relu" else name
        yield OpCase(name, entry, _function(name), (normal(*MATRIX),), name not in _NO_GRADIENT)
    for name in _names(inside):
        yield OpCase(name, name, _function(name), (uniform(*MATRIX),))
    for name in _names(tests):
        yield OpCase(name, name, _function(name), (normal(*MATRIX),), False)
    yield OpCase("acosh", "acosh", torch.acosh, (uniform(*MATRIX, low=1.1, high=3.0),))
    yield OpCase("gelu, tanh", "nn.functional.gelu", lambda x: F.gelu(x, approximate="tanh"), (normal(*TOKENS),))
    yield OpCase("glu", "nn.functional.glu", F.glu, (normal(1024, 2048),))
    yield OpCase("prelu", "nn.functional.prelu", F.prelu, (normal(*IMAGES), uniform(64)))
    yield OpCase("threshold", "nn.functional.threshold", lambda x: F.threshold(x, 0.1, 0.0), (normal(*MATRIX),))
    yield OpCase("clamp", "clamp", lambda x: x.clamp(-0.5, 0.5), (normal(*MATRIX),))
    yield OpCase("frexp", "frexp", torch.frexp, (normal(*MATRIX),), False)
    yield OpCase("mvlgamma", "mvlgamma", lambda x: torch.mvlgamma(x + 2, 2), (uniform(*MATRIX),))
    yield OpCase("polygamma 1", "polygamma", lambda x: torch.polygamma(1, x), (uniform(300, 1000),), False)
    yield OpCase("bitwise_not", "bitwise_not", torch.bitwise_not, (whole(1000, *MATRIX),), False)
    two = """add sub mul div true_divide maximum minimum max min fmax fmin atan2 hypot logaddexp logaddexp2 copysign xlogy
        special.xlog1py"""
    for name in _names(two):
        yield OpCase(name + ", two tensors", name, _function(name), (uniform(*MATRIX), uniform(*MATRIX)))
    for name in ("fmod", "remainder", "floor_divide"):
        yield OpCase(name, name, _function(name), (normal(*MATRIX), uniform(*MATRIX)), name != "floor_divide")
    for name in _names("eq ge gt le lt ne isclose logical_and logical_or logical_xor heaviside nextafter"):
        yield OpCase(name, name, _function(name), (normal(*MATRIX), normal(*MATRIX)), False)
    for name in _names("bitwise_and bitwise_or bitwise_xor gcd lcm"):
        yield OpCase(name, name, _function(name), (whole(1000, *MATRIX, low=1), whole(1000, *MATRIX, low=1)), False)
    yield OpCase("bitwise_left_shift", "bitwise_left_shift", torch.bitwise_left_shift, (whole(99, *MATRIX), whole(8, *MATRIX)), False)
    yield OpCase("igamma", "igamma", torch.igamma, (uniform(300, 1000), uniform(300, 1000)), False)
    yield OpCase("special.zeta", "special.zeta", lambda x, y: torch.special.zeta(x + 2, y), (uniform(300, 1000), uniform(300, 1000)), False)
    yield OpCase("pow, two tensors", "pow", torch.pow, (uniform(*MATRIX), normal(*MATRIX)))
    yield OpCase("pow 3", "pow", lambda x: x**3, (normal(*MATRIX),))
    yield OpCase("pow 0.3", "pow", lambda x: x**0.3, (uniform(*MATRIX),))
    yield OpCase("float_power", "float_power", lambda x: torch.float_power(x, 2.5), (uniform(*MATRIX),))
    yield OpCase("ldexp", "ldexp", torch.ldexp, (normal(*MATRIX), whole(4, *MATRIX)))
    yield OpCase("rsub", "rsub", lambda x: 1 - x, (normal(*MATRIX),))
    yield OpCase("lerp", "lerp", torch.lerp, (normal(*MATRIX), normal(*MATRIX), uniform(*MATRIX)))
    yield OpCase("addcmul", "addcmul", torch.addcmul, (normal(*MATRIX), normal(*MATRIX), normal(*MATRIX)))
    yield OpCase("addcdiv", "addcdiv", torch.addcdiv, (normal(*MATRIX), normal(*MATRIX), uniform(*MATRIX)))
    yield OpCase("where", "where", torch.where, (truth(*MATRIX), normal(*MATRIX), normal(*MATRIX)))
    yield OpCase("masked_fill", "masked_fill", lambda x, mask: x.masked_fill(mask, 0.0), (normal(*MATRIX), truth(*MATRIX)))
    yield OpCase("add a row", "add", torch.add, (normal(*ROWS), normal(768)))
    yield OpCase("add a column", "add", torch.add, (normal(*ROWS), normal(4096, 1)))
    yield OpCase("add to a transposed", "add", torch.add, (normal(*MATRIX), transposed(*MATRIX)))
    yield OpCase("mul of channels-last", "mul", torch.mul, (channels_last(*IMAGES), channels_last(*IMAGES)))
    yield OpCase("relu of channels-last", "nn.functional.relu", F.relu, (channels_last(*IMAGES),))
    yield OpCase("exp of a transposed", "exp", torch.exp, (transposed(*MATRIX),))
    yield OpCase("add, 10^7", "add", torch.add, (normal(10, *MATRIX), normal(10, *MATRIX)))
    yield OpCase("add, 10^5", "add", torch.add, (normal(100, 1000), normal(100, 1000)))
    yield OpCase("to int64", "long", lambda x: x.long(), (normal(*MATRIX),), False)
    yield OpCase("to bfloat16", "bfloat16", lambda x: x.bfloat16(), (normal(*MATRIX),))
    yield OpCase("to float64", "double", lambda x: x.double(), (normal(*MATRIX),))
    yield OpCase("complex abs", "abs", lambda x, y: torch.complex(x, y).abs(), (normal(*MATRIX), normal(*MATRIX)))
    yield OpCase("polar", "polar", torch.polar, (uniform(*MATRIX), normal(*MATRIX)), False)
    for name in ("add", "mul"):
        yield OpCase(f"{name}, bfloat16", name, _function(name), (normal(*MATRIX), normal(*MATRIX)), dtype=torch.bfloat16)
    for name in _names("exp tanh sigmoid sqrt nn.functional.gelu nn.functional.silu nn.functional.relu"):
        make = uniform(*MATRIX) if name == "sqrt" else normal(*MATRIX)
        yield OpCase(f"{name}, bfloat16", name, _function(name), (make,), dtype=torch.bfloat16)


def _reductions() -> Iterator[OpCase]:
    for name in _names("sum mean prod amax amin std var nansum nanmean logsumexp norm"):
        make = uniform(*MATRIX, low=0.99, high=1.01) if name == "prod" else normal(*MATRIX)
        call = _function(name)
        if name == "logsumexp":
            yield OpCase("logsumexp of all", name, lambda x: torch.logsumexp(x, (0, 1)), (make,))
        else:
            yield OpCase(f"{name} of all", name, call, (make,))
        yield OpCase(f"{name} of rows", name, _along(call, -1), (make,))
        yield OpCase(f"{name} of columns", name, _along(call, 0), (make,))
    for name in _names("max min argmax argmin all any count_nonzero aminmax std_mean var_mean"):
        call, has = _function(name), name in ("max", "min", "std_mean", "var_mean")
        yield OpCase(f"{name} of all", name, call, (normal(*MATRIX),), has)
        yield OpCase(f"{name} of rows", name, _along(call, -1), (normal(*MATRIX),), has)
        yield OpCase(f"{name} of columns", name, _along(call, 0), (normal(*MATRIX),), has)
    yield OpCase("linalg.vector_norm 3 of rows", "linalg.vector_norm", lambda x: torch.linalg.vector_norm(x, 3, -1), (normal(*MATRIX),))
    yield OpCase("linalg.matrix_norm", "linalg.matrix_norm", torch.linalg.matrix_norm, (normal(*MATRIX),))
    yield OpCase("linalg.norm 1", "linalg.norm", lambda x: torch.linalg.norm(x, 1), (normal(*MATRIX),))
    yield OpCase("dist", "dist", torch.dist, (normal(*MATRIX), normal(*MATRIX)))
    yield OpCase("trace", "trace", torch.trace, (normal(*MATRIX),))
    yield OpCase("sum over images", "sum", lambda x: x.sum((2, 3)), (normal(*IMAGES),))
    yield OpCase("mean over channels-last images", "mean", lambda x: x.mean((2, 3)), (channels_last(*IMAGES),))
    yield OpCase("sum, bfloat16", "sum", torch.sum, (normal(*MATRIX),), dtype=torch.bfloat16)
    yield OpCase("sum of rows, bfloat16", "sum", lambda x: x.sum(-1), (normal(*MATRIX),), dtype=torch.bfloat16)
    yield OpCase("sum of 10^7", "sum", torch.sum, (normal(10, *MATRIX),))
    # Arithmetic in front of a reduction, and rows of odd lengths.
    yield OpCase("sum of rows of exponentials", "sum", lambda x: x.exp().sum(-1), (normal(*MATRIX),))
    yield OpCase("sum of rows of 197 products", "sum", lambda x, y: (x * y).sum(-1), (normal(4000, 197), normal(4000, 197)))
    yield OpCase("mean of products of activations", "mean", lambda x, y: (F.gelu(x) * F.silu(y)).mean(), (normal(*ROWS), normal(*ROWS)))
    yield OpCase("variance of rows of sigmoids, 49", "var", lambda x: x.sigmoid().var(-1), (normal(16_384, 49),))
    yield OpCase("norm of differences, a vocabulary", "norm", lambda x, y: (x - y).norm(dim=-1), (normal(40, 50_257), normal(40, 50_257)))
    yield OpCase("equal", "equal", lambda x, y: torch.eq(x, y).all(), (normal(*MATRIX), normal(*MATRIX)), False)
    yield OpCase("normalize", "nn.functional.normalize", F.normalize, (normal(*ROWS),))
    yield OpCase("renorm", "renorm", lambda x: torch.renorm(x, 2, 0, 1.0), (normal(*MATRIX),))
    yield OpCase("softmax", "softmax", lambda x: x.softmax(-1), (normal(*MATRIX),))
    yield OpCase("softmax of columns", "softmax", lambda x: x.softmax(0), (normal(*MATRIX),))
    yield OpCase("log_softmax", "log_softmax", lambda x: x.log_softmax(-1), (normal(*MATRIX),))
    yield OpCase("softmax, bfloat16", "softmax", lambda x: x.softmax(-1), (normal(*MATRIX),), dtype=torch.bfloat16)
    yield OpCase("trapezoid", "trapezoid", torch.trapezoid, (normal(*MATRIX),))
    yield OpCase("gradient", "gradient", lambda x: torch.gradient(x, dim=-1), (normal(*MATRIX),))
    yield OpCase("diff", "diff", torch.diff, (normal(*MATRIX),))
    yield OpCase("histc", "histc", lambda x: torch.histc(x, 64, -3, 3), (normal(*MATRIX),), False)
    yield OpCase("bincount", "bincount", lambda x: torch.bincount(x, minlength=100), (whole(100, 1_000_000),), False)


def _order_and_scans() -> Iterator[OpCase]:
    yield OpCase("sort rows", "sort", lambda x: x.sort(dim=-1, stable=True), (normal(*MATRIX),))
    yield OpCase("sort columns", "sort", lambda x: x.sort(dim=0, stable=True), (normal(*MATRIX),))
    yield OpCase("sort 10^6", "sort", lambda x: x.sort(stable=True), (normal(1_000_000),))
    yield OpCase("sort integers", "sort", lambda x: x.sort(dim=-1, stable=True), (whole(10_000, *MATRIX),), False)
    yield OpCase("argsort rows", "argsort", lambda x: x.argsort(dim=-1, stable=True), (normal(*MATRIX),), False)
    yield OpCase("msort", "msort", torch.msort, (normal(*MATRIX),), False)
    yield OpCase("topk 10 of rows", "topk", lambda x: x.topk(10), (normal(*MATRIX),))
    yield OpCase("topk 50 of a vocabulary", "topk", lambda x: x.topk(50), (normal(8, 50_257),))
    yield OpCase("topk smallest", "topk", lambda x: x.topk(10, largest=False), (normal(*MATRIX),))
    yield OpCase("kthvalue", "kthvalue", lambda x: x.kthvalue(100), (normal(*MATRIX),))
    yield OpCase("median of all", "median", torch.median, (normal(*MATRIX),))
    yield OpCase("median of rows", "median", lambda x: x.median(-1), (normal(*MATRIX),))
    yield OpCase("median of columns", "median", lambda x: x.median(0), (normal(*MATRIX),))
    yield OpCase("nanmedian of rows", "nanmedian", lambda x: x.nanmedian(-1), (normal(*MATRIX),))
    yield OpCase("mode of rows", "mode", lambda x: x.mode(-1).values, (whole(50, *MATRIX),), False)
    yield OpCase("quantile", "quantile", lambda x: x.quantile(0.3, -1), (normal(*MATRIX),))
    yield OpCase("nanquantile", "nanquantile", lambda x: x.nanquantile(0.3, -1), (normal(*MATRIX),))
    yield OpCase("searchsorted", "searchsorted", torch.searchsorted, (ordered(10_000), normal(*MATRIX)), False)
    yield OpCase("bucketize", "bucketize", lambda x, limits: torch.bucketize(x, limits), (normal(*MATRIX), ordered(64)), False)
    yield OpCase("isin", "isin", torch.isin, (whole(10_000, 300, 1000), whole(10_000, 100)), False)
    for name in _names("cumsum cumprod cummax cummin logcumsumexp"):
        make = uniform(*MATRIX, low=0.99, high=1.01) if name == "cumprod" else normal(*MATRIX)
        yield OpCase(f"{name} of rows", name, _along(_function(name), -1), (make,))
        yield OpCase(f"{name} of columns", name, _along(_function(name), 0), (make,))
    yield OpCase("cumsum of 10^6", "cumsum", lambda x: x.cumsum(0), (normal(1_000_000),))
    yield OpCase("cumsum of integers", "cumsum", lambda x: x.cumsum(-1), (whole(9, *MATRIX),), False)
    yield OpCase("cumulative_trapezoid", "cumulative_trapezoid", torch.cumulative_trapezoid, (normal(*MATRIX),))


def _layouts() -> Iterator[OpCase]:
    one = (normal(*MATRIX),)
    yield OpCase("cat of rows", "cat", lambda x, y: torch.cat((x, y)), (normal(*MATRIX), normal(*MATRIX)))
    yield OpCase("cat of columns", "cat", lambda x, y: torch.cat((x, y), 1), (normal(*MATRIX), normal(*MATRIX)))
    yield OpCase("cat of images", "cat", lambda x, y: torch.cat((x, y), 1), (normal(*IMAGES), normal(*IMAGES)))
    yield OpCase("stack", "stack", lambda x, y: torch.stack((x, y)), (normal(*MATRIX), normal(*MATRIX)))
    yield OpCase("stack last", "stack", lambda x, y: torch.stack((x, y), -1), (normal(*MATRIX), normal(*MATRIX)))
    yield OpCase("clone", "clone", torch.clone, one)
    yield OpCase("contiguous of a transposed", "contiguous", lambda x: x.t().contiguous(), one)
    yield OpCase("permute and contiguous", "permute", lambda x: x.permute(0, 2, 3, 1).contiguous(), (normal(*IMAGES),))
    yield OpCase("to channels-last", "contiguous", lambda x: x.contiguous(memory_format=torch.channels_last), (normal(*IMAGES),))
    yield OpCase("heads", "reshape", lambda x: x.view(8, 197, 12, 64).transpose(1, 2).contiguous(), (normal(*TOKENS),))
    yield OpCase("flip rows", "flip", lambda x: x.flip(1), one)
    yield OpCase("flip columns", "flip", lambda x: x.flip(0), one)
    yield OpCase("roll", "roll", lambda x: x.roll(3, 1), one)
    yield OpCase("rot90", "rot90", torch.rot90, one)
    yield OpCase("tile", "tile", lambda x: x.tile(2, 2), (normal(500, 500),))
    yield OpCase("repeat", "repeat", lambda x: x.repeat(4, 1), (normal(250, 1000),))
    yield OpCase("repeat_interleave", "repeat_interleave", lambda x: x.repeat_interleave(4, 0), (normal(250, 1000),))
    yield OpCase("expand and clone", "expand", lambda x: x.expand(1000, 1000).clone(), (normal(1000, 1),))
    yield OpCase("tril", "tril", torch.tril, one)
    yield OpCase("triu", "triu", torch.triu, one)
    yield OpCase("diag_embed", "diag_embed", torch.diag_embed, (normal(8, 400),))
    yield OpCase("block_diag", "block_diag", lambda x, y: torch.block_diag(x, y), (normal(400, 400), normal(400, 400)))
    yield OpCase("kron", "kron", torch.kron, (normal(32, 32), normal(32, 32)))
    yield OpCase("cartesian_prod", "cartesian_prod", torch.cartesian_prod, (normal(1000), normal(1000)))
    yield OpCase(
        "meshgrid", "meshgrid", lambda x, y: [part + 0 for part in torch.meshgrid(x, y, indexing="ij")], (normal(1000), normal(1000))
    )
    yield OpCase("pad", "constant_pad_nd", lambda x: F.pad(x, (1, 1, 1, 1)), (normal(*IMAGES),))
    for mode in ("reflect", "replicate", "circular"):
        yield OpCase(f"pad, {mode}", "nn.functional.pad", _padding(mode), (normal(*IMAGES),))
    yield OpCase("unfold", "nn.functional.unfold", lambda x: F.unfold(x, 3, padding=1), (normal(2, 64, 56, 56),))
    yield OpCase("fold", "nn.functional.unfold", lambda x: F.fold(x, (56, 56), 3, padding=1), (normal(2, 576, 3136),))
    yield OpCase("Tensor.unfold", "unfold", lambda x: x.unfold(1, 5, 2).contiguous(), one)
    yield OpCase("pixel_shuffle", "nn.functional.pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), (normal(*IMAGES),))
    yield OpCase("pixel_unshuffle", "nn.functional.pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2), (normal(*IMAGES),))
    yield OpCase("channel_shuffle", "nn.functional.channel_shuffle", lambda x: F.channel_shuffle(x, 4), (normal(*IMAGES),))
    yield OpCase("one_hot", "nn.functional.one_hot", lambda x: F.one_hot(x, 100), (whole(100, 10_000),), False)
    yield OpCase("eye", "eye", lambda x: torch.eye(1000) + x, (normal(1),), False)
    yield OpCase("arange", "arange", lambda x: torch.arange(1_000_000.0) + x, (normal(1),), False)
    yield OpCase("linspace", "linspace", lambda x: torch.linspace(0, 1, 1_000_000) + x, (normal(1),), False)
    yield OpCase("full", "full", lambda x: torch.full((1000, 1000), 2.0) + x, (normal(1),), False)
    yield OpCase("cat of columns, bfloat16", "cat", lambda x, y: torch.cat((x, y), 1), (normal(*MATRIX),) * 2, dtype=torch.bfloat16)


def _indexing() -> Iterator[OpCase]:
    places = whole(1000, *MATRIX)
    yield OpCase("gather of rows", "gather", lambda x, index: x.gather(1, index), (normal(*MATRIX), places))
    yield OpCase("gather of columns", "gather", lambda x, index: x.gather(0, index), (normal(*MATRIX), places))
    yield OpCase("take", "take", torch.take, (normal(*MATRIX), whole(1_000_000, 1_000_000)))
    yield OpCase("take_along_dim", "take_along_dim", lambda x, index: torch.take_along_dim(x, index, 1), (normal(*MATRIX), places))
    yield OpCase("index of rows", "__getitem__", lambda x, index: x[index], (normal(*MATRIX), whole(1000, 1000)))
    yield OpCase("index of elements", "__getitem__", lambda x, i, j: x[i, j], (normal(*MATRIX), whole(1000, 300_000), whole(1000, 300_000)))
    yield OpCase("index_select rows", "index_select", lambda x, index: x.index_select(0, index), (normal(*MATRIX), whole(1000, 1000)))
    yield OpCase("index_select columns", "index_select", lambda x, index: x.index_select(1, index), (normal(*MATRIX), whole(1000, 1000)))
    yield OpCase("index_add", "index_add", lambda x, i, y: x.index_add(0, i, y), (normal(*MATRIX), whole(1000, 1000), normal(*MATRIX)))
    yield OpCase("index_copy", "index_copy", lambda x, i, y: x.index_copy(0, i, y), (normal(*MATRIX), _permutation, normal(*MATRIX)))
    yield OpCase("index_fill", "index_fill", lambda x, i: x.index_fill(0, i, 1.0), (normal(*MATRIX), whole(1000, 500)))
    yield OpCase("index_put", "index_put", lambda x, i, y: x.index_put((i,), y), (normal(*MATRIX), _permutation, normal(*MATRIX)))
    add_at = (normal(*MATRIX), whole(1000, 1000), normal(*MATRIX))
    yield OpCase("index_put, accumulate", "index_put", lambda x, i, y: x.index_put((i,), y, accumulate=True), add_at)
    scattered = (normal(*MATRIX), places, normal(*MATRIX))
    unique = (normal(*MATRIX), _permutations, normal(*MATRIX))
    yield OpCase("scatter", "scatter", lambda x, i, y: x.scatter(1, i, y), unique)
    yield OpCase("scatter_add", "scatter_add", lambda x, i, y: x.scatter_add(1, i, y), scattered)
    yield OpCase("scatter_add of columns", "scatter_add", lambda x, i, y: x.scatter_add(0, i, y), scattered)
    yield OpCase("scatter_reduce, amax", "scatter_reduce", lambda x, i, y: x.scatter_reduce(1, i, y, "amax"), scattered, False)
    yield OpCase("put", "put", lambda x, i, y: x.put(i, y, accumulate=True), (normal(*MATRIX), whole(10**6, 10**5), normal(10**5)))
    yield OpCase("embedding", "nn.functional.embedding", lambda w, i: F.embedding(i, w), (normal(30_522, 768), whole(30_522, 8, 197)))
    yield OpCase("embedding, narrow", "nn.functional.embedding", lambda w, i: F.embedding(i, w), (normal(10_000, 64), whole(10_000, 8192)))
    yield OpCase(
        "embedding_bag", "nn.functional.embedding_bag", lambda w, i: F.embedding_bag(i, w), (normal(10_000, 64), whole(10_000, 512, 16))
    )
    yield OpCase("slice_scatter", "slice_scatter", lambda x, y: x.slice_scatter(y, 0, 100, 600), (normal(*MATRIX), normal(500, 1000)))
    yield OpCase("select_scatter", "select_scatter", lambda x, y: x.select_scatter(y, 0, 3), (normal(*MATRIX), normal(1000)))
    yield OpCase("diagonal_scatter", "diagonal_scatter", lambda x, y: x.diagonal_scatter(y), (normal(*MATRIX), normal(1000)))
    yield OpCase("strided slice", "slice", lambda x: x[::2, ::2].contiguous(), (normal(2000, 2000),))
    yield OpCase(
        "embedding, bfloat16",
        "nn.functional.embedding",
        lambda w, i: F.embedding(i, w),
        (normal(30_522, 768), whole(30_522, 8, 197)),
        dtype=torch.bfloat16,
    )


def _products() -> Iterator[OpCase]:
    for size in (64, 256, 1024):
        yield OpCase(f"mm {size}", "mm", torch.mm, (normal(size, size), normal(size, size)))
    yield OpCase("mm of a transposed", "mm", torch.mm, (transposed(512, 512), normal(512, 512)))
    yield OpCase("mm, bfloat16", "mm", torch.mm, (normal(512, 512), normal(512, 512)), dtype=torch.bfloat16)
    yield OpCase("matmul", "matmul", torch.matmul, (normal(8, 197, 768), normal(768, 768)))
    yield OpCase("mv", "mv", torch.mv, (normal(1024, 1024), normal(1024)))
    yield OpCase("dot", "dot", torch.dot, (normal(1_000_000), normal(1_000_000)))
    yield OpCase("outer", "outer", torch.outer, (normal(1000), normal(1000)))
    yield OpCase("bmm", "bmm", torch.bmm, (normal(96, 197, 64), normal(96, 64, 197)))
    yield OpCase("bmm, small", "bmm", torch.bmm, (normal(512, 16, 16), normal(512, 16, 16)))
    yield OpCase("baddbmm", "baddbmm", torch.baddbmm, (normal(96, 197, 197), normal(96, 197, 64), normal(96, 64, 197)))
    yield OpCase("addmm", "addmm", torch.addmm, (normal(512), normal(512, 512), normal(512, 512)))
    yield OpCase("addmv", "addmv", torch.addmv, (normal(1024), normal(1024, 1024), normal(1024)))
    yield OpCase("addr", "addr", torch.addr, (normal(*MATRIX), normal(1000), normal(1000)))
    yield OpCase("addbmm", "addbmm", torch.addbmm, (normal(128, 128), normal(16, 128, 128), normal(16, 128, 128)))
    yield OpCase("linear", "nn.functional.linear", F.linear, (normal(*TOKENS), normal(768, 768), normal(768)))
    yield OpCase("linear, batch 1", "nn.functional.linear", F.linear, (normal(1, 1024), normal(1024, 1024), normal(1024)))
    yield OpCase(
        "linear, bfloat16", "nn.functional.linear", F.linear, (normal(*TOKENS), normal(768, 768), normal(768)), dtype=torch.bfloat16
    )
    yield OpCase("bilinear", "nn.functional.bilinear", F.bilinear, (normal(64, 64), normal(64, 64), normal(64, 64, 64)))
    yield OpCase("einsum bij,bjk", "einsum", lambda x, y: torch.einsum("bij,bjk->bik", x, y), (normal(16, 128, 128), normal(16, 128, 128)))
    yield OpCase(
        "einsum bhid,bhjd", "einsum", lambda x, y: torch.einsum("bhid,bhjd->bhij", x, y), (normal(8, 12, 128, 64), normal(8, 12, 128, 64))
    )
    yield OpCase("tensordot", "tensordot", lambda x, y: torch.tensordot(x, y, 2), (normal(64, 32, 32), normal(32, 32, 64)))
    yield OpCase(
        "linalg.multi_dot",
        "linalg.multi_dot",
        lambda x, y, z: torch.linalg.multi_dot((x, y, z)),
        (normal(256, 512), normal(512, 64), normal(64, 256)),
    )
    yield OpCase("linalg.matrix_power", "linalg.matrix_power", lambda x: torch.linalg.matrix_power(x / 30, 3), (normal(256, 256),))
    yield OpCase("matrix_exp", "matrix_exp", lambda x: torch.matrix_exp(x / 30), (normal(128, 128),))
    yield OpCase("cdist", "cdist", torch.cdist, (normal(512, 64), normal(512, 64)))
    yield OpCase("cdist 1", "cdist", lambda x, y: torch.cdist(x, y, 1.0), (normal(256, 64), normal(256, 64)))
    yield OpCase("pdist", "nn.functional.pdist", F.pdist, (normal(512, 64),))
    yield OpCase("cross", "cross", lambda x, y: torch.cross(x, y, dim=-1), (normal(300_000, 3), normal(300_000, 3)))
    yield OpCase("vdot", "vdot", torch.vdot, (normal(1_000_000), normal(1_000_000)))
    yield OpCase("linalg.vecdot", "linalg.vecdot", torch.linalg.vecdot, (normal(*MATRIX), normal(*MATRIX)))
    square = (lambda generator: normal(128, 128)(generator) / 8,)  # scaled so that the determinant is finite
    for name in _names("linalg.det linalg.inv linalg.slogdet linalg.qr linalg.svd linalg.svdvals linalg.lu_factor linalg.pinv"):
        has = name not in ("linalg.lu_factor", "linalg.svd")
        yield OpCase(name, name, _function(name), square, has)
    yield OpCase("linalg.eigvals", "linalg.eigvals", lambda x: torch.linalg.eigvals(x).abs().sort().values, square, False)
    yield OpCase("linalg.eigh", "linalg.eigh", torch.linalg.eigh, (positive_definite(128, 128),), False)
    yield OpCase("linalg.cholesky", "linalg.cholesky", torch.linalg.cholesky, (positive_definite(256, 256),))
    yield OpCase("linalg.solve", "linalg.solve", torch.linalg.solve, (positive_definite(256, 256), normal(256, 64)))
    triangular = (positive_definite(256, 256), normal(256, 64))
    yield OpCase(
        "linalg.solve_triangular", "linalg.solve_triangular", lambda a, b: torch.linalg.solve_triangular(a, b, upper=True), triangular
    )
    yield OpCase("linalg.inv of many", "linalg.inv", torch.linalg.inv, (positive_definite(512, 8, 8),))
    for name in ("fft.fft", "fft.rfft", "fft.fft2", "fft.rfft2", "fft.hfft"):
        has = name in ("fft.rfft", "fft.rfft2")
        yield OpCase(name, name, _function(name), (normal(256, 1024),), has)
    yield OpCase("fft.irfft", "fft.irfft", lambda x, y: torch.fft.irfft(torch.complex(x, y)), (normal(256, 513), normal(256, 513)))
    yield OpCase("stft", "stft", _spectrogram, (normal(8, 16_000),))


def _networks() -> Iterator[OpCase]:
    for name, shape, weight, options in _CONVOLUTIONS:
        space = len(shape) - 2
        call = getattr(F, f"conv{space}d")
        yield OpCase(f"conv{space}d, {name}", f"nn.functional.conv{space}d", _with(call, **options), (normal(*shape), normal(*weight)))
    lasting = (channels_last(*IMAGES), normal(64, 64, 3, 3))
    yield OpCase("conv2d, channels-last", "nn.functional.conv2d", _with(F.conv2d, padding=1), lasting)
    yield OpCase(
        "conv2d, bfloat16",
        "nn.functional.conv2d",
        _with(F.conv2d, padding=1),
        (normal(*IMAGES), normal(64, 64, 3, 3)),
        dtype=torch.bfloat16,
    )
    yield OpCase(
        "conv_transpose2d",
        "nn.functional.conv_transpose2d",
        _with(F.conv_transpose2d, stride=2),
        (normal(4, 64, 28, 28), normal(64, 32, 2, 2)),
    )
    yield OpCase(
        "conv_transpose1d", "nn.functional.conv_transpose1d", _with(F.conv_transpose1d, stride=2), (normal(4, 64, 1000), normal(64, 32, 4))
    )
    for kind, size in (("max", 3), ("avg", 3)):
        for space, shape in ((1, (16, 64, 2000)), (2, IMAGES), (3, (2, 16, 24, 24, 24))):
            name = f"{kind}_pool{space}d"
            yield OpCase(name, f"nn.functional.{name}", _with(getattr(F, name), kernel_size=size, stride=2, padding=1), (normal(*shape),))
            name = f"adaptive_{kind}_pool{space}d"
            yield OpCase(name, f"nn.functional.{name}", _with(getattr(F, name), output_size=7), (normal(*shape),))
    yield OpCase("max_pool2d, channels-last", "nn.functional.max_pool2d", _with(F.max_pool2d, kernel_size=2), (channels_last(*IMAGES),))
    images, scale = (normal(*IMAGES),), (normal(64), normal(64))
    yield OpCase(
        "batch_norm, training", "nn.functional.batch_norm", lambda x, w, b: F.batch_norm(x, None, None, w, b, True), (*images, *scale)
    )
    yield OpCase("instance_norm", "nn.functional.instance_norm", F.instance_norm, images)
    yield OpCase("group_norm", "nn.functional.group_norm", lambda x, w, b: F.group_norm(x, 32, w, b), (*images, *scale))
    yield OpCase(
        "group_norm, wide",
        "nn.functional.group_norm",
        lambda x, w, b: F.group_norm(x, 32, w, b),
        (normal(2, 320, 64, 64), normal(320), normal(320)),
    )
    norm = (normal(*TOKENS), normal(768), normal(768))
    yield OpCase("layer_norm", "nn.functional.layer_norm", lambda x, w, b: F.layer_norm(x, (768,), w, b), norm)
    yield OpCase(
        "layer_norm, bfloat16", "nn.functional.layer_norm", lambda x, w, b: F.layer_norm(x, (768,), w, b), norm, dtype=torch.bfloat16
    )
    yield OpCase("rms_norm", "nn.functional.rms_norm", lambda x, w: F.rms_norm(x, (768,), w), norm[:2])
    yield OpCase("local_response_norm", "nn.functional.local_response_norm", lambda x: F.local_response_norm(x, 5), images)
    for mode in ("nearest", "bilinear", "bicubic"):
        yield OpCase(
            f"interpolate, {mode}", "nn.functional.interpolate", _with(F.interpolate, scale_factor=2.0, mode=mode), (normal(4, 32, 56, 56),)
        )
    yield OpCase("interpolate, smaller", "nn.functional.interpolate", _with(F.interpolate, size=(40, 40), mode="bilinear"), images)
    yield OpCase(
        "interpolate, trilinear",
        "nn.functional.interpolate",
        _with(F.interpolate, scale_factor=2.0, mode="trilinear"),
        (normal(1, 16, 16, 16, 16),),
    )
    yield OpCase(
        "grid_sample",
        "nn.functional.grid_sample",
        _with(F.grid_sample, align_corners=False),
        (normal(4, 32, 56, 56), uniform(4, 56, 56, 2, low=-1, high=1)),
    )
    yield OpCase(
        "affine_grid", "nn.functional.grid_sample", lambda x: F.affine_grid(x, [8, 3, 224, 224], align_corners=False), (normal(8, 2, 3),)
    )
    heads = (normal(8, 12, 197, 64),) * 3
    yield OpCase("attention", "nn.functional.scaled_dot_product_attention", F.scaled_dot_product_attention, heads)
    causal = _with(F.scaled_dot_product_attention, is_causal=True)
    yield OpCase("attention, causal", "nn.functional.scaled_dot_product_attention", causal, (normal(2, 12, 512, 64),) * 3)
    yield OpCase(
        "attention, one token",
        "nn.functional.scaled_dot_product_attention",
        F.scaled_dot_product_attention,
        (normal(8, 12, 1, 64), normal(8, 12, 1024, 64), normal(8, 12, 1024, 64)),
    )
    yield OpCase(
        "attention, bfloat16", "nn.functional.scaled_dot_product_attention", F.scaled_dot_product_attention, heads, dtype=torch.bfloat16
    )
    yield OpCase("cosine_similarity", "nn.functional.cosine_similarity", F.cosine_similarity, (normal(*ROWS), normal(*ROWS)))
    yield OpCase("pairwise_distance", "nn.functional.pairwise_distance", F.pairwise_distance, (normal(*ROWS), normal(*ROWS)))


def _losses() -> Iterator[OpCase]:
    for name in _names("mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss poisson_nll_loss"):
        two = normal(*MATRIX), normal(*MATRIX)
        yield OpCase(name, f"nn.functional.{name}", getattr(F, name), two, name != "soft_margin_loss")
    classes, target = normal(4096, 1000), whole(1000, 4096)
    yield OpCase("cross_entropy", "nn.functional.cross_entropy", F.cross_entropy, (classes, target))
    yield OpCase("cross_entropy, smoothed", "nn.functional.cross_entropy", _with(F.cross_entropy, label_smoothing=0.1), (classes, target))
    yield OpCase(
        "cross_entropy over a vocabulary", "nn.functional.cross_entropy", F.cross_entropy, (normal(256, 50_257), whole(50_257, 256))
    )
    yield OpCase("nll_loss", "nn.functional.nll_loss", F.nll_loss, (classes, target))
    yield OpCase("kl_div", "nn.functional.kl_div", _with(F.kl_div, reduction="batchmean"), (normal(*MATRIX), uniform(*MATRIX)))
    yield OpCase("binary_cross_entropy", "nn.functional.binary_cross_entropy", F.binary_cross_entropy, (uniform(*MATRIX), uniform(*MATRIX)))
    yield OpCase(
        "binary_cross_entropy_with_logits",
        "nn.functional.binary_cross_entropy_with_logits",
        F.binary_cross_entropy_with_logits,
        (normal(*MATRIX), uniform(*MATRIX)),
    )
    yield OpCase(
        "binary_cross_entropy_with_logits, rows of 197",
        "nn.functional.binary_cross_entropy_with_logits",
        lambda x, y: F.binary_cross_entropy_with_logits(x, y, reduction="none").mean(-1),
        (normal(4000, 197), uniform(4000, 197)),
    )
    yield OpCase(
        "triplet_margin_loss", "nn.functional.triplet_margin_loss", F.triplet_margin_loss, (normal(*ROWS), normal(*ROWS), normal(*ROWS))
    )
    yield OpCase("multi_margin_loss", "nn.functional.multi_margin_loss", F.multi_margin_loss, (normal(4096, 100), whole(100, 4096)))


_NO_GRADIENT = ("ceil", "floor", "round", "sign", "sgn", "trunc", "special.bessel_j0", "special.bessel_j1", "i0")
# Name, input, weight, options.
_CONVOLUTIONS: tuple[tuple[str, tuple[int, ...], tuple[int, ...], dict[str, Any]], ...] = (
    ("3x3", IMAGES, (64, 64, 3, 3), {"padding": 1}),
    ("1x1", IMAGES, (256, 64, 1, 1), {}),
    ("3x3 stride 2", IMAGES, (128, 64, 3, 3), {"padding": 1, "stride": 2}),
    ("7x7 stem", (4, 3, 224, 224), (64, 3, 7, 7), {"padding": 3, "stride": 2}),
    ("patches", (4, 3, 224, 224), (192, 3, 16, 16), {"stride": 16}),
    ("depthwise 3x3", IMAGES, (64, 1, 3, 3), {"padding": 1, "groups": 64}),
    ("depthwise 5x5", IMAGES, (64, 1, 5, 5), {"padding": 2, "groups": 64}),
    ("depthwise 7x7", IMAGES, (64, 1, 7, 7), {"padding": 3, "groups": 64}),
    ("depthwise 3x3 stride 2", IMAGES, (64, 1, 3, 3), {"padding": 1, "stride": 2, "groups": 64}),
    ("grouped 3x3", IMAGES, (64, 8, 3, 3), {"padding": 1, "groups": 8}),
    ("dilated 3x3", IMAGES, (64, 64, 3, 3), {"padding": 2, "dilation": 2}),
    ("3", (8, 64, 2000), (64, 64, 3), {"padding": 1}),
    ("depthwise 4", (8, 256, 1000), (256, 1, 4), {"padding": 3, "groups": 256}),
    ("depthwise 31", (8, 256, 500), (256, 1, 31), {"padding": 15, "groups": 256}),
    ("3x3x3", (1, 16, 24, 24, 24), (16, 16, 3, 3, 3), {"padding": 1}),
)


def _names(text: str) -> list[str]:
    return text.split()


def _function(name: str) -> Callable[..., Any]:
    """Returns torch's function with this name of op_db."""
    found: Any = torch
    for part in name.split("."):
        found = getattr(found, part)
    call: Callable[..., Any] = found
    return call


def _along(call: Callable[..., Any], dim: int) -> Callable[..., Any]:
    return lambda x: call(x, dim=dim)


def _with(call: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return lambda *args: call(*args, **options)


def _padding(mode: str) -> Callable[..., Any]:
    return lambda x: F.pad(x, (1, 1, 1, 1), mode=mode)


def _permutation(generator: torch.Generator) -> torch.Tensor:
    return torch.randperm(1000, generator=generator)


def _permutations(generator: torch.Generator) -> torch.Tensor:
    return torch.rand(MATRIX, generator=generator).argsort(1)


def _spectrogram(x: torch.Tensor) -> torch.Tensor:
    return torch.stft(x, 512, window=torch.ones(512, device=x.device), return_complex=True).abs()


CASES = {case.name: case for case in _cases()}
