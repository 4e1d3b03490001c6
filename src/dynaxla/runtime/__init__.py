"""The lowest layer: private entry points of torch and jaxlib, XLA's clients and programs, devices, zero-copy transfers, stores on disk.

docs/internals/runtime.md lists all modules.
"""

from . import quiet_jax as quiet_jax  # before anything else imports JAX
