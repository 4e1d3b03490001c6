"""The lowest layer: private entry points of torch and jaxlib, XLA clients and programs, zero-copy transfer of memory between torch and XLA,
devices, layouts, the heap, callbacks, and random seeds."""

from . import quiet_jax as quiet_jax  # before anything else imports JAX
