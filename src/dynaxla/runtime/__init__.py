"""What all the rest stands on: private entry points of torch and jaxlib, clients and programs of XLA,
memory handed over, devices, layouts, the heap, callbacks, random seeds."""

from . import quiet_jax as quiet_jax  # before anything else imports JAX
