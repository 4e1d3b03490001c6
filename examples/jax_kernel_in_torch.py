"""Trains a torch model with a Pallas kernel as its activation, in eager mode and as part of one XLA program.

python examples/jax_kernel_in_torch.py --steps 30
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import torch
from jax.experimental import pallas as pl

import dynaxla


def swiglu_kernel(gate, value, result):
    result[...] = gate[...] * jax.nn.sigmoid(gate[...]) * value[...]


@jax.custom_vjp
def swiglu(gate: jax.Array, value: jax.Array) -> jax.Array:
    # With interpret=True, the kernel also runs on the CPU. Omit it on a GPU or a TPU.
    return pl.pallas_call(swiglu_kernel, out_shape=jax.ShapeDtypeStruct(gate.shape, gate.dtype), interpret=True)(gate, value)


def forward(gate: jax.Array, value: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return swiglu(gate, value), (gate, value)


def backward(saved: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    gate, value = saved
    slope = jax.nn.sigmoid(gate)
    return cotangent * value * (slope + gate * slope * (1 - slope)), cotangent * jnp.multiply(gate, slope)


swiglu.defvjp(forward, backward)
torch_swiglu = dynaxla.to_torch(swiglu)


class Model(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.into = torch.nn.Linear(width, 4 * width)
        self.out = torch.nn.Linear(2 * width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.into(x).chunk(2, dim=-1)
        return self.out(torch_swiglu(gate, value))


def train(steps: int, compiled: bool) -> list[float]:
    torch.manual_seed(0)
    model = Model(16)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    called = torch.compile(model, backend="dynaxla", fullgraph=True) if compiled else model
    x = torch.randn(64, 16)
    y = x[:, :1] * x[:, 1:2]
    losses = []
    for _ in range(steps):
        loss = torch.nn.functional.mse_loss(called(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    steps = parser.parse_args().steps
    eager, compiled = train(steps, False), train(steps, True)
    distance = max(abs(eager_loss - compiled_loss) for eager_loss, compiled_loss in zip(eager, compiled, strict=True))
    print(f"loss {eager[0]:.4f} -> {eager[-1]:.4f}; compiled, it is at most {distance:.1e} from that")


if __name__ == "__main__":
    main()
