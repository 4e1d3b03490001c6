"""Splits the checks off a program that overwrites its arguments: a separate program runs the checks first.

A program cannot undo its in-place writes. If the program chose between new and old values of an argument at its end, XLA would copy the
argument. The checks can run first, because most of them check indices, which need only a small part of the computation.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var, jaxpr_as_fun

# Primitives that need few operations for each element of a result, and do not call a function.
_CHEAP = frozenset([
    "abs", "add", "and", "argmax", "argmin", "bitcast_convert_type", "broadcast_in_dim", "clamp", "concatenate", "convert_element_type",
    "copy", "copy_p", "div", "dynamic_slice", "eq", "gather", "ge", "gt", "iota", "is_finite", "le", "lt", "max", "min", "mul", "ne", "neg",
    "not", "or", "pad", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_sum", "rem", "reshape", "rev", "select_n", "sign",
    "slice", "split", "squeeze", "stop_gradient", "sub", "transpose", "xor",
])  # fmt: skip

# Primitives that call a jitted function, such as most functions of jax.numpy.
_CALLS = ("jit", "pjit")


def split(
    traced: jax.stages.Traced, name: str, avals: Sequence[jax.ShapeDtypeStruct], donated: Sequence[int]
) -> tuple[jax.stages.Traced, jax.stages.Traced] | None:
    """Splits a traced program into its checks and the rest. Returns None if the checks need expensive parts of the computation.

    Args:
        traced: The program. The last result is the check code, the index of the first check that fails.
        name: The program's name.
        avals: The shapes and dtypes with which the program was traced.
        donated: The indices of the donated arguments.

    Returns: the program of the checks, and the program without its last result.
    """
    if not _is_cheap(traced.jaxpr):
        return None
    evaluate = jaxpr_as_fun(traced.jaxpr)

    def check(*arrays: jax.Array) -> list[jax.Array]:
        return [evaluate(*arrays)[-1]]

    def run(*arrays: jax.Array) -> list[jax.Array]:
        return list(evaluate(*arrays)[:-1])

    check.__name__, run.__name__ = f"{name}_checks", name
    with jax.enable_x64(True):
        return (
            jax.jit(check, keep_unused=True).trace(*avals),
            jax.jit(run, keep_unused=True, donate_argnums=tuple(donated)).trace(*avals),
        )


def _is_cheap(program: ClosedJaxpr) -> bool:
    """True if all equations on which the program's last result (the check code) depends are cheap."""
    needed = {program.jaxpr.outvars[-1]}
    for equation in reversed(program.jaxpr.eqns):
        if needed.isdisjoint(equation.outvars):
            continue
        if not _is_cheap_equation(equation):
            return False
        needed.update(variable for variable in equation.invars if isinstance(variable, Var))
    return True


def _is_cheap_equation(equation: JaxprEqn) -> bool:
    if equation.primitive.name in _CALLS:
        return all(map(_is_cheap_equation, equation.params["jaxpr"].jaxpr.eqns))
    return equation.primitive.name in _CHEAP
