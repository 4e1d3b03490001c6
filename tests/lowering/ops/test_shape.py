"""Views, joins, rearrangements, and writes to views."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from support.comparisons.compare import check
from support.comparisons.gradients import check_gradients
from support.releases import IS_OLDEST

aten = torch.ops.aten


def values(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape).remainder(7).to(dtype)


# Views of x of shape [4, 6, 3].
VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "reshapes": lambda x: (x.reshape(-1, 9), x.reshape(2, 2, 18), x.flatten(1), x.unflatten(1, (2, 3)), x.unsqueeze(-1), x.unsqueeze(0)),
    "squeezes": lambda x: (x[:1, :, :1].squeeze(), x[:, :1].squeeze(1), x[:, :1].squeeze((0, 1, -1)), x.squeeze(-1)),
    "permutations": lambda x: (x.permute(2, -3, 1), x.transpose(-1, 0), x[0].t(), x.movedim(0, 2), x.mT, x[0, 0].t(), x.swapaxes(0, 1)),
    "expansions": lambda x: (x[:, :1].expand(4, 6, 3), x[0].expand(2, 2, -1, -1), x.expand(4, -1, -1)),
    "slices": lambda x: (x[1:3], x[:, -4:-1:2], x[..., 5:], x[2:1], x[:100, 4:], x.narrow(1, 2, 3), x[::3, ::5]),
    "selections": lambda x: (x[1], x[:, -1], x[..., 0], x[2, 3, 1], x.select(1, -2)),
    "splits": lambda x: (
        x.split(4, 1),
        x.split([1, 0, 3]),
        x.chunk(4, 1),
        x.unbind(-1),
        x.tensor_split(4, 1),
        () if IS_OLDEST else x[:0].split(2),  # torch 2.11 fails to trace it
    ),
    "diagonals": lambda x: (x.diagonal(), x.diagonal(2, 1, 0), x.diagonal(-1, -2, -1), x.diagonal(5, 0, 2)),
    "windows": lambda x: (x.unfold(1, 2, 2), x.unfold(1, 3, 1), x.unfold(0, 1, 3), x.unfold(-1, 3, 5), x[0, 0].sum().unfold(0, 1, 1)),
}


@pytest.mark.sample(usual=2)
@pytest.mark.parametrize("case", VIEWS)
def test_views(case: str) -> None:
    function = VIEWS[case]

    def negated_views(x: torch.Tensor) -> Any:
        return torch.utils._pytree.tree_map(lambda view: view.neg(), function(x))

    check_gradients(negated_views, torch.randn(4, 6, 3))
    check(lambda x: (function(x), negated_views(x)), values(torch.int32, 4, 3, 6).mT, calls=1)


REARRANGEMENTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "cat": lambda x: (torch.cat([x, x[:1]]), torch.cat([x, x[:, :0], x], -2), torch.cat([x]), torch.hstack([x, x])),
    "stack": lambda x: (torch.stack([x, x]), torch.stack([x, x], -1), torch.stack([x[0, 0, 0], x[0, 0, 1]])),
    "repeat": lambda x: (x.repeat(2, 1, 3), x.repeat(2, 0, 1, 1), x.tile(2), x.repeat_interleave(2, 1), x[0, 0, 0].repeat(3)),
    "flip": lambda x: (x.flip(0), x.flip(0, -1), x.flip(()), x.rot90(), x.rot90(2), x.rot90(-1, (1, 2)), x.fliplr()),
    "roll": lambda x: (x.roll(1, 0), x.roll((7, -1), (1, -1)), x.roll(5), x[:0].roll(1, 0)),
    "embedded diagonals": lambda x: (
        x.diag_embed(),
        x.diag_embed(2, 0, -1),
        x.diag_embed(-1, 1, 2),
        torch.block_diag(x[0], x[1, 0], x[0, 0, 0]),
    ),
    "pixels": lambda x: (F.pixel_shuffle(x[None], 2), F.pixel_unshuffle(x, 3 if x.shape[-1] % 2 else 2), F.channel_shuffle(x[None], 2)),
}


@pytest.mark.parametrize("case", REARRANGEMENTS)
def test_rearrangements(case: str) -> None:
    x = torch.randn(4, 6, 6) if case == "pixels" else torch.randn(4, 6, 3)
    check_gradients(REARRANGEMENTS[case], x)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.complex64])
def test_dtypes(dtype: torch.dtype) -> None:
    def moves(x: torch.Tensor) -> Any:
        pads = () if dtype == torch.bool else (F.pad(x, (1, 2), value=2), F.pad(x, (2, 1), mode="replicate"))
        return (
            x.mT.reshape(-1),
            torch.cat([x, x[:1]]),
            x.flip(1),
            x.roll(1),
            x.diag_embed(),
            x[::2, 1:],
            x.unfold(1, 2, 1).neg() if dtype != torch.bool else x,
            pads,
        )

    check(moves, values(dtype, 4, 6, 3).mT, calls=1)


def test_joins_promote() -> None:
    integers, halves, bools = values(torch.int32, 2, 3), torch.randn(2, 3).half(), torch.ones(2, 3, dtype=torch.bool)
    check(
        lambda i, h, t: (torch.cat([i, h]), torch.cat([t, i], 1), torch.stack([h, h]), torch.cat([torch.zeros(0), h])),
        integers,
        halves,
        bools,
    )


def test_empty_operand() -> None:
    x = torch.randn(0, 3)
    check(
        lambda x: (x.view(3, 0), x.t() + 1, x.repeat(2, 2), torch.cat([x, x]), x.flip(0), x.roll(1), x.unbind(), x.unbind(1), x.diagonal()),
        x,
    )


def writes(x: torch.Tensor, y: torch.Tensor) -> Any:
    """In-place writes to views, which become scatters."""
    outs = [x.clone() for _ in range(7)]
    outs[0][1:3] = y[1:3]
    outs[1][:, ::2] = y[:, ::2]
    outs[2][1] = y[2]
    outs[3][..., -1] = 5
    outs[4].diagonal(1, 0, 2).mul_(2)
    outs[5][:, 1:5:3].add_(1)
    outs[6].transpose(0, 1)[2, 1:] = 0
    return outs


def test_writes_to_views() -> None:
    check_gradients(writes, torch.randn(4, 6, 3), torch.randn(4, 6, 3))
    check(writes, values(torch.int64, 4, 6, 3), values(torch.int64, 4, 6, 3) + 1, calls=1)


def test_scatters_of_slices() -> None:
    x, y = torch.randn(4, 6), torch.randn(4, 3).double()

    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        return (
            x.slice_scatter(y.to(x.dtype), 1, 0, 6, 2),
            x.slice_scatter(y.to(x.dtype), 1, -3),
            x.slice_scatter(x[:0], 0, 2, 1),
            x.select_scatter(y[:, 0].to(x.dtype), -1, -2),
            x.diagonal_scatter(y[:3, 0].to(x.dtype), -1),
        )

    check_gradients(function, x, y)


def test_dynamic_sizes() -> None:
    torch._dynamo.reset()

    def function(x: torch.Tensor) -> Any:
        return x.view(-1, x.shape[0]), x[1:-1], torch.cat([x, x]), x.unsqueeze(0).expand(3, -1, -1) + 1, F.pad(x, (x.shape[1], 0))

    compiled = torch.compile(function, backend="dynaxla", fullgraph=True, dynamic=True)
    for size in (4, 6):
        x = torch.randn(size, 6)
        for mine, theirs in zip(compiled(x), function(x), strict=True):
            assert torch.equal(mine, theirs)


def test_unfold_is_not_one_slice_per_element(tmp_path: Path) -> None:
    """Windows of audio have hundreds of elements."""
    x = torch.randn(2, 4000)
    windows = torch.compile(lambda x: x.unfold(1, 400, 160) * 2, backend="dynaxla", options={"dump": tmp_path})
    assert torch.equal(windows(x), x.unfold(1, 400, 160) * 2)
    (program,) = tmp_path.glob("*.stablehlo.mlir")
    assert program.read_text().count("stablehlo.slice") < 10
