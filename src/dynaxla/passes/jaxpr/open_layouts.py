"""Lets XLA choose the layouts of arrays that only dynaxla's own programs read or write.

XLA's compiler for GPUs gives the operands and results of each operation the layouts that the operation's kernels need (cuDNN's convolutions
need channels last). If the program's arguments and results have other layouts, XLA adds transposes. No transpose is needed for an array
whose producer and consumers are all dynaxla's: the program is compiled with an *open* layout of the array, which XLA chooses, and the
compiled program reports the chosen layout. Results need no report: the tensor that is made from a result array gets the array's strides.
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
    """True if XLA chooses layouts on this platform. XLA:CPU chooses none: there, passes/jaxpr/transposes.py chooses memory orders."""
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
    # The jaxpr is traced a second time, since `out_shardings` must have the structure of the results. The structure of the traced program's
    # results holds facts that are known only after the trace, and a list of arrays does not.
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
        shardings: The shardings of the first results. XLA chooses the sharding where an entry is None, and the shardings of all further
            results.
        donated: The indices of the donated arguments.
    """
    evaluate = jaxpr_as_fun(traced.jaxpr)

    def run(*arrays: jax.Array) -> list[jax.Array]:
        return list(evaluate(*arrays))

    run.__name__ = name
    out_shardings = [*shardings, *[None] * (len(traced.jaxpr.jaxpr.outvars) - len(shardings))]
    with jax.enable_x64(True):
        return jax.jit(run, keep_unused=True, donate_argnums=tuple(donated), out_shardings=out_shardings).trace(*avals)


def check_closed(orders: Orders, open_indices: Collection[int]) -> None:
    """Raises CompilationError if an array without an open layout is not row-major.

    Args:
        orders: The memory order of each array, by index.
        open_indices: The indices of the arrays with open layouts.
    """
    for index, order in orders.items():
        if index not in open_indices and order != tuple(range(len(order))):
            raise CompilationError(
                f"XLA chose the dimension order {list(order)} for array {index}, although dynaxla requested row-major order",
                hint="this version of jax or of its plugin ignores requested layouts: install another version",
            )


def _row_major(value: jax.Array) -> jax.Array:
    return with_layout_constraint(value, Layout(tuple(range(value.ndim)))) if value.ndim > 1 else value


def _open(sharding: Any) -> Format:
    """Returns a Format with this sharding whose layout XLA chooses."""
    return Format(Layout.AUTO, sharding)
