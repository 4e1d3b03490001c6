"""Trains a small 3-D U-Net to find balls in noise, on eight devices with a part of the batch each, to a Dice score of 0.9.

    python examples/unet3d_on_a_mesh.py

The volumes are generated: balls with random positions and sizes, in noise. The Dice score is twice the intersection of prediction and
truth, divided by the sum of both, for unseen volumes. With --devices 1, the network is trained without a mesh.
"""

from __future__ import annotations

import argparse

import jax
import torch
from torch import nn

import dynaxla


def convolutions(inputs: int, outputs: int) -> nn.Module:
    # A smooth activation: the gradient of a ReLU would jump if rounding changes the sign of a number.
    layers = [nn.Conv3d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU()]
    return nn.Sequential(*layers, nn.Conv3d(outputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU())


class UNet3D(nn.Module):
    """Maps volumes to the logits of their voxels. Shape: (batch, 1, depth, height, width), which are multiples of 4."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first, self.second, self.third = convolutions(1, width), convolutions(width, 2 * width), convolutions(2 * width, 4 * width)
        self.pool, self.up = nn.MaxPool3d(2), nn.Upsample(scale_factor=2)
        self.fourth, self.fifth = convolutions(6 * width, 2 * width), convolutions(3 * width, width)
        self.last = nn.Conv3d(width, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        second = self.second(self.pool(first))
        third = self.third(self.pool(second))
        second = self.fourth(torch.cat([self.up(third), second], 1))
        return self.last(self.fifth(torch.cat([self.up(second), first], 1)))


def volumes(count: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns volumes of noise with one ball each, and the balls alone. Shape: (count, 1, size, size, size)."""
    coordinates = torch.stack(torch.meshgrid(*[torch.arange(size)] * 3, indexing="ij"))
    centres, radii = torch.randint(size // 4, size - size // 4, (count, 3, 1, 1, 1)), torch.randint(size // 6, size // 3, (count, 1, 1, 1))
    balls = ((coordinates - centres).square().sum(1) <= radii.square()).float()[:, None]
    return balls + 0.5 * torch.randn_like(balls), balls


def dice(prediction: torch.Tensor, balls: torch.Tensor) -> torch.Tensor:
    return 2 * (prediction * balls).sum() / (prediction.sum() + balls.sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--score", type=float, default=0.9)
    parser.add_argument("--steps", type=int, default=300, help="at most")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=12, help="of a volume, in voxels")
    parser.add_argument("--devices", type=int, default=8)
    arguments = parser.parse_args()
    if arguments.devices > 1:
        jax.config.update("jax_num_cpu_devices", arguments.devices)  # virtual devices, without GPUs or TPUs
    dynaxla.device.enable()
    torch.manual_seed(0)
    model = UNet3D().to("jax")
    if mesh := dynaxla.sharding.Mesh((arguments.devices,), ("data",)) if arguments.devices > 1 else None:
        dynaxla.sharding.shard_module(model, mesh, {})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def batch() -> list[torch.Tensor]:
        tensors = [tensor.to("jax") for tensor in volumes(arguments.batch, arguments.size)]
        return [dynaxla.sharding.mark_sharding(tensor, mesh, ("data",)) for tensor in tensors] if mesh else tensors

    @dynaxla.compile_step(fullgraph=True)
    def step(x: torch.Tensor, balls: torch.Tensor) -> torch.Tensor:
        logits = model(x)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, balls) + 1 - dice(logits.sigmoid(), balls)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    @torch.compile(backend="dynaxla")
    def score(x: torch.Tensor, balls: torch.Tensor) -> torch.Tensor:
        return dice((model(x) > 0).float(), balls)

    unseen = batch()
    for number in range(1, arguments.steps + 1):
        loss = step(*batch()).item()
        if number <= 20:
            print(f"step {number:3} loss {loss:.7f}")
        elif number % 10 == 0:
            with torch.no_grad():
                reached = score(*unseen).item()
            print(f"step {number:3} loss {loss:.7f} Dice {reached:.3f}")
            if reached >= arguments.score:
                return
    raise SystemExit(f"no Dice score of {arguments.score} after {arguments.steps} steps")


if __name__ == "__main__":
    main()
