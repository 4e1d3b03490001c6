"""Models so small that a call's overhead shows."""

from __future__ import annotations

import pytest
import torch

from benchmarks import small, suites
from support.fakes.tiny_benchmark import check_case


@pytest.mark.parametrize("case", suites.SMALL, ids=lambda case: case.name)
def test_small_models_can_be_compared(case: suites.BenchCase) -> None:
    check_case(case)


def test_an_mlp_has_the_layers_it_is_asked_for() -> None:
    assert len(small.mlp(3)) == 6
    assert sum(parameter.numel() for parameter in small.mlp(3).parameters()) == 3 * small.WIDTH * (small.WIDTH + 1)


def test_the_loop_is_the_lstm_and_the_attention_is_torchs() -> None:
    loop, attention, x = small.LstmLoop(), small.Attention(), torch.randn(2, 5, small.WIDTH)
    whole = torch.nn.LSTM(small.WIDTH, small.WIDTH, batch_first=True)
    whole.load_state_dict({f"{name}_l0": value for name, value in loop.cell.state_dict().items()})
    torch.testing.assert_close(loop(x), whole(x)[0][:, -1])
    torchs = torch.nn.MultiheadAttention(small.WIDTH, 4, batch_first=True)
    torchs.load_state_dict(
        {
            "in_proj_weight": attention.into.weight,
            "in_proj_bias": attention.into.bias,
            "out_proj.weight": attention.out.weight,
            "out_proj.bias": attention.out.bias,
        }
    )
    torch.testing.assert_close(attention(x), torchs(x, x, x, need_weights=False)[0])
