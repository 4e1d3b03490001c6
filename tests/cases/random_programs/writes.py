"""Steps that write in place to a value, and so to all values that share its memory."""

from __future__ import annotations

import torch

from .builder import (
    Builder,
    has_dims,
    has_elements,
    is_bool,
    is_float,
    is_inexact,
    is_integer,
    is_integral,
    is_number,
    is_real,
    is_real_number,
)
from .indexing import index_list, tensor_text
from .program import Step
from .registry import draws
from .views import basic_index


def _write(op: str, b: Builder, code: str, operands: tuple[int, ...], requires: str = "") -> Step:
    """Returns a step that writes. At random, the written tensor is also a result."""
    return Step(op, code, operands, int(b.chance(30)), writes=True, requires=requires)


@draws("writes")
def arithmetic_(b: Builder) -> Step:
    x = b.target(is_number)
    y = b.source(x, lambda t: torch.can_cast(torch.promote_types(t.dtype, b.tensors[x].dtype), b.tensors[x].dtype))
    name = b.pick(["add_", "mul_", "sub_"])
    return _write(name, b, f"$0.{name}($1)", (x, y))


@draws("writes")
def arithmetic_with_number_(b: Builder) -> Step:
    x = b.target(is_number)
    name = b.pick(["add_", "mul_", "sub_"])
    return _write(name, b, f"$0.{name}({b.scalar(b.tensors[x])})", (x,))


@draws("writes")
def augmented(b: Builder) -> Step:
    """An in-place operation on a part, such as `x[0] += 1`."""
    x = b.target(lambda t: has_dims(t) and is_number(t))
    sign = b.pick(["+", "*", "-"])
    index = basic_index(b, x, new_dims=False)
    return Step("setitem", f"$0[{index}] {sign}= {b.number_like(b.tensors[x])}", (x,), 0, writes=True)


@draws("writes")
def divide_(b: Builder) -> Step:
    x = b.target(is_inexact)
    return _write("div_", b, f"$0.div_({b.pick(['2', '4', '-0.5', '3'])})", (x,))


@draws("writes")
def rounded_division_(b: Builder) -> Step:
    x = b.target(is_real_number)
    name = b.pick(["floor_divide_", "remainder_", "fmod_"])
    return _write(name, b, f"$0.{name}({b.pick(['2', '3'])})", (x,), requires="$0.isfinite().all()")


@draws("writes")
def copy_(b: Builder) -> Step:
    """Converts to the target's dtype."""
    x = b.target()
    target = b.tensors[x]
    real = (lambda t: True) if target.is_complex() else is_real
    y = b.source(x, real)
    narrow = is_integral(target) and is_inexact(b.tensors[y]) and not is_bool(target)
    least = 0 if target.dtype == torch.uint8 else -100
    requires = f"$1.isfinite().all() and $1.ge({least}).all() and $1.le(100).all()" if narrow else ""
    return _write("copy_", b, "$0.copy_($1)", (x, y), requires)


@draws("writes")
def fill_(b: Builder) -> Step:
    x = b.target()
    way = b.pick(["fill", "zero", "tensor"])
    if way == "tensor":
        y = b.value(lambda t: t.dim() == 0 and t.dtype == b.tensors[x].dtype)
        return _write("fill_", b, "$0.fill_($1)", (x, y))
    return _write("fill_", b, f"$0.fill_({b.number_like(b.tensors[x])})" if way == "fill" else "$0.zero_()", (x,))


@draws("writes")
def unary_(b: Builder) -> Step:
    name, condition = b.pick(
        [
            ("neg_", is_number),
            ("abs_", is_real_number),
            ("relu_", is_real_number),
            ("square_", is_number),
            ("floor_", is_float),
            ("sigmoid_", is_float),
            ("tanh_", is_float),
            ("sin_", is_float),
            ("bitwise_not_", is_integral),
            ("logical_not_", lambda t: True),
            ("trunc_", is_float),
            ("sign_", is_real_number),
        ]
    )
    return _write(name, b, f"$0.{name}()", (b.target(condition),))


@draws("writes")
def clamp_(b: Builder) -> Step:
    x = b.target(is_real_number)
    return _write("clamp_", b, f"$0.clamp_({b.pick(['min=0', 'max=1', '0, 2'])})", (x,))


@draws("writes")
def bitwise_(b: Builder) -> Step:
    x = b.target(is_integral)
    y = b.source(x, lambda t: t.dtype == b.tensors[x].dtype)
    name = b.pick(["bitwise_and_", "bitwise_or_", "bitwise_xor_"])
    return _write(name, b, f"$0.{name}($1)", (x, y))


@draws("writes")
def masked_fill_(b: Builder) -> Step:
    x = b.target()
    mask = b.source(x, is_bool)
    return _write("masked_fill_", b, f"$0.masked_fill_($1, {b.number_like(b.tensors[x])})", (x, mask))


@draws("writes")
def masked_assignment(b: Builder) -> Step:
    x = b.target(has_dims)
    mask = b.value(lambda t: is_bool(t) and t.shape == b.tensors[x].shape[: t.dim()] and has_dims(t))
    return Step("setitem", f"$0[$1] = {b.number_like(b.tensors[x])}", (x, mask), 0, writes=True)


@draws("writes")
def masked_where_compared(b: Builder) -> Step:
    x = b.target(lambda t: is_real_number(t) and has_dims(t))
    return Step("setitem", f"$0[$0 > 0] = {b.number_like(b.tensors[x])}", (x,), 0, writes=True)


@draws("writes")
def assignment(b: Builder) -> Step:
    x = b.target(has_dims)
    index = basic_index(b, x)
    if b.chance(50):
        return Step("setitem", f"$0[{index}] = {b.number_like(b.tensors[x])}", (x,), 0, writes=True)
    y = b.value(lambda t: is_real(t) and (not is_inexact(t) or is_inexact(b.tensors[x])))
    return Step("setitem", f"$0[{index}] = $1", (x, y), 0, writes=True)


@draws("writes")
def write_through_view(b: Builder) -> Step:
    x = b.target(lambda t: has_dims(t) and is_number(t))
    view = b.pick(
        [
            "unsqueeze(0)",
            "select(0, -1)",
            "transpose(0, -1)",
            "narrow(0, 0, 1)",
            "unbind(0)[0]",
            "chunk(2)[-1]",
            "diagonal()",
            "view(-1)[1:]",
            "flatten()[::2]",
        ]
    )
    method = b.pick(["add_(1)", "mul_(2)", "fill_(3)", "zero_()", "neg_()"])
    return Step("write_through_view", f"$0.{view}.{method}", (x,), 0, writes=True)


@draws("writes")
def index_put_(b: Builder) -> Step:
    x = b.target(lambda t: has_dims(t) and has_elements(t))
    tensor = b.tensors[x]
    accumulate = b.chance(50) and is_number(tensor)
    index = tensor_text(index_list(b, tensor.shape[0], distinct=not accumulate))
    y = b.value(lambda t: t.dtype == tensor.dtype and t.shape in (torch.Size(()), torch.Size((1,)), tensor.shape[1:]))
    return _write("index_put_", b, f"$0.index_put_(({index},), $1, accumulate={accumulate})", (x, y))


@draws("writes")
def index_assignment(b: Builder) -> Step:
    x = b.target(lambda t: has_dims(t) and has_elements(t))
    index = tensor_text(index_list(b, b.tensors[x].shape[-1], distinct=True))
    return Step("setitem", f"$0[..., {index}] = {b.number_like(b.tensors[x])}", (x,), 0, writes=True)


@draws("writes")
def index_methods_(b: Builder) -> Step:
    x = b.target(lambda t: has_dims(t) and has_elements(t))
    tensor, dim = b.tensors[x], b.dim(x)
    size = tensor.shape[dim]
    way = b.pick(["index_add_", "index_copy_", "index_fill_"])
    if way == "index_fill_":
        return _write(way, b, f"$0.index_fill_({dim}, {tensor_text(index_list(b, size))}, {b.number_like(tensor)})", (x,))
    index = tensor_text(index_list(b, size, size, distinct=way == "index_copy_", negative=False))
    y = b.value(lambda t: t.dtype == tensor.dtype and t.shape == tensor.shape)
    return _write(way, b, f"$0.{way}({dim}, {index}, $1)", (x, y))


@draws("writes")
def scatter_(b: Builder) -> Step:
    x = b.target(lambda t: has_dims(t) and has_elements(t) and is_number(t))
    tensor, dim = b.tensors[x], b.dim(x)
    y = b.value(lambda t: t.dtype == tensor.dtype and t.shape == tensor.shape)
    rows = f"($1 == $1.flip(0)).long() % {tensor.shape[dim]}"
    distinct = f"torch.arange({tensor.shape[dim]}).reshape({[-1 if d == dim % tensor.dim() else 1 for d in range(tensor.dim())]})"
    way = b.pick(
        [
            f"$0.scatter_({dim}, {distinct}.expand($0.shape).flip({dim}), $1)",
            f"$0.scatter_add_({dim}, {rows}, $1)",
            f"$0.scatter_({dim}, {distinct}.expand($0.shape), {b.number_like(tensor)})",
        ]
    )
    return _write("scatter_", b, way, (x, y))


@draws("writes")
def out_argument(b: Builder) -> Step:
    """`out=` with the result's shape and dtype. TorchDynamo supports only contiguous tensors."""
    x = b.target(lambda t: is_number(t) and t.is_contiguous())
    tensor = b.tensors[x]
    y = b.value(lambda t: t.dtype == tensor.dtype and t.shape == tensor.shape)
    name = b.pick(["add($1, $1", "mul($1, 2", "neg($1"])
    return _write("out", b, f"torch.{name}, out=$0)", (x, y))


@draws("writes")
def tri_(b: Builder) -> Step:
    x = b.target(lambda t: t.dim() >= 2 and is_number(t))
    return _write("tril_", b, f"$0.{b.pick(['tril_', 'triu_'])}({b.integer(-1, 1)})", (x,))


@draws("writes")
def cumulative_(b: Builder) -> Step:
    x = b.target(lambda t: is_number(t))
    return _write("cumsum_", b, f"$0.cumsum_({b.dim(x)})", (x,))


@draws("writes")
def fused_(b: Builder) -> Step:
    x = b.target(is_inexact)
    y, z = (b.source(x, lambda t: t.dtype == b.tensors[x].dtype) for _ in range(2))
    return _write("addcmul_", b, b.pick(["$0.addcmul_($1, $2)", "$0.lerp_($1, 0.25)", "$0.add_($1, alpha=2)"]), (x, y, z))


@draws("writes")
def shift_(b: Builder) -> Step:
    x = b.target(is_integer)
    return _write("shift_", b, f"$0.{b.pick(['bitwise_left_shift_', 'bitwise_right_shift_'])}({b.integer(0, 4)})", (x,))
