"""Seeds for programs that draw random numbers. They come from torch's default generators, so that `torch.manual_seed` determines them."""

from __future__ import annotations

import torch


def seed(device: torch.device) -> torch.Tensor:
    """Returns a new seed, int32[2], at every call. Each call advances torch's default generator of the device.

    On a GPU, a kernel on torch's current stream computes the seed: the host neither reads the seed nor waits for it.
    """
    return torch.empty(2, dtype=torch.int32, device=device).random_(-(2**31), 2**31)
