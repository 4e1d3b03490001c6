"""Fake quantization."""

from typing import Any

import torch

from lowering.table.rows import NO_FAKE, SHORT, Make, Op, Samples, aten

ONE = (torch.float32,)
SCALES, ZEROS = torch.tensor([0.3, 0.5, 0.9]), torch.tensor([1, -2, 0], dtype=torch.int32)
ON, OFF = torch.tensor([1]), torch.tensor([0])


def learnable(*parameters: Any, backward: bool = False) -> Samples:
    """Along the last dimension, or in one."""
    return lambda make, n: [(*([make(n, 3)] if backward else []), make(n, 3), *parameters, -3, 4, 0.5)]


def observed(make: Make, n: int) -> list[tuple[Any, ...]]:
    """One range for all, and one for each row."""
    state = torch.tensor([-1.0]), torch.tensor([1.5]), torch.tensor([0.3]), torch.tensor([2], dtype=torch.int32)
    rows = torch.tensor([-1.0, -2, -1]), torch.tensor([2.0, 0, 1]), torch.ones(3), torch.zeros(3, dtype=torch.int32)
    return [(make(n, 3), ON, ON, *state, 0.1, 0, 255, -1), (make(n, 3), ON, OFF, *state, 0.1, 0, 255, -1, False, True),
            (make(3, n), ON, ON, *rows, 0.1, -128, 127, 0, True)]  # fmt: skip


# One channel's operands, and each channel's.
WHOLE, EACH = (torch.tensor([0.3]), torch.tensor([1.0])), (SCALES, ZEROS.float(), 1)

ROWS: list[Op] = [
    Op(aten.fake_quantize_per_tensor_affine_cachemask.default, lambda make, n: [(make(n, 3), 0.3, 1, -3, 4)], SHORT, without=NO_FAKE),
    Op(aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default,
       lambda make, n: [(make(n, 3), SCALES[:1], ZEROS[:1], switch, -3, 4) for switch in (ON, OFF)], SHORT, without=NO_FAKE),
    Op(aten.fake_quantize_per_channel_affine_cachemask.default,
       lambda make, n: [(make(n, 3), SCALES, ZEROS, 1, -3, 4)], SHORT, without=NO_FAKE),
    Op(aten._fake_quantize_learnable_per_tensor_affine.default, learnable(*WHOLE), ONE, without=NO_FAKE),
    Op(aten._fake_quantize_learnable_per_channel_affine.default, learnable(*EACH), ONE, without=NO_FAKE),
    Op(aten._fake_quantize_learnable_per_tensor_affine_backward.default, learnable(*WHOLE, backward=True), ONE, without=NO_FAKE),
    Op(aten._fake_quantize_learnable_per_channel_affine_backward.default, learnable(*EACH, backward=True), ONE, without=NO_FAKE),
    Op(aten._fused_moving_avg_obs_fq_helper_functional.default, observed, ONE, gradient=False),
]  # fmt: skip

# By test file: the ops without a row, and why.
ELSEWHERE: dict[str, str] = {
    # Its operands have to lie in one way, and have a dtype of eight bits.
    "lowering/ops/test_quantization.py": "aten._scaled_mm.default aten._scaled_mm_v2.default",
}
