"""Control flow, lowered to XLA's branches and loops: `torch.cond`, `while_loop`, `scan`, `map`, `associative_scan`, and `invoke_subgraph`.

The branches and loop bodies are graphs. A lowered branch or loop has one more result: the index of the first of its run-time checks
(`Context.require`) that failed, or NONE_FAILED. In a loop, each iteration derives its random numbers from a PRNG key of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch
from jax import Array, lax

from ...errors import UnsupportedOp
from ..checks import NONE_FAILED, Checks
from ..context import Context

higher_order = torch.ops.higher_order


@dataclass(frozen=True)
class Subgraph:
    """A graph that a control-flow op calls.

    Attributes:
        run: takes the graph's inputs and a nested context; returns the graph's outputs.
        draws_random: True if the graph draws random numbers.
    """

    run: Callable[[Sequence[Any], Context], list[Any]]
    draws_random: bool


def _inline(graph: Subgraph, operands: Sequence[Any], ctx: Context) -> list[Any]:
    """Returns the outputs of the graph, whose ops are traced in place of the control-flow op."""
    inner = ctx.nested(ctx.key() if graph.draws_random else None)
    outputs = graph.run(operands, inner)
    ctx.checks += inner.checks
    return outputs


def _require_arrays(values: Sequence[Any], description: str) -> tuple[Array, ...]:
    """Returns the values as a tuple. `description` is the kind of the values, for the message.

    Raises:
        UnsupportedOp: A value is not an array.
    """
    if not all(isinstance(value, Array) for value in values):
        raise UnsupportedOp(f"{description} that is not a tensor")
    return tuple(values)


def cond(predicate: Any, true_graph: Subgraph, false_graph: Subgraph, operands: Sequence[Any] = (), *, ctx: Context) -> list[Any]:
    """The outputs of one of two graphs, selected by the predicate. Both graphs are compiled into the program; only one runs.

    If the predicate is a Python number, only the selected graph is compiled.

    Shape:  the predicate has one element; both graphs return the same shapes and dtypes.
    Raises: UnsupportedOp if a result is a tensor in one branch only, or a different number in each branch.
    """
    if not isinstance(predicate, Array):
        return _inline(true_graph if predicate else false_graph, operands, ctx)
    predicate = lax.reshape(lax.ne(predicate, lax.full_like(predicate, 0)), ())
    checks = [Checks(), Checks()]
    non_tensors: list[list[Any]] = [[], []]

    def branch(index: int, graph: Subgraph) -> Callable[[], tuple[Array, ...]]:
        key = ctx.key() if graph.draws_random else None

        def trace() -> tuple[Array, ...]:
            inner = ctx.nested(key)
            outputs = graph.run(operands, inner)
            checks[index] = inner.checks
            non_tensors[index] = [None if isinstance(output, Array) else (output,) for output in outputs]
            return (*(output for output in outputs if isinstance(output, Array)), inner.checks.failure())

        return trace

    *arrays, code = lax.cond(predicate, branch(0, true_graph), branch(1, false_graph))
    if non_tensors[0] != non_tensors[1]:
        raise UnsupportedOp("torch.cond with a result that is a tensor in only one branch, or a different number in each branch")
    ctx.checks.add_inner(checks[0], code, predicate)
    ctx.checks.add_inner(checks[1], code, lax.bitwise_not(predicate))
    remaining_arrays = iter(arrays)
    return [next(remaining_arrays) if non_tensor is None else non_tensor[0] for non_tensor in non_tensors[0]]


def while_loop(
    cond_graph: Subgraph, body_graph: Subgraph, carried: Sequence[Any], additional: Sequence[Any] = (), *, ctx: Context
) -> tuple[Array, ...]:
    """The carried values after the last iteration. A failed check ends the loop.

    Both graphs take the carried values and `additional`, operands that stay the same.

    Shape:  the carried values keep their shapes.
    Raises: UnsupportedOp for a carried value that is not a tensor.
    """
    start = _require_arrays(carried, "a value carried through while_loop")
    key = ctx.key() if cond_graph.draws_random or body_graph.draws_random else None
    body_checks = Checks()

    def evaluate_condition(values: Sequence[Array], ctx: Context) -> Array:
        return lax.reshape(cond_graph.run([*values, *additional], ctx)[0], ())

    def body(state: tuple[Any, ...]) -> tuple[Any, ...]:
        nonlocal body_checks
        _, _, count, values = state
        inner = ctx.nested(None if key is None else jax.random.fold_in(key, count))
        values = _require_arrays(body_graph.run([*values, *additional], inner), "a value carried through while_loop")
        continues = evaluate_condition(values, inner)
        body_checks = inner.checks
        code = body_checks.failure()
        return lax.bitwise_and(continues, lax.eq(code, np.int32(NONE_FAILED))), code, lax.add(count, np.uint32(1)), values

    inner = ctx.nested(ctx.key() if cond_graph.draws_random else None)
    continues = evaluate_condition(start, inner)
    ctx.checks += inner.checks
    state = (continues, Checks().failure(), lax.full((), 0, np.dtype(np.uint32)), start)
    _, code, _, values = lax.while_loop(lambda state: state[0], body, state)
    ctx.checks.add_inner(body_checks, code)
    return values


def scan(graph: Subgraph, init: Sequence[Any], xs: Sequence[Any], additional: Sequence[Any] = (), *, ctx: Context) -> list[Array]:
    """The carried values after the last iteration, followed by the graph's other results, each stacked over all iterations.

    The graph takes the carried values, a slice of each of `xs`, and `additional`, operands that stay the same.

    Shape:  the carried values keep their shapes; the first dimension of `xs` and of the stacked results is the number of iterations.
    Raises: UnsupportedOp for a carried value or a result that is not a tensor.
    """
    start = _require_arrays(init, "a value carried through scan")
    key = ctx.key() if graph.draws_random else None
    body_checks = Checks()
    length = xs[0].shape[0]

    def body(state: tuple[Any, ...], slices: tuple[Any, ...]) -> tuple[Any, Any]:
        nonlocal body_checks
        values, code = state
        count, *elements = slices
        inner = ctx.nested(None if key is None else jax.random.fold_in(key, count))
        outputs = _require_arrays(graph.run([*values, *elements, *additional], inner), "a result of scan's function")
        body_checks = inner.checks
        code = lax.select(lax.eq(code, np.int32(NONE_FAILED)), body_checks.failure(), code)
        return (outputs[: len(start)], code), outputs[len(start) :]

    (values, code), stacked = lax.scan(body, (start, Checks().failure()), (lax.iota(np.dtype(np.uint32), length), *xs), length=length)
    ctx.checks.add_inner(body_checks, code)
    return [*values, *stacked]


def map_(graph: Subgraph, xs: Sequence[Any], additional: Sequence[Any] = (), *, ctx: Context) -> list[Array]:
    """The results of a graph for each slice of `xs`, stacked along the first dimension."""
    return scan(graph, (), xs, additional, ctx=ctx)


def associative_scan(graph: Subgraph, xs: Sequence[Any], additional: Sequence[Any] = (), *, ctx: Context) -> list[Array]:
    """The associative scan of `xs` along the first dimension. The graph combines two slices, and `jax.vmap` many pairs of slices at once.

    Shape:  those of `xs`.
    Raises: UnsupportedOp for a graph that draws random numbers or has run-time checks.
    """
    if graph.draws_random:
        raise UnsupportedOp("associative_scan with random numbers")

    def combine(left: tuple[Array, ...], right: tuple[Array, ...]) -> tuple[Array, ...]:
        inner = ctx.nested(None)
        outputs = graph.run([*left, *right, *additional], inner)
        if inner.checks:
            raise UnsupportedOp("associative_scan with a function that has assertions")
        return tuple(outputs)

    return list(lax.associative_scan(jax.vmap(combine), tuple(xs)))


def invoke_subgraph(graph: Subgraph, identifier: str | None, *operands: Any, ctx: Context) -> list[Any]:
    """The outputs of a graph that several nodes may call (torch's nested compile regions), inlined at each call. `identifier` is unused."""
    return _inline(graph, operands, ctx)


CONTROL_FLOW: dict[Any, Callable[..., Any]] = {
    higher_order.cond: cond,
    higher_order.while_loop: while_loop,
    higher_order.scan: scan,
    higher_order.map_impl: map_,
    higher_order.associative_scan: associative_scan,
    higher_order.invoke_subgraph: invoke_subgraph,
}
