"""The base class of passes that evaluate a traced program (jaxpr) a second time, with values of another type in place of arrays."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import jax
import numpy as np
from jax import Array
from jax.extend import core

from ...lowering.cpu import materialize
from ...observe import events, rewrites

Value = TypeVar("Value")


class Evaluation(ABC, Generic[Value]):
    """A pass over a program for one platform. Inlines nested `jit` and `custom_jvp` functions, and the platform's branches.

    Attributes:
        title: the name of the pass.
        uses: during a call of `apply`, the number of uses of each result of its equation.
    """

    title = ""

    def __init__(self, platform: str) -> None:
        self._platform = platform
        self.uses: Sequence[int] = ()

    @abstractmethod
    def wrap(self, array: Any) -> Value:
        """Returns the pass's value for an array or a literal."""

    @abstractmethod
    def unwrap(self, value: Value) -> Any:
        """Returns the array of a value of the pass."""

    def unwrap_result(self, index: int, value: Value) -> Any:
        """Returns the array for a result of the program. index: the position among the results."""
        return self.unwrap(value)

    @abstractmethod
    def in_memory(self, value: Value) -> Value:
        """Returns the same value with an array that XLA must write to memory (see materialize.py)."""

    @abstractmethod
    def apply(self, equation: Any, operands: list[Value]) -> Sequence[Value]:
        """Returns the results of an equation of the program."""

    def transform(self, program: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the same function, evaluated by this pass. The returned function must be traced, for example by `jax.jit`."""

        def run(*arrays: Array) -> Any:
            closed, shapes = jax.make_jaxpr(program, return_shape=True)(*arrays)
            rewrites.note_evaluation(self.title, len(closed.jaxpr.eqns))
            results = self._run(closed.jaxpr, closed.consts, [self.wrap(array) for array in arrays])
            return jax.tree.unflatten(jax.tree.structure(shapes), [self.unwrap_result(index, value) for index, value in enumerate(results)])

        run.__name__ = program.__name__
        return run

    def _run(self, jaxpr: Any, constants: Sequence[Any], arguments: Sequence[Value]) -> list[Value]:
        values: dict[Any, Value] = dict(zip(jaxpr.constvars, map(self.wrap, constants), strict=True))
        values.update(zip(jaxpr.invars, arguments, strict=True))
        use_counts = Counter(var for equation in jaxpr.eqns for var in equation.invars if not isinstance(var, core.Literal))
        use_counts.update(var for var in jaxpr.outvars if not isinstance(var, core.Literal))

        def read(var: Any) -> Value:
            return self.wrap(var.val) if isinstance(var, core.Literal) else values[var]

        for equation in jaxpr.eqns:
            operands = [read(var) for var in equation.invars]
            self.uses = [use_counts[var] for var in equation.outvars]
            values.update(zip(equation.outvars, self._apply(equation, operands), strict=True))
        return [read(var) for var in jaxpr.outvars]

    def _apply(self, equation: Any, operands: list[Value]) -> Sequence[Value]:
        name = str(equation.source_info.name_stack) if events.has_listeners() else ""
        with jax.named_scope(name) if name else contextlib.nullcontext():  # the scope may name the user's source line
            return self._results(equation, operands)

    def _results(self, equation: Any, operands: list[Value]) -> Sequence[Value]:
        name, params = equation.primitive.name, equation.params
        if name in ("jit", "pjit") and params["name"] == materialize.NAME:
            return [self.in_memory(operands[0])]
        if name in ("jit", "pjit"):
            return self._run(params["jaxpr"].jaxpr, params["jaxpr"].consts, operands)
        if name == "custom_jvp_call":
            return self._run(params["call_jaxpr"].jaxpr, params["call_jaxpr"].consts, operands)
        if name == "platform_index":
            choices = enumerate(params["platforms"])
            return [self.wrap(next(np.int32(index) for index, names in choices if names is None or self._platform in names))]
        if name == "cond" and isinstance(index := self.unwrap(operands[0]), np.integer):
            branch = params["branches"][int(index)]
            return self._run(branch.jaxpr, branch.consts, operands[1:])
        return self.apply(equation, operands)


def bind(equation: Any, arrays: Sequence[Any], params: dict[str, Any] | None = None) -> Sequence[Any]:
    """Returns an equation's results for these arrays. params: replaces the equation's parameters, unless None."""
    with equation.ctx.manager:
        results = equation.primitive.bind(*arrays, **equation.primitive.get_bind_params(equation.params if params is None else params))
    return results if equation.primitive.multiple_results else [results]
