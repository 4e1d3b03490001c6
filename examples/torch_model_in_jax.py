"""Trains a PyTorch model in JAX with optax. `dynaxla.to_jax` converts the model to a pure function of its parameters."""

from __future__ import annotations

import jax
import optax
import torch
from jax import numpy as jnp

import dynaxla

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.BatchNorm1d(32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
jax_fn, params = dynaxla.to_jax(model)
optimizer = optax.adam(1e-2)
x = jax.random.normal(jax.random.key(0), (256, 2))
y = jnp.sin(3 * x[:, :1]) * x[:, 1:]


@jax.jit
def step(params, buffers, state):
    def loss(params):
        out, updated = jax_fn(params, x, buffers=buffers)
        return jnp.mean((out - y) ** 2), updated

    (value, buffers), gradient = jax.value_and_grad(loss, has_aux=True)(params)
    updates, state = optimizer.update(gradient, state)
    return optax.apply_updates(params, updates), buffers, state, value


buffers, state = jax_fn.buffers, optimizer.init(params)
for number in range(301):
    params, buffers, state, value = step(params, buffers, state)
    if number % 100 == 0:
        print(f"step {number}: loss {value:.4f}")

# Copies the trained weights back into the model.
with torch.no_grad():
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        tensor.copy_(torch.from_numpy(jax.device_get({**params, **buffers}[name]).copy()))
