"""Lets XLA choose the layouts of arrays that only dynaxla's own programs read or write.

XLA's compiler for GPUs gives the operands and results of each operation the layouts that its kernels need (cuDNN's convolutions need
channels last). At the program's arguments and results, XLA transposes to and from the layouts of these. If dynaxla owns both the producer
and the consumer of an array, no transpose is needed: the program is compiled with an open layout of the array, and the compiled program
reports the layout that XLA chose. For a result no report is needed: the result array has its layout, and the tensor made from the array has
the matching strides.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax
from jax.experimental.layout import Format, Layout, with_layout_constraint
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Sharding

from ...errors import CompilationError
from ...runtime.programs import Orders


def opens_layouts(platform: str) -> bool:
    """True if XLA chooses layouts on this platform. XLA's CPU compiler changes no layout: on the CPU, passes/jaxpr/transposes.py does."""
    return platform != "cpu"


def with_open_layouts(
    traced: jax.stages.Traced, name: str, avals: Sequence[jax.ShapeDtypeStruct], arguments: Collection[int], results: Collection[int]
) -> jax.stages.Traced:
    """Returns a copy of a traced program in which XLA chooses some layouts. The copy takes positional arrays and returns a list.

    Args:
        traced: The program.
        name: The program's name.
        avals: The shapes and dtypes with which the program was traced.
        arguments: The indices of the arguments whose layouts are open.
        results: The indices of the results whose layouts are open.
    """
    # The jaxpr is traced a second time, because the structure of the results carries the facts, which are known only after a trace.
    evaluate = jaxpr_as_fun(traced.jaxpr)

    def run(*arrays: jax.Array) -> list[jax.Array]:
        values = evaluate(*arrays)
        # If one result's layout is open, XLA chooses the layouts of all results, even of those with an explicit Format (jaxlib 0.10.2
        # and 0.11.2, H200, 2026-11-27). It respects a layout constraint inside the program.
        return [value if not results or index in results else _row_major(value) for index, value in enumerate(values)]

    run.__name__ = name
    in_formats = tuple(_open(aval.sharding) if index in arguments else aval.sharding for index, aval in enumerate(avals))
    sharding = avals[0].sharding if avals else None
    count = len(traced.jaxpr.jaxpr.outvars)
    out_formats = [_open(sharding) if index in results else sharding for index in range(count)]
    with jax.enable_x64(True):
        return jax.jit(run, keep_unused=True, in_shardings=in_formats, out_shardings=out_formats).trace(*avals)


def sharded_as(
    traced: jax.stages.Traced,
    name: str,
    avals: Sequence[jax.ShapeDtypeStruct],
    shardings: Sequence[Sharding | None],
    donated: Sequence[int] = (),
) -> jax.stages.Traced:
    """Returns a copy of a traced program with fixed shardings of its first results. The copy returns a list.

    Args:
        traced: The program.
        name: The program's name.
        avals: The shapes and dtypes with which the program was traced.
        shardings: The shardings of the first results. XLA chooses the sharding if an entry is None, and of all further results.
        donated: The indices of the donated arguments.
    """
    evaluate = jaxpr_as_fun(traced.jaxpr)

    def run(*arrays: jax.Array) -> list[jax.Array]:
        return list(evaluate(*arrays))

    run.__name__ = name
    out_shardings = [*shardings, *[None] * (len(traced.jaxpr.jaxpr.outvars) - len(shardings))]
    with jax.enable_x64(True):
        return jax.jit(run, keep_unused=True, donate_argnums=tuple(donated), out_shardings=out_shardings).trace(*avals)


def check_closed(orders: Orders, open_ones: Collection[int]) -> None:
    """Checks that each array whose layout was not open is row-major. open_ones: the arrays with open layouts. Raises: CompilationError."""
    for index, order in orders.items():
        if index not in open_ones and order != tuple(range(len(order))):
            raise CompilationError(
                f"XLA chose the dimension order {list(order)} for array {index}, and dynaxla requested row-major order",
                hint="this version of jax or of its plugin ignores requested layouts: install another version",
            )


def _row_major(value: jax.Array) -> jax.Array:
    return with_layout_constraint(value, Layout(tuple(range(value.ndim)))) if value.ndim > 1 else value


def _open(sharding: Any) -> Format:
    """Returns a Format with this sharding whose layout XLA chooses."""
    return Format(Layout.AUTO, sharding)
