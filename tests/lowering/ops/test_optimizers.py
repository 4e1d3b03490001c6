"""Gradient scaling. Fused steps are rows of the table."""

from __future__ import annotations

import torch
from compare import check

aten = torch.ops.aten
INF = float("inf")


def test_gradient_scaling() -> None:
    def unscaled(grads, found_inf, inv_scale):
        out, found = aten._amp_foreach_non_finite_check_and_unscale(grads, found_inf, inv_scale)
        return list(out), found

    zero, factor = torch.zeros(1), torch.tensor([0.25])
    for value in (1.0, INF, float("nan")):
        check(unscaled, [torch.randn(3, 4), torch.tensor([value, 2.0])], zero, factor, calls=1)

    def updated(scale, tracker, found_inf):
        return aten._amp_update_scale(scale, tracker, found_inf, 2.0, 0.5, 3)

    for scale, tracker, found in ((8.0, 0, 0.0), (8.0, 2, 0.0), (3e38, 2, 0.0), (8.0, 1, 1.0)):
        check(updated, torch.tensor(scale), torch.tensor(tracker, dtype=torch.int32), torch.tensor(found), calls=1)
