"""Runtime checks of a program. A program cannot raise, so it returns the index of the first check that failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
from jax import Array, lax
from jax import numpy as jnp

_INT32 = np.dtype(np.int32)
# The result of `Checks.failure` if no check failed.
NONE_FAILED = -1


@partial(jax.tree_util.register_dataclass, data_fields=["condition"], meta_fields=["error", "message"])
@dataclass(frozen=True)
class Check:
    """A condition that must hold while a program runs, and the exception to raise if it does not. A pytree.

    Attributes:
        condition: bool[]; true if the check passes.
        error: The class of the exception.
        message: The text of the exception.
    """

    condition: jax.Array
    error: type[Exception]
    message: str

    @staticmethod
    def first_failed(checks: Sequence[Check]) -> jax.Array:
        """Returns, in a traced program, the index of the first check that fails, or the number of checks if none fails. int32[]."""
        code = jnp.int32(len(checks))
        for index, check in reversed(list(enumerate(checks))):
            code = lax.select(check.condition, code, jnp.int32(index))
        return code


class Checks(list[Check]):
    """The checks of one graph, in the order in which they are evaluated."""

    def require(self, condition: Array, error: type[Exception], message: str) -> None:
        """Adds a check that all elements of `condition` are true."""
        self.append(Check(lax.reduce_and(condition, tuple(range(condition.ndim))), error, message))

    def failure(self) -> Array:
        """Returns, in a traced program, the index of the first check that fails, or NONE_FAILED. int32[]."""
        none_failed = lax.full((), NONE_FAILED, _INT32)
        if not self:
            return none_failed
        code = Check.first_failed(self)
        return lax.select(lax.eq(code, np.int32(len(self))), none_failed, code)

    def add_inner(self, inner: Sequence[Check], failure: Array, has_run: Array | None = None) -> None:
        """Adds the checks of an inner graph.

        Args:
            inner: The inner graph's checks.
            failure: The result of the inner graph's `failure()`: the index of its first failed check, or NONE_FAILED. int32[].
            has_run: bool[]; true if the inner graph ran. None if it always runs.
        """
        for index, check in enumerate(inner):
            failed = lax.eq(failure, np.int32(index))
            failed = failed if has_run is None else lax.bitwise_and(failed, has_run)
            self.append(Check(lax.bitwise_not(failed), check.error, check.message))
