"""Collectives of `torch.distributed` inside a program: it calls torch's own, on its own buffers, with the user's process groups.

All of a program's collectives have one order, that of the graph: each takes the turn that the one before has handed on, since XLA knows no
order among them, and two processes that call collectives in different orders wait for each other for ever. One returns when its result has
arrived, so that waiting for it (`wait_tensor`) is nothing.

Source: torch.distributed._functional_collectives; its ops are the functional forms of the collectives in torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jax import Array

from ...runtime.layout import row_major
from .. import asynchronous
from ..context import Context
from ..fallback import PLATFORMS, call_back
from ..registry import lowers

Tensors = Sequence[torch.Tensor]


def _all_reduce(outputs: Tensors, inputs: Tensors, reduce_op: str, group: Any) -> None:
    outputs[0].copy_(inputs[0])
    _wait(_op("all_reduce_")(outputs[0], reduce_op, group))


def _all_reduce_coalesced(outputs: Tensors, inputs: Tensors, reduce_op: str, group: Any) -> None:
    for output, operand in zip(outputs, inputs, strict=True):
        output.copy_(operand)
    _wait(*_op("all_reduce_coalesced_")(list(outputs), reduce_op, group))


def _broadcast(outputs: Tensors, inputs: Tensors, source: int, group: Any) -> None:
    outputs[0].copy_(inputs[0])
    _wait(_op("broadcast_")(outputs[0], source, group))


def _all_gather(outputs: Tensors, inputs: Tensors, size: int, group: Any) -> None:
    _wait(_op("all_gather_into_tensor_out")(inputs[0], size, group, out=outputs[0]))


def _reduce_scatter(outputs: Tensors, inputs: Tensors, reduce_op: str, size: int, group: Any) -> None:
    _wait(_op("reduce_scatter_tensor_out")(inputs[0], reduce_op, size, group, out=outputs[0]))


def _op(name: str) -> Any:
    return getattr(torch.ops._c10d_functional, name)


def _wait(*results: torch.Tensor) -> None:
    for result in results:
        torch.ops._c10d_functional.wait_tensor(result)


def _into(op: Any, takes_several: bool) -> Callable[..., None]:
    """A collective that makes tensors of its own, and then copies them."""

    def run(outputs: Tensors, inputs: Tensors, *args: Any) -> None:
        found = op(list(inputs) if takes_several else inputs[0], *args)
        found = [found] if isinstance(found, torch.Tensor) else list(found)
        _wait(*found)
        for output, result in zip(outputs, found, strict=True):
            output.copy_(result)

    return run


# What writes its result where it is wanted.
_IN_PLACE: dict[str, Callable[..., None]] = {
    "_c10d_functional::all_gather_into_tensor": _all_gather,
    "_c10d_functional::all_reduce": _all_reduce,
    "_c10d_functional::all_reduce_coalesced": _all_reduce_coalesced,
    "_c10d_functional::broadcast": _broadcast,
    "_c10d_functional::reduce_scatter_tensor": _reduce_scatter,
}


def _collective(*args: Any, ctx: Context) -> Any:
    """The result of the current node's collective, when it has arrived."""
    op: Any = ctx.node.target
    operands, *rest = args
    several = isinstance(operands, list)
    run = _IN_PLACE.get(op._schema.name) or _into(op, several)
    arrays: list[Array] = operands if several else [operands]
    given = list(ctx.output) if isinstance(ctx.output, (tuple, list)) else [ctx.output]
    views = [(tuple(array.shape), row_major(array.shape)) for array in arrays]

    def write(outputs: Tensors, inputs: Tensors) -> None:
        run(outputs, inputs, *rest)

    results = call_back(ctx, write, arrays, given, views=views, plain=tuple(map(str, rest)), acts=True)
    return results if isinstance(ctx.output, (tuple, list)) else results[0]


for _name in asynchronous.COLLECTIVES:
    lowers(_name, platforms=PLATFORMS)(_collective)


@lowers("_c10d_functional::wait_tensor", platforms=PLATFORMS)
def wait_tensor(x: Array) -> Array:
    """What a program's own collective gave: it has arrived."""
    return x
