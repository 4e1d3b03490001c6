"""Lets XLA choose in which order dimensions lie in memory, where nobody else sees it.

XLA's compiler for GPUs gives each operation's operands and results the layouts that its kernels want (cuDNN's convolutions want channels
last), and transposes between those and the layouts of what enters and leaves a program. Where both sides are ours, nothing has to be
transposed: the program is compiled with these layouts left open, and tells afterwards what has become of them. A result needs no telling:
the array knows its layout, and the tensor that is made of it has the strides.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax
from jax.experimental.layout import Format, Layout, with_layout_constraint
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Sharding

from ..errors import CompilationError
from ..runtime.programs import Orders


def opens_layouts(platform: str) -> bool:
    """Whether layouts are left to XLA. Its compiler for the CPU takes every layout as it is: cpu/transposes.py chooses there."""
    return platform != "cpu"


def with_open_layouts(
    traced: jax.stages.Traced, name: str, avals: Sequence[jax.ShapeDtypeStruct], arguments: Collection[int], results: Collection[int]
) -> jax.stages.Traced:
    """A traced program of positional arrays, the layouts of some of its arrays left to XLA. Its results are a list.

    name: of the program. avals: what it was traced with. arguments, results: the indices of these arrays.
    """
    # A program's results are a tree with facts in it, which are not known before it is traced. So what was traced is traced once more.
    evaluate = jaxpr_as_fun(traced.jaxpr)

    def run(*arrays: jax.Array) -> list[jax.Array]:
        values = evaluate(*arrays)
        # Where one result's layout is open, XLA chooses all of them, an explicit Format of another result notwithstanding (jaxlib 0.10.2
        # and 0.11.2, H200, 2026-11-27). It obeys a constraint inside the program.
        return [value if not results or index in results else _row_major(value) for index, value in enumerate(values)]

    run.__name__ = name
    given = tuple(_open(aval.sharding) if index in arguments else aval.sharding for index, aval in enumerate(avals))
    sharding = avals[0].sharding if avals else None
    count = len(traced.jaxpr.jaxpr.outvars)
    returned = [_open(sharding) if index in results else sharding for index in range(count)]
    with jax.enable_x64(True):
        return jax.jit(run, keep_unused=True, in_shardings=given, out_shardings=returned).trace(*avals)


def sharded_as(
    traced: jax.stages.Traced,
    name: str,
    avals: Sequence[jax.ShapeDtypeStruct],
    shardings: Sequence[Sharding | None],
    donated: Sequence[int] = (),
) -> jax.stages.Traced:
    """A traced program whose first results have these shardings; XLA chooses those of all others, and where there is None.

    name: of the program. avals: what it was traced with. donated: the arguments, by index, that it may write to. Its results are a list.
    """
    evaluate = jaxpr_as_fun(traced.jaxpr)

    def run(*arrays: jax.Array) -> list[jax.Array]:
        return list(evaluate(*arrays))

    run.__name__ = name
    returned = [*shardings, *[None] * (len(traced.jaxpr.jaxpr.outvars) - len(shardings))]
    with jax.enable_x64(True):
        return jax.jit(run, keep_unused=True, donate_argnums=tuple(donated), out_shardings=returned).trace(*avals)


def check_closed(orders: Orders, open_ones: Collection[int]) -> None:
    """Raises: CompilationError if an array lies in another than row-major order, though its layout was not open."""
    for index, order in orders.items():
        if index not in open_ones and order != tuple(range(len(order))):
            raise CompilationError(
                f"XLA has laid out the dimensions of array {index} as {list(order)}, though it was asked for row-major order",
                hint="please report this, with the versions of jax and of its plugin",
            )


def _row_major(value: jax.Array) -> jax.Array:
    return with_layout_constraint(value, Layout(tuple(range(value.ndim)))) if value.ndim > 1 else value


def _open(sharding: Any) -> Format:
    """A layout that XLA chooses."""
    return Format(Layout.AUTO, sharding)
