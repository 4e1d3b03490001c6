"""What a program verifies while it runs. It cannot raise: it returns the index of the first check that failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
from jax import Array, lax
from jax import numpy as jnp

_INT32 = np.dtype(np.int32)
# The index of the check that failed, where none did.
NONE_FAILED = -1


@partial(jax.tree_util.register_dataclass, data_fields=["condition"], meta_fields=["error", "message"])
@dataclass(frozen=True)
class Check:
    """What must hold while a program runs: condition (bool[]), and the exception that is raised if it does not. A pytree."""

    condition: jax.Array
    error: type[Exception]
    message: str

    @staticmethod
    def first_failed(checks: Sequence[Check]) -> jax.Array:
        """In a program: the index of the first check that does not hold, or their number. int32[]."""
        code = jnp.int32(len(checks))
        for index, check in reversed(list(enumerate(checks))):
            code = lax.select(check.condition, code, jnp.int32(index))
        return code


class Checks(list[Check]):
    """Those of one graph, in the order in which they are looked at."""

    def require(self, condition: Array, error: type[Exception], message: str) -> None:
        """All of `condition` must be true."""
        self.append(Check(lax.reduce_and(condition, tuple(range(condition.ndim))), error, message))

    def failure(self) -> Array:
        """In a program: the index of the first check that does not hold, or NONE_FAILED. int32[]."""
        nothing = lax.full((), NONE_FAILED, _INT32)
        if not self:
            return nothing
        code = Check.first_failed(self)
        return lax.select(lax.eq(code, np.int32(len(self))), nothing, code)

    def report(self, inner: Sequence[Check], failure: Array, taken: Array | None = None) -> None:
        """Those of an inner graph hold, whose `failure` this is. taken: whether that graph ran."""
        for index, check in enumerate(inner):
            failed = lax.eq(failure, np.int32(index))
            failed = failed if taken is None else lax.bitwise_and(failed, taken)
            self.append(Check(lax.bitwise_not(failed), check.error, check.message))
