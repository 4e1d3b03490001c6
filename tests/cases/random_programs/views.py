"""Steps whose results are views of their operand."""

from __future__ import annotations

import math

import torch

from .builder import Builder, has_dims, has_elements, is_complex, is_float, is_inexact, is_number
from .program import Step
from .registry import draws, unary

NO_NANS = "not $0.isnan().any() and $0.ne(0).all()"


@draws("views")
def transpose(b: Builder) -> Step:
    x = b.value(has_dims)
    name = b.pick(["transpose", "swapaxes"])
    return Step(name, f"$0.{name}({b.dim(x)}, {b.dim(x)})", (x,))


@draws("views")
def permute(b: Builder) -> Step:
    x = b.value(lambda t: t.dim() > 1)
    return Step("permute", f"$0.permute({b.dims(x, b.tensors[x].dim())})", (x,))


@draws("views")
def movedim(b: Builder) -> Step:
    x = b.value(has_dims)
    return Step("movedim", f"torch.movedim($0, {b.dim(x)}, {b.dim(x)})", (x,))


unary("views", "t", "$0.t()", lambda t: t.dim() <= 2)
unary("views", "mT", "$0.mT", lambda t: t.dim() >= 2)
unary("views", "mH", "$0.mH", lambda t: t.dim() >= 2)
unary("views", "squeeze", "$0.squeeze()", lambda t: 1 in t.shape)
unary("views", "detach", "$0.detach()", lambda t: True)
unary("views", "ravel", "$0.ravel()", lambda t: True)
unary("views", "contiguous", "$0.contiguous()", lambda t: True)
unary("views", "real", "$0.real", lambda t: True)
unary("views", "imag", "$0.imag", is_complex)
unary("views", "conj", "$0.conj()", is_complex)
unary("views", "view_as_real", "torch.view_as_real($0)", is_complex)
unary("views", "view_as_complex", "torch.view_as_complex($0)", lambda t: t.dtype == torch.float32 and has_dims(t) and t.shape[-1] == 2)
unary("views", "atleast_2d", "torch.atleast_2d($0)", lambda t: t.dim() < 2)
unary("views", "alias", "$0.view_as($0)", lambda t: True)


def _shape(b: Builder, count: int) -> list[int]:
    """Returns a shape with this number of elements."""
    if count == 0:
        return b.pick([[0], [0, 2], [3, 0]])
    shape: list[int] = []
    for _ in range(b.integer(0, 3)):
        factor = b.pick([d for d in range(1, count + 1) if count % d == 0])
        shape.append(factor)
        count //= factor
    return [*shape, count] if count > 1 or not shape else shape


@draws("views")
def view(b: Builder) -> Step:
    x = b.value()
    shape = _shape(b, b.tensors[x].numel())
    if shape and 0 not in shape and b.chance(30):
        shape[b.integer(0, len(shape) - 1)] = -1
    name = b.pick(["view", "reshape"])
    return Step(name, f"$0.{name}({shape})", (x,))


@draws("views")
def flatten(b: Builder) -> Step:
    x = b.value(has_dims)
    first = b.integer(0, b.tensors[x].dim() - 1)
    return Step("flatten", f"$0.flatten({first}, {b.integer(first, b.tensors[x].dim() - 1)})", (x,))


@draws("views")
def unflatten(b: Builder) -> Step:
    x = b.value(lambda t: has_dims(t) and has_elements(t))
    dim = b.dim(x)
    return Step("unflatten", f"$0.unflatten({dim}, {_shape(b, b.tensors[x].shape[dim])})", (x,))


def slice_text(b: Builder, size: int) -> str:
    """Returns the text of a slice of a dimension."""
    start = "" if b.chance(30) else str(b.integer(0, size) - (size if b.chance(30) else 0))
    stop = "" if b.chance(50) else str(b.integer(0, size + 1) - (size if b.chance(20) else 0))
    step = b.pick(["", ":2", ":3", ":1"])
    return f"{start}:{stop}{step}"


def basic_index(b: Builder, number: int, new_dims: bool = True) -> str:
    """Returns the text of an index of slices and integers, with at most one ellipsis."""
    tensor = b.tensors[number]
    rank = b.integer(1, tensor.dim())
    parts = []
    from_end = b.chance(25)
    for dim in range(rank):
        size = tensor.shape[dim - rank] if from_end else tensor.shape[dim]
        if size and b.chance(25):
            parts.append(str(b.integer(0, size - 1) - (size if b.chance(30) else 0)))
        else:
            parts.append(slice_text(b, size))
    if from_end:
        parts.insert(0, "...")
    if new_dims and b.chance(15):
        parts.insert(b.integer(0, len(parts)), "None")
    return ", ".join(parts)


@draws("views")
def basic_indexing(b: Builder) -> Step:
    x = b.value(has_dims)
    return Step("slice", f"$0[{basic_index(b, x)}]", (x,))


@draws("views")
def slice_one(b: Builder) -> Step:
    x = b.value(has_dims)
    dim = b.integer(0, b.tensors[x].dim() - 1)
    return Step("slice", f"$0[{':, ' * dim}{slice_text(b, b.tensors[x].shape[dim])}]", (x,))


@draws("views")
def select(b: Builder) -> Step:
    x = b.value(lambda t: has_dims(t) and has_elements(t))
    dim = b.dim(x)
    size = b.tensors[x].shape[dim]
    return Step("select", f"$0.select({dim}, {b.integer(-size, size - 1)})", (x,))


@draws("views")
def narrow(b: Builder) -> Step:
    x = b.value(has_dims)
    dim = b.dim(x)
    start = b.integer(0, b.tensors[x].shape[dim])
    return Step("narrow", f"$0.narrow({dim}, {start}, {b.integer(0, b.tensors[x].shape[dim] - start)})", (x,))


@draws("views")
def squeeze_dim(b: Builder) -> Step:
    x = b.value(lambda t: 1 in t.shape)
    dim = b.pick([dim for dim, size in enumerate(b.tensors[x].shape) if size == 1])
    return Step("squeeze", f"$0.squeeze({dim})", (x,))


@draws("views")
def unsqueeze(b: Builder) -> Step:
    x = b.value()
    rank = b.tensors[x].dim()
    return Step("unsqueeze", f"$0.unsqueeze({b.integer(-rank - 1, rank)})", (x,))


@draws("views")
def expand(b: Builder) -> Step:
    x = b.value()
    shape = [b.integer(2, 3) if size == 1 and b.chance(80) else b.pick([size, -1]) for size in b.tensors[x].shape]
    shape = [b.integer(1, 3) for _ in range(b.integer(0, 1))] + shape
    return Step("expand", f"$0.expand({shape})", (x,))


@draws("views")
def expand_as(b: Builder) -> Step:
    x = b.value()
    y = b.partner(x)
    name = b.pick(["$0.expand_as($1)", "torch.broadcast_to($0, $1.shape)"])
    return Step("expand_as", name, (x, y))


@draws("views")
def unfold(b: Builder) -> Step:
    x = b.value(has_dims)
    dim = b.dim(x)
    return Step("unfold", f"$0.unfold({dim}, {b.integer(1, max(b.tensors[x].shape[dim], 1))}, {b.integer(1, 3)})", (x,))


@draws("views")
def diagonal(b: Builder) -> Step:
    x = b.value(lambda t: t.dim() > 1)
    first, second = b.dims(x, b.tensors[x].dim())[:2]
    return Step("diagonal", f"$0.diagonal({b.integer(-2, 2)}, {first}, {second})", (x,))


@draws("views")
def as_strided(b: Builder) -> Step:
    """A view of the operand's own elements, which are dense in memory."""
    x = b.value(lambda t: has_elements(t) and _is_dense(t))
    tensor = b.tensors[x]
    left = tensor.numel() - 1
    size, stride = [], []
    for _ in range(b.integer(0, 3)):
        step = b.integer(0, min(left, 4))
        extent = b.integer(1, min(4, left // step + 1) if step else 3)
        size.append(extent)
        stride.append(step)
        left -= (extent - 1) * step
    offset = b.integer(0, left)
    if (offset == 0 and b.chance(50)) or tensor.storage_offset():
        # An offset counts from the start of the storage. In a compiled program, the tensor may have another storage after a write.
        return Step("as_strided", f"$0.as_strided({size}, {stride})", (x,))
    return Step("as_strided", f"$0.as_strided({size}, {stride}, {offset})", (x,))


def _is_dense(tensor: torch.Tensor) -> bool:
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) == tensor.numel() and not (
        tensor.is_conj() or tensor.is_neg()
    )


@draws("views")
def view_dtype(b: Builder) -> Step:
    """A view of the same bits as integers, of the same or of another size.

    Excludes float64 and complex numbers, because it is unknown which of them are exact.
    """
    x = b.value(lambda t: is_number(t) and not (is_inexact(t) and t.element_size() > 4))
    others = {1: [torch.int8, torch.uint8, torch.int16], 2: [torch.int16, torch.uint8], 4: [torch.int32, torch.int16, torch.uint8]}
    dtype = b.pick(others.get(b.tensors[x].element_size(), [torch.int64, torch.int32]))
    return Step("view_dtype", f"$0.view({dtype})", (x,), requires="" if not is_float(b.tensors[x]) else NO_NANS)


@draws("views")
def split(b: Builder) -> Step:
    x = b.value(has_dims)
    dim = b.dim(x)
    size = b.tensors[x].shape[dim]
    way = b.pick(["split", "split_sizes", "chunk", "tensor_split"])
    if way == "split_sizes":
        first = b.integer(0, size)
        return Step("split", f"$0.split([{first}, {size - first}], {dim})", (x,), 2)
    if way == "split":
        piece = b.integer(max(1, math.ceil(size / 4)), max(size, 1))
        return Step("split", f"$0.split({piece}, {dim})", (x,), max(1, math.ceil(size / piece)))
    count = b.integer(1, 4)
    return Step(way, f"$0.{way}({count}, {dim})", (x,), len(getattr(b.tensors[x], way)(count, dim)))


@draws("views")
def unbind(b: Builder) -> Step:
    x = b.value(lambda t: has_dims(t) and 0 < min(t.shape) <= 4)
    dim = b.pick([dim for dim, size in enumerate(b.tensors[x].shape) if size <= 4])
    return Step("unbind", f"$0.unbind({dim})", (x,), b.tensors[x].shape[dim])
