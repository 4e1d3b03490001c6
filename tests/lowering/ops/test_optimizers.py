"""Gradient scaling and the steps of optimizers. Rows of the table test the fused steps, too."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest
import torch

from dynaxla.lowering.ops import optimizers
from support.comparisons.compare import check

aten = torch.ops.aten
INF = float("inf")


def test_gradient_scaling() -> None:
    def unscaled(grads, found_inf, inv_scale):
        out, found_inf = aten._amp_foreach_non_finite_check_and_unscale(grads, found_inf, inv_scale)
        return list(out), found_inf

    zero, factor = torch.zeros(1), torch.tensor([0.25])
    for value in (1.0, INF, float("nan")):
        check(unscaled, [torch.randn(3, 4), torch.tensor([value, 2.0])], zero, factor, calls=1)

    def updated(scale, tracker, found_inf):
        return aten._amp_update_scale(scale, tracker, found_inf, 2.0, 0.5, 3)

    for scale, tracker, overflow in ((8.0, 0, 0.0), (8.0, 2, 0.0), (3e38, 2, 0.0), (8.0, 1, 1.0)):
        check(updated, torch.tensor(scale), torch.tensor(tracker, dtype=torch.int32), torch.tensor(overflow), calls=1)


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.95, 0.999, 1 - 1e-7])
def test_bias_corrections_are_exact_to_rounding(beta: float) -> None:
    """For up to a million steps, the float32 result is as good as a float64 result."""
    counts = np.unique(np.concatenate([np.arange(1, 100), np.logspace(2, 6, 200).astype(int)])).astype(np.float32)
    corrections = np.asarray(jax.jit(lambda count: optimizers._bias_correction(beta, count))(counts), np.float64)
    exact = np.array([-math.expm1(count * math.log(beta)) if beta else 1.0 for count in counts])
    np.testing.assert_allclose(corrections, exact, rtol=6 * 2**-24)


def test_no_float64_in_steps_of_float32() -> None:
    lowering = optimizers.adam(decoupled=True)
    settings = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False, "maximize": False}
    arrays = [jax.ShapeDtypeStruct((4,), np.float32)] * 4
    with jax.enable_x64(True):
        traced = jax.jit(lambda *args: lowering(*([x] for x in args[:4]), [], [args[4]], **settings)).trace(
            *arrays, jax.ShapeDtypeStruct((), np.float32)
        )
    assert "f64" not in str(traced.jaxpr)
    assert "pow" not in str(traced.jaxpr)
