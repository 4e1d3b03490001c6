"""Ops on lists of tensors: a row for each overload that returns new tensors. Further arguments follow from the schema."""

from collections.abc import Iterator
from typing import Any

import torch

from lowering.table.rows import NO_ORDER, Keywords, Make, Op, Samples, aten

# torch's shape propagation reads the values of the last argument, so these ops cannot be traced.
READ_VALUES = (aten._foreach_addcmul.Tensor, aten._foreach_addcdiv.Tensor)
# Eager mode has no kernels for integers.
ONLY_FLOATS = ("addcdiv", "frac", "lerp", "norm", "powsum")


def overloads() -> Iterator[torch._ops.OpOverload]:
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        if name.startswith("aten::_foreach_"):
            base, _, overload = name.removeprefix("aten::").partition(".")
            op = getattr(getattr(aten, base), overload or "default")
            if not op._schema.is_mutable and op not in READ_VALUES:
                yield op


def tensors(make: Make, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Tensors of these shapes, the last one with another dtype."""
    *first, last = (make(*shape) for shape in shapes)
    return [*first, last.to(torch.bfloat16 if last.is_floating_point() else torch.int32)]


def samples(op: torch._ops.OpOverload) -> Samples:
    """Samples: lists of a matrix and a vector, and a value for each kind of further argument."""

    def argument(kind: str, make: Make, n: int) -> Any:
        if kind == "List[Tensor]":
            return tensors(make, (n, 3), (3,)) if op.name() != "aten::_foreach_mm" else tensors(make, (3, 3), (3, 3))
        floats = make().is_floating_point()
        values = {"List[number]": [0.5, 2] if floats else [3, 1], "number": 0.7 if floats else 3, "Tensor": make(), "bool": False}
        return values[kind]

    kinds = [str(argument.type) for argument in op._schema.arguments if not argument.kwarg_only]
    named = Keywords(alpha=2) if any(argument.name == "alpha" for argument in op._schema.arguments) else Keywords()
    return lambda make, n: [(*(argument(kind, make, n) for kind in kinds if not kind.startswith("Optional")), named)]


def dtypes(op: torch._ops.OpOverload) -> tuple[torch.dtype, ...]:
    return (torch.float32,) if op._schema.name.removeprefix("aten::_foreach_") in ONLY_FLOATS else (torch.float32, torch.int64)


def without(op: torch._ops.OpOverload) -> tuple[str, ...]:
    if op is aten._foreach_pow.ScalarAndTensor:
        return NO_ORDER
    # torch's shape propagation refuses symbolic sizes.
    return ("changing sizes",) if op is aten._foreach_max.default else ()


# Gradients consist of the ops for single tensors.
ROWS: list[Op] = [Op(op, samples(op), dtypes(op), gradient=False, without=without(op)) for op in overloads()]

# The ops without a row, by the file that tests them.
ELSEWHERE: dict[str, str] = {}
