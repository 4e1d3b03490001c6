"""Seeds for programs that draw random numbers, taken from torch's default generators so that `torch.manual_seed` rules."""

from __future__ import annotations

import jax
import numpy as np
import torch

from . import devices, transfer


def seed(torch_device: torch.device, device: jax.Device) -> jax.Array:
    """A seed, int32[2], another one at every call. It advances torch's default generator of the device."""
    if torch_device.type == "cuda":
        generator = torch.cuda.default_generators[devices.with_index(torch_device).index]
        # Reading seed and offset needs no synchronisation; drawing a number would.
        offset = generator.get_offset()
        generator.set_offset(offset + 4)
        numbers = np.random.SeedSequence([generator.initial_seed(), offset]).generate_state(2).view(np.int32)
        stream = device.get_stream_for_external_ready_events()
        with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=torch_device)):
            return transfer.import_tensor(torch.from_numpy(numbers).to(torch_device), device, stream)
    return transfer.import_tensor(torch.empty(2, dtype=torch.int32).random_(-(2**31), 2**31), device)
