"""What a program verifies: the first check that fails is told, of inner graphs only if they ran."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dynaxla.lowering.checks import NONE_FAILED, Check, Checks


def checks_of(*conditions: bool) -> Checks:
    checks = Checks()
    for number, condition in enumerate(conditions):
        checks.require(jnp.asarray([True, condition]), IndexError if number else ValueError, f"check {number}")
    return checks


@pytest.mark.parametrize(
    ("conditions", "failed"),
    [((), NONE_FAILED), ((True,), NONE_FAILED), ((True, False), 1), ((False, False), 0)],
)
def test_the_first_that_fails(conditions: tuple[bool, ...], failed: int) -> None:
    code = jax.jit(lambda conditions: checks_of(*conditions).failure())(conditions)
    assert (int(code), code.dtype) == (failed, np.int32)


def test_all_of_a_condition_must_hold() -> None:
    checks = Checks()
    checks.require(jnp.ones((2, 0), bool), ValueError, "nothing to check")
    checks.require(jnp.asarray(True), ValueError, "one")
    checks.require(jnp.asarray([[True, True], [True, False]]), ValueError, "many")
    assert [bool(check.condition) for check in checks] == [True, True, False]
    assert [check.condition.shape for check in checks] == [()] * 3


@pytest.mark.parametrize("taken", [None, True, False])
@pytest.mark.parametrize("conditions", [(True, True), (True, False), (False, True)])
def test_of_an_inner_graph(conditions: tuple[bool, bool], taken: bool | None) -> None:
    inner, outer = checks_of(*conditions), checks_of(True)
    outer.add_inner(inner, inner.failure(), None if taken is None else jnp.asarray(taken))
    assert [(check.error, check.message) for check in outer[1:]] == [(check.error, check.message) for check in inner]
    wanted = NONE_FAILED if taken is False or all(conditions) else 1 + conditions.index(False)
    assert int(outer.failure()) == wanted


def test_a_check_is_a_pytree() -> None:
    """A program returns its conditions; errors and messages stay outside."""
    check = checks_of(False)[0]
    found = jax.jit(lambda condition: Check(condition, KeyError, "text"))(check.condition)
    assert (bool(found.condition), found.error, found.message) == (False, KeyError, "text")
    assert len(jax.tree.leaves(check)) == 1
