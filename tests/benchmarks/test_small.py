"""Tests of the suite of models that are so small that the overhead of calls shows."""

from __future__ import annotations

import pytest
import torch

from benchmarks import small, suites
from support.fakes.tiny_benchmark import check_case


@pytest.mark.parametrize("case", suites.SMALL, ids=lambda case: case.name)
def test_small_models_can_be_compared(case: suites.BenchCase) -> None:
    check_case(case)


def test_mlp_has_the_requested_number_of_layers() -> None:
    assert len(small.mlp(3)) == 6
    assert sum(parameter.numel() for parameter in small.mlp(3).parameters()) == 3 * small.WIDTH * (small.WIDTH + 1)


def test_lstm_loop_and_attention_equal_torchs_modules() -> None:
    loop, attention, x = small.LstmLoop(), small.Attention(), torch.randn(2, 5, small.WIDTH)
    lstm = torch.nn.LSTM(small.WIDTH, small.WIDTH, batch_first=True)
    lstm.load_state_dict({f"{name}_l0": value for name, value in loop.cell.state_dict().items()})
    torch.testing.assert_close(loop(x), lstm(x)[0][:, -1])
    torch_attention = torch.nn.MultiheadAttention(small.WIDTH, 4, batch_first=True)
    torch_attention.load_state_dict(
        {
            "in_proj_weight": attention.into.weight,
            "in_proj_bias": attention.into.bias,
            "out_proj.weight": attention.out.weight,
            "out_proj.bias": attention.out.bias,
        }
    )
    torch.testing.assert_close(attention(x), torch_attention(x, x, x, need_weights=False)[0])
