"""Fake quantization."""

from typing import Any

import torch

from lowering.table.rows import NO_FAKE, SHORT, Make, Op, Samples, aten

ONE = (torch.float32,)
SCALES, ZEROS = torch.tensor([0.3, 0.5, 0.9]), torch.tensor([1, -2, 0], dtype=torch.int32)
ON, OFF = torch.tensor([1]), torch.tensor([0])


def learnable(*parameters: Any, backward: bool = False) -> Samples:
    """Samples of the learnable ops, per channel of the last dimension or per tensor."""
    return lambda make, n: [(*([make(n, 3)] if backward else []), make(n, 3), *parameters, -3, 4, 0.5)]


def observed(make: Make, n: int) -> list[tuple[Any, ...]]:
    """Samples: one range for the tensor, and one for each row."""
    state = torch.tensor([-1.0]), torch.tensor([1.5]), torch.tensor([0.3]), torch.tensor([2], dtype=torch.int32)
    rows = torch.tensor([-1.0, -2, -1]), torch.tensor([2.0, 0, 1]), torch.ones(3), torch.zeros(3, dtype=torch.int32)
    return [(make(n, 3), ON, ON, *state, 0.1, 0, 255, -1), (make(n, 3), ON, OFF, *state, 0.1, 0, 255, -1, False, True),
            (make(3, n), ON, ON, *rows, 0.1, -128, 127, 0, True)]  # fmt: skip


# Operands for one scale, and for one scale per channel.
PER_TENSOR, PER_CHANNEL = (torch.tensor([0.3]), torch.tensor([1.0])), (SCALES, ZEROS.float(), 1)

ROWS: list[Op] = [
    Op(aten.fake_quantize_per_tensor_affine_cachemask.default, lambda make, n: [(make(n, 3), 0.3, 1, -3, 4)], SHORT, without=NO_FAKE),
    Op(aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default,
       lambda make, n: [(make(n, 3), SCALES[:1], ZEROS[:1], switch, -3, 4) for switch in (ON, OFF)], SHORT, without=NO_FAKE),
    Op(aten.fake_quantize_per_channel_affine_cachemask.default,
       lambda make, n: [(make(n, 3), SCALES, ZEROS, 1, -3, 4)], SHORT, without=NO_FAKE),
    Op(aten._fake_quantize_learnable_per_tensor_affine.default, learnable(*PER_TENSOR), ONE, without=NO_FAKE),
    Op(aten._fake_quantize_learnable_per_channel_affine.default, learnable(*PER_CHANNEL), ONE, without=NO_FAKE),
    Op(aten._fake_quantize_learnable_per_tensor_affine_backward.default, learnable(*PER_TENSOR, backward=True), ONE, without=NO_FAKE),
    Op(aten._fake_quantize_learnable_per_channel_affine_backward.default, learnable(*PER_CHANNEL, backward=True), ONE, without=NO_FAKE),
    Op(aten._fused_moving_avg_obs_fq_helper_functional.default, observed, ONE, gradient=False),
]  # fmt: skip

# The ops without a row, by the file that tests them.
ELSEWHERE: dict[str, str] = {
    # The operands need particular memory orders and 8-bit dtypes.
    "lowering/ops/test_quantization.py": "aten._scaled_mm.default aten._scaled_mm_v2.default",
}
