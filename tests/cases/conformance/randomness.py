"""Plausibility of random results, without knowledge of the generator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .judge import Difference, leaves, plain

DRAWS = 24


def implausible(actual: Any, draws: Sequence[Any]) -> Difference | None:
    """Compares statistics of each result with those of results that eager mode draws from other seeds.

    The statistics are the quartiles, and the shares of zeros and of finite elements. A statistic may be eight standard deviations of eager
    mode's draws away from their mean. A quartile may differ by a hundredth of the mean absolute value more, as the deviations of a few
    draws say little about long tails; a share by three elements more.
    """
    for index, leaf in enumerate(leaves(actual)):
        if not leaf.numel():
            continue
        draw_statistics = [_statistics(leaves(draw)[index]) for draw in draws]
        size = sum(_mean_size(leaves(draw)[index]) for draw in draws) / len(draws)
        for name, value in _statistics(leaf).items():
            known = torch.tensor([statistics.get(name, 0.0) for statistics in draw_statistics], dtype=torch.float64)
            slack = 8 * known.std().item() + 1e-3 * known.abs().max().item() + 1e-6 + (3 / leaf.numel() if "share" in name else size / 100)
            if not abs(value - known.mean().item()) <= slack:
                text = f"result {index}: {name} {value:.4g}, eager's draws have {known.mean():.4g} ± {known.std():.2g}"
                return Difference("value", f"random: {text}")
    return None


def _mean_size(tensor: torch.Tensor) -> float:
    finite = _finite(_flat(tensor))
    return finite.abs().mean().item() if finite.numel() else 0.0


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    tensor = plain(tensor)
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.to(torch.float64).flatten()


def _finite(flat: torch.Tensor) -> torch.Tensor:
    return flat[flat.isfinite()]


def _statistics(tensor: torch.Tensor) -> dict[str, float]:
    flat = _flat(tensor)
    finite = _finite(flat)
    share = finite.numel() / flat.numel()
    shares = {"finite share": share, "zero share": (flat == 0).double().mean().item()}
    if not finite.numel():
        return shares
    quartiles = finite.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()
    return shares | dict(zip(("lower quartile", "median", "upper quartile"), quartiles, strict=True))
