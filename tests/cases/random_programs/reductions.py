"""Steps that combine elements: reductions, scans, sorting, matrix products, layers."""

from __future__ import annotations

from .builder import (
    Builder,
    has_dims,
    has_elements,
    is_bool,
    is_float,
    is_inexact,
    is_integral,
    is_number,
    is_real,
)
from .program import Step
from .registry import draws, unary


def _over(b: Builder, number: int, several: bool = True) -> str:
    """Returns the arguments `dim` and `keepdim` of a reduction; "" for a reduction over all dimensions."""
    if not b.tensors[number].dim() or b.chance(25):
        return ""
    keep = b.pick(["", ", keepdim=True"])
    if several and b.chance(35):
        return f"{b.dims(number)}{keep}"
    return f"{b.dim(number)}{keep}"


@draws("reductions")
def sums(b: Builder) -> Step:
    x = b.value()
    over = _over(b, x)
    dtype = b.pick(["", "", "dtype=torch.float64", "dtype=torch.int64"]) if is_integral(b.tensors[x]) else ""
    name = b.pick(["sum", "nansum"]) if is_float(b.tensors[x]) else "sum"
    return Step(name, f"$0.{name}({', '.join(filter(None, [over, dtype]))})", (x,))


@draws("reductions")
def means(b: Builder) -> Step:
    x = b.value(lambda t: is_inexact(t) and has_elements(t))
    return Step("mean", f"$0.mean({_over(b, x)})", (x,))


@draws("reductions")
def products(b: Builder) -> Step:
    x = b.value()
    return Step("prod", f"$0.prod({_over(b, x, several=False)})", (x,))


@draws("reductions")
def extremes(b: Builder) -> Step:
    x = b.value(lambda t: is_real(t) and has_elements(t))
    name = b.pick(["amax", "amin"])
    return Step(name, f"$0.{name}({_over(b, x)})", (x,))


@draws("reductions")
def whole_extreme(b: Builder) -> Step:
    name = b.pick(["max", "min"])
    return Step(name, f"$0.{name}()", (b.value(lambda t: is_real(t) and has_elements(t)),))


@draws("reductions")
def extremes_with_indices(b: Builder) -> Step:
    x = b.value(lambda t: is_real(t) and has_elements(t))
    name = b.pick(["max", "min"])
    return Step(name, f"$0.{name}({b.dim(x)}{b.pick(['', ', keepdim=True'])})", (x,), 2)


@draws("reductions")
def position_of_extreme(b: Builder) -> Step:
    x = b.value(lambda t: is_real(t) and has_elements(t) and is_number(t))
    name = b.pick(["argmax", "argmin"])
    return Step(name, f"$0.{name}({_over(b, x, several=False)})", (x,))


@draws("reductions")
def both_extremes(b: Builder) -> Step:
    x = b.value(lambda t: is_real(t) and has_elements(t) and has_dims(t))
    return Step("aminmax", f"torch.aminmax($0, dim={b.dim(x)})", (x,), 2)


@draws("reductions")
def truth_values(b: Builder) -> Step:
    x = b.value()
    name = b.pick(["any", "all"])
    return Step(name, f"$0.{name}({_over(b, x)})", (x,))


@draws("reductions")
def count_nonzero(b: Builder) -> Step:
    x = b.value()
    return Step("count_nonzero", f"torch.count_nonzero($0{', ' + str(b.dim(x)) if has_dims(b.tensors[x]) and b.chance(60) else ''})", (x,))


@draws("reductions")
def std_or_var(b: Builder) -> Step:
    x = b.value(lambda t: is_float(t) and has_dims(t) and t.numel() > 1)
    name = b.pick(["var", "std"])
    dim = b.dim(x)
    if b.tensors[x].shape[dim] < 2:
        return Step(name, f"$0.{name}({dim}, correction=0)", (x,))
    return Step(name, f"$0.{name}({dim}{b.pick(['', ', correction=0', ', keepdim=True'])})", (x,))


@draws("reductions")
def norms(b: Builder) -> Step:
    x = b.value(lambda t: is_inexact(t) and has_elements(t))
    return Step("norm", f"torch.linalg.vector_norm($0, {b.pick(['2', '1', 'inf', '0'])}, dim={b.dim(x)})", (x,))


@draws("reductions")
def logsumexp(b: Builder) -> Step:
    x = b.value(lambda t: is_float(t) and has_elements(t))
    return Step("logsumexp", f"torch.logsumexp($0, {b.dim(x)})", (x,))


@draws("reductions")
def scans(b: Builder) -> Step:
    x = b.value()
    name = b.pick(["cumsum", "cumprod"])
    return Step(name, f"$0.{name}({b.dim(x)})", (x,))


@draws("reductions")
def running_extremes(b: Builder) -> Step:
    x = b.value(lambda t: is_real(t))
    name = b.pick(["cummax", "cummin"])
    return Step(name, f"$0.{name}({b.dim(x)})", (x,), 2)


@draws("reductions")
def softmax(b: Builder) -> Step:
    x = b.value(is_float)
    name = b.pick(["softmax", "log_softmax"])
    return Step(name, f"torch.{name}($0, {b.dim(x)})", (x,))


@draws("reductions")
def sort(b: Builder) -> Step:
    x = b.value(is_real)
    return Step("sort", f"torch.sort($0, dim={b.dim(x)}, stable=True{b.pick(['', ', descending=True'])})", (x,), 2)


@draws("reductions")
def argsort(b: Builder) -> Step:
    x = b.value(is_real)
    return Step("argsort", f"torch.argsort($0, dim={b.dim(x)}, stable=True)", (x,))


@draws("reductions")
def topk(b: Builder) -> Step:
    x = b.value(lambda t: is_real(t) and has_dims(t) and is_number(t))
    dim = b.dim(x)
    count = b.integer(0, b.tensors[x].shape[dim])
    # PyTorch does not define which of equal numbers (also infinities, NaNs) is selected, and so which one gets the gradient.
    distinct = f"$0.isfinite().all() and $0.sort({dim}).values.diff(dim={dim}).ne(0).all()" if is_inexact(b.tensors[x]) else ""
    return Step("topk", f"$0.topk({count}, {dim}{b.pick(['', ', largest=False'])}).values", (x,), requires=distinct)


@draws("reductions")
def median(b: Builder) -> Step:
    x = b.value(lambda t: is_real(t) and has_elements(t) and is_number(t))
    dim = b.dim(x)
    code = b.pick([f"$0.median({dim}).values", "$0.median()"])
    # Along a dimension of stride 0, PyTorch's kernel reads the memory after the tensor.
    return Step("median", code, (x,), requires=f"$0.dim() == 0 or $0.stride({dim}) > 0 or $0.shape[{dim}] < 2")


unary("reductions", "trace", "$0.trace()", lambda t: t.dim() == 2 and is_number(t))
unary("reductions", "diff", "torch.diff($0)", lambda t: has_dims(t))
# eps: with the default, a rounding error in the mean of equal numbers would be multiplied by 316.
unary("reductions", "layer_norm", "F.layer_norm($0, $0.shape[-1:], eps=0.5)", lambda t: is_float(t) and has_dims(t) and t.shape[-1] > 1)
unary("reductions", "normalize", "F.normalize($0, dim=-1, eps=0.5)", lambda t: is_float(t) and has_dims(t))
unary("reductions", "bool_sum", "$0.sum()", is_bool)


# Products

# Some algorithms multiply infinities by the zeros of the padding, others do not.
FINITE = "$0.isfinite().all() and $1.isfinite().all()"


@draws("products")
def matmul(b: Builder) -> Step:
    x = b.value(lambda t: has_dims(t) and is_number(t))
    size, dtype = b.tensors[x].shape[-1], b.tensors[x].dtype
    y = b.value(lambda t: has_dims(t) and t.dtype == dtype and t.shape[max(t.dim() - 2, 0)] == size)
    return Step("matmul", "$0 @ $1", (x, y))


@draws("products")
def matmul_with_transposed(b: Builder) -> Step:
    x = b.value(lambda t: t.dim() >= 2 and is_number(t))
    return Step("matmul", b.pick(["$0 @ $0.mT", "$0.mT @ $0", "torch.einsum('...ij,...ik->...jk', $0, $0)"]), (x,))


@draws("products")
def linear(b: Builder) -> Step:
    x = b.value(lambda t: has_dims(t) and is_float(t))
    size, dtype = b.tensors[x].shape[-1], b.tensors[x].dtype
    weight = b.value(lambda t: t.dim() == 2 and t.dtype == dtype and t.shape[1] == size)
    return Step("linear", "F.linear($0, $1)", (x, weight))


@draws("products")
def outer(b: Builder) -> Step:
    x = b.value(lambda t: t.dim() == 1)
    return Step("outer", "torch.outer($0, $1)", (x, b.value(lambda t: t.dim() == 1)))


@draws("products")
def addmm(b: Builder) -> Step:
    x = b.value(lambda t: t.dim() == 2 and is_number(t))
    rows = b.tensors[x].shape[0]
    bias = b.value(lambda t: t.dtype == b.tensors[x].dtype and t.dim() <= 2 and t.shape[-1:] in ((rows,), (1,)))
    factors = b.pick(["", ", beta=2", ", alpha=3"])
    return Step("addmm", f"torch.addmm($1, $0, $0.t(){factors})", (x, bias))


@draws("products")
def baddbmm(b: Builder) -> Step:
    x = b.value(lambda t: t.dim() == 3 and is_float(t))
    return Step("bmm", b.pick(["torch.bmm($0, $0.mT)", "torch.baddbmm($0[:, :, :1], $0, $0.mT)"]), (x,))


@draws("products")
def tensordot(b: Builder) -> Step:
    x = b.value(lambda t: t.dim() >= 1 and is_number(t))
    return Step("tensordot", "torch.tensordot($0, $0, dims=[[-1], [-1]])", (x,))


@draws("products")
def convolution(b: Builder) -> Step:
    x = b.value(lambda t: t.dim() == 3 and is_float(t) and 0 not in t.shape)
    size = b.tensors[x].shape[1]
    weight = b.value(lambda t: t.dim() == 3 and t.dtype == b.tensors[x].dtype and t.shape[1] == size and 0 not in t.shape)
    return Step("conv1d", f"F.conv1d($0, $1, padding=2, stride={b.integer(1, 2)})", (x, weight), requires=FINITE)


@draws("products")
def pooling(b: Builder) -> Step:
    x = b.value(lambda t: t.dim() in (3, 4) and is_float(t) and 0 not in t.shape)
    kind = "1d" if b.tensors[x].dim() == 3 else "2d"
    name = b.pick([f"max_pool{kind}", f"avg_pool{kind}"])
    return Step(name, f"F.{name}($0, 2, stride=1, padding=1)", (x,))


@draws("products")
def kron(b: Builder) -> Step:
    x = b.value(lambda t: t.numel() <= 12 and is_number(t) and t.dim() <= 2)
    return Step("kron", "torch.kron($0, $1)", (x, b.value(lambda t: t.numel() <= 12 and is_number(t) and t.dim() <= 2)))


@draws("products")
def loss(b: Builder) -> Step:
    x = b.value(is_float)
    y = b.partner(x, lambda t: t.dtype == b.tensors[x].dtype and t.shape == b.tensors[x].shape)
    name = b.pick(["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"])
    reduction = b.pick(["mean", "sum", "none"])
    # PyTorch's gradient of smooth_l1_loss at NaNs differs between its vectorized code and its code for the remaining elements.
    return Step(name, f'F.{name}($0, $1, reduction="{reduction}")', (x, y), requires="$0.isfinite().all() and $1.isfinite().all()")
