"""Checks in a program.

The program returns the index of the first check that failed. The checks of an inner graph count only if the graph has run.
"""

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
def test_failure_is_the_index_of_the_first_failed_check(conditions: tuple[bool, ...], failed: int) -> None:
    code = jax.jit(lambda conditions: checks_of(*conditions).failure())(conditions)
    assert (int(code), code.dtype) == (failed, np.int32)


def test_all_elements_of_a_condition_must_be_true() -> None:
    checks = Checks()
    checks.require(jnp.ones((2, 0), bool), ValueError, "nothing to check")
    checks.require(jnp.asarray(True), ValueError, "one")
    checks.require(jnp.asarray([[True, True], [True, False]]), ValueError, "many")
    assert [bool(check.condition) for check in checks] == [True, True, False]
    assert [check.condition.shape for check in checks] == [()] * 3


@pytest.mark.parametrize("has_run", [None, True, False])
@pytest.mark.parametrize("conditions", [(True, True), (True, False), (False, True)])
def test_checks_of_an_inner_graph(conditions: tuple[bool, bool], has_run: bool | None) -> None:
    inner, outer = checks_of(*conditions), checks_of(True)
    outer.add_inner(inner, inner.failure(), None if has_run is None else jnp.asarray(has_run))
    assert [(check.error, check.message) for check in outer[1:]] == [(check.error, check.message) for check in inner]
    expected = NONE_FAILED if has_run is False or all(conditions) else 1 + conditions.index(False)
    assert int(outer.failure()) == expected


def test_a_check_is_a_pytree() -> None:
    """A program returns its conditions; errors and messages stay outside."""
    check = checks_of(False)[0]
    returned = jax.jit(lambda condition: Check(condition, KeyError, "text"))(check.condition)
    assert (bool(returned.condition), returned.error, returned.message) == (False, KeyError, "text")
    assert len(jax.tree.leaves(check)) == 1
