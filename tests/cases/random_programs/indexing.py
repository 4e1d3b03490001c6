"""Steps that select, concatenate and rearrange elements into new memory."""

from __future__ import annotations

from .builder import Builder, has_dims, has_elements, is_bool, is_integral, is_number
from .program import Step, evaluate
from .registry import draws, unary


def index_list(b: Builder, size: int, count: int | None = None, distinct: bool = False, negative: bool = True) -> list[int]:
    """Returns positions in a dimension of `size` elements, counted from the start or from the end."""
    if count is None:
        count = b.integer(0 if b.chance(5) else 1, size if distinct else 4)
    left = list(range(size))
    positions = []
    for _ in range(count):
        position = left.pop(b.integer(0, len(left) - 1)) if distinct else b.integer(0, size - 1)
        positions.append(position - size if negative and b.chance(20) else position)
    return positions


def tensor_text(numbers: list[int]) -> str:
    return f"torch.tensor({numbers}, dtype=torch.int64)"


def _indexed(b: Builder) -> tuple[int, int, int]:
    """Returns a value with elements, one of its dimensions, and the size of this dimension."""
    x = b.value(lambda t: has_dims(t) and has_elements(t))
    dim = b.dim(x)
    return x, dim, b.tensors[x].shape[dim]


def index_value(b: Builder, size: int, rank: int | None = None) -> int:
    """Returns a value that can be an index into `size` elements."""
    return b.value(
        lambda t: (
            is_integral(t)
            and not is_bool(t)
            and t.element_size() == 8
            and (rank is None or t.dim() == rank)
            and (not t.numel() or (int(t.min()) >= 0 and int(t.max()) < size))
        )
    )


@draws("indexing")
def index_select(b: Builder) -> Step:
    x, dim, size = _indexed(b)
    return Step("index_select", f"$0.index_select({dim}, {tensor_text(index_list(b, size, negative=False))})", (x,))


@draws("indexing")
def index_select_tensor(b: Builder) -> Step:
    x, dim, size = _indexed(b)
    return Step("index_select", f"$0.index_select({dim}, $1)", (x, index_value(b, size, 1)))


@draws("indexing")
def index_tensor(b: Builder) -> Step:
    x = b.value(lambda t: has_dims(t) and has_elements(t))
    first = b.integer(0, b.tensors[x].dim() - 1)
    size = b.tensors[x].shape[first]
    prefix = ":, " * first
    if b.chance(50):
        return Step("index", f"$0[{prefix}{tensor_text(index_list(b, size))}]", (x,))
    return Step("index", f"$0[{prefix}$1]", (x, index_value(b, size)))


@draws("indexing")
def index_two(b: Builder) -> Step:
    x = b.value(lambda t: t.dim() >= 2 and has_elements(t))
    rows, columns = b.tensors[x].shape[:2]
    count = b.integer(1, 3)
    first, second = index_list(b, rows, count), index_list(b, columns, count)
    between = b.pick(["", "None, "] + (["..., "] if b.tensors[x].dim() == 2 else []))
    return Step("index", f"$0[{tensor_text(first)}, {between}{tensor_text(second)}]", (x,))


@draws("indexing")
def index_ends(b: Builder) -> Step:
    x = b.value(lambda t: t.dim() >= 3 and has_elements(t))
    shape = b.tensors[x].shape
    first, last = index_list(b, shape[0], 2), index_list(b, shape[2], 2)
    return Step("index", f"$0[{tensor_text(first)}, :, {tensor_text(last)}]", (x,))


@draws("indexing")
def gather(b: Builder) -> Step:
    x, dim, size = _indexed(b)
    rank = b.tensors[x].dim()
    index = index_value(b, size, rank)
    return Step("gather", f"torch.gather($0, {dim}, $1)", (x, index))


@draws("indexing")
def gather_positions(b: Builder) -> Step:
    x, dim, _ = _indexed(b)
    name = b.pick(["argsort($0, dim={}, stable=True)", "argmax($0, dim={}, keepdim=True)"]).format(dim)
    pick = b.pick([f"torch.gather($0, {dim}, torch.{name})", f"torch.take_along_dim($0, torch.{name}, {dim})"])
    return Step("gather", pick, (b.value(lambda t: t is b.tensors[x] and is_number(t) and not t.is_complex()),))


@draws("indexing")
def take(b: Builder) -> Step:
    x = b.value(has_elements)
    return Step("take", f"$0.take({tensor_text(index_list(b, b.tensors[x].numel()))})", (x,))


@draws("indexing")
def flip(b: Builder) -> Step:
    x = b.value(has_dims)
    return Step("flip", f"$0.flip({b.dims(x)})", (x,))


@draws("indexing")
def roll(b: Builder) -> Step:
    x = b.value(has_dims)
    return Step("roll", b.pick([f"$0.roll({b.integer(-2, 4)}, {b.dim(x)})", f"$0.roll({b.integer(1, 3)})"]), (x,))


@draws("indexing")
def rot90(b: Builder) -> Step:
    x = b.value(lambda t: t.dim() >= 2)
    return Step("rot90", f"torch.rot90($0, {b.integer(-1, 3)}, {b.dims(x, b.tensors[x].dim())[:2]})", (x,))


@draws("indexing")
def cat(b: Builder) -> Step:
    x = b.value(has_dims)
    dim = b.integer(0, b.tensors[x].dim() - 1)
    shape = list(b.tensors[x].shape)
    y = b.value(lambda t: t.dim() == len(shape) and all(d == dim or t.shape[d] == size for d, size in enumerate(shape)))
    return Step("cat", f"torch.cat({b.pick(['[$0, $1]', '[$1, $0, $1]', '[$0]'])}, {dim})", (x, y))


@draws("indexing")
def stack(b: Builder) -> Step:
    x = b.value()
    y = b.value(lambda t: t.shape == b.tensors[x].shape)
    return Step("stack", f"torch.stack([$0, $1], {b.integer(-1, b.tensors[x].dim())})", (x, y))


@draws("indexing")
def repeat(b: Builder) -> Step:
    x = b.value()
    times = [b.integer(1, 2) for _ in range(b.tensors[x].dim() + b.integer(0, 1))]
    return Step("repeat", f"$0.{b.pick(['repeat', 'tile'])}({times})", (x,))


@draws("indexing")
def repeat_interleave(b: Builder) -> Step:
    x = b.value(has_dims)
    return Step("repeat_interleave", f"$0.repeat_interleave({b.integer(1, 2)}, dim={b.dim(x)})", (x,))


@draws("indexing")
def clone(b: Builder) -> Step:
    x = b.value()
    formats = ["", "memory_format=torch.contiguous_format"] + (["memory_format=torch.channels_last"] * 2 if b.tensors[x].dim() == 4 else [])
    return Step("clone", f"$0.clone({b.pick(formats)})", (x,))


@draws("indexing")
def channels_last(b: Builder) -> Step:
    x = b.value(lambda t: t.dim() == 4)
    return Step("contiguous", "$0.contiguous(memory_format=torch.channels_last)", (x,))


@draws("indexing")
def triangle(b: Builder) -> Step:
    x = b.value(lambda t: t.dim() >= 2)
    name = b.pick(["tril", "triu"])
    return Step(name, f"$0.{name}({b.integer(-1, 2)})", (x,))


@draws("indexing")
def pad(b: Builder) -> Step:
    x = b.value(has_dims)
    amounts = [b.integer(-1 if b.chance(20) else 0, 2) for _ in range(2 * b.integer(1, min(2, b.tensors[x].dim())))]
    return Step("pad", f"F.pad($0, {amounts}, value={b.number_like(b.tensors[x])})", (x,))


@draws("indexing")
def pad_by_elements(b: Builder) -> Step:
    x = b.value(lambda t: t.dim() in (2, 3) and t.is_floating_point())
    mode = b.pick(["replicate", "reflect", "circular"])
    return Step("pad", f'F.pad($0, [1, 1], mode="{mode}")', (x,))


@draws("indexing")
def diag(b: Builder) -> Step:
    x = b.value(lambda t: t.dim() in (1, 2))
    return Step("diag_embed", f"torch.diag_embed($0, {b.integer(-1, 1)})", (x,))


unary("indexing", "one_hot", "F.one_hot($0.long() % 3, 3)", lambda t: is_integral(t) and t.dim() <= 3)
unary("indexing", "meshgrid", "torch.meshgrid($0, $0, indexing='ij')", lambda t: t.dim() == 1, results=2)
unary("indexing", "expand_copy", "torch.unsqueeze_copy($0, 0)", lambda t: True)
unary("indexing", "bucketize", "torch.bucketize($0, torch.tensor([-1.0, 0.0, 1.5]))", lambda t: t.is_floating_point())


@draws("indexing")
def searchsorted(b: Builder) -> Step:
    x = b.value(lambda t: t.dim() == 1 and t.is_floating_point() and not bool(t.isnan().any()))
    return Step("searchsorted", "torch.searchsorted($0.sort().values, $0)", (x,), requires="not $0.isnan().any()")


@draws("indexing")
def embedding(b: Builder) -> Step:
    x = b.value(lambda t: t.dim() == 2 and t.is_floating_point() and has_elements(t))
    return Step("embedding", "F.embedding($1, $0)", (x, index_value(b, b.tensors[x].shape[0])))


# Out-of-place counterparts of writes


@draws("indexing")
def masked_fill(b: Builder) -> Step:
    x = b.value()
    mask = b.partner(x, is_bool)
    return Step("masked_fill", f"$0.masked_fill($1, {b.number_like(b.tensors[x])})", (x, mask))


@draws("indexing")
def index_fill(b: Builder) -> Step:
    x, dim, size = _indexed(b)
    index = tensor_text(index_list(b, size))
    return Step("index_fill", f"$0.index_fill({dim}, {index}, {b.number_like(b.tensors[x])})", (x,))


@draws("indexing")
def index_add(b: Builder) -> Step:
    x, dim, size = _indexed(b)
    index = tensor_text(index_list(b, size, size, negative=False))
    alpha = b.pick(["", ", alpha=2"]) if is_number(b.tensors[x]) else ""
    y = b.value(lambda t: t.dtype == b.tensors[x].dtype and t.shape == b.tensors[x].shape)
    return Step("index_add", f"$0.index_add({dim}, {index}, $1{alpha})", (x, y))


@draws("indexing")
def index_copy(b: Builder) -> Step:
    x, dim, size = _indexed(b)
    index = tensor_text(index_list(b, size, size, distinct=True, negative=False))
    y = b.value(lambda t: t.dtype == b.tensors[x].dtype and t.shape == b.tensors[x].shape)
    return Step("index_copy", f"$0.index_copy({dim}, {index}, $1)", (x, y))


@draws("indexing")
def index_put(b: Builder) -> Step:
    x = b.value(lambda t: has_dims(t) and has_elements(t))
    size = b.tensors[x].shape[0]
    accumulate = b.chance(50) and is_number(b.tensors[x])
    index = index_list(b, size, distinct=not accumulate)
    value = b.value(lambda t: t.dtype == b.tensors[x].dtype and t.shape in ((), (1,)))
    return Step("index_put", f"$0.index_put([{tensor_text(index)}], $1, accumulate={accumulate})", (x, value))


@draws("indexing")
def scatter(b: Builder) -> Step:
    """Accumulates at indices, which may repeat."""
    x, dim, size = _indexed(b)
    tensor = b.tensors[x]
    y = b.value(lambda t: t.dtype == tensor.dtype and t.shape == tensor.shape and is_number(t))
    reduce = b.pick(["sum", "amax", "amin", "prod", "mean"]) if not tensor.is_complex() else "sum"
    index = f"($0 != $1).long() % {size}"
    way = b.pick(
        [
            f"$0.scatter_add({dim}, {index}, $1)",
            f"$0.scatter_reduce({dim}, {index}, $1, '{reduce}', include_self={b.chance(50)})",
        ]
    )
    return Step("scatter", way, (x, y))


def _replacing(b: Builder, x: int, part: str) -> int:
    """Returns a value that can replace a part of x."""
    target = evaluate(part, [b.tensors[x]])
    return b.value(lambda t: t.dtype == target.dtype and t.shape == target.shape)


@draws("indexing")
def select_scatter(b: Builder) -> Step:
    x, dim, size = _indexed(b)
    index = b.integer(-size, size - 1)
    return Step("select_scatter", f"$0.select_scatter($1, {dim}, {index})", (x, _replacing(b, x, f"$0.select({dim}, {index})")))


@draws("indexing")
def slice_scatter(b: Builder) -> Step:
    x = b.value(has_dims)
    start, step = b.integer(0, b.tensors[x].shape[0]), b.integer(1, 3)
    return Step("slice_scatter", f"$0.slice_scatter($1, 0, {start}, None, {step})", (x, _replacing(b, x, f"$0[{start}::{step}]")))


@draws("indexing")
def diagonal_scatter(b: Builder) -> Step:
    x = b.value(lambda t: t.dim() == 2)
    offset = b.integer(-1, 1)
    return Step("diagonal_scatter", f"$0.diagonal_scatter($1, {offset})", (x, _replacing(b, x, f"$0.diagonal({offset})")))
