"""Seeds for programs that draw random numbers, taken from torch's default generators so that `torch.manual_seed` rules."""

from __future__ import annotations

import torch


def seed(device: torch.device) -> torch.Tensor:
    """A seed, int32[2], another one at every call. It advances torch's default generator of the device.

    On a GPU a kernel on torch's current stream makes it: the host never has it, and waits for nothing.
    """
    return torch.empty(2, dtype=torch.int32, device=device).random_(-(2**31), 2**31)
