"""What all the rest stands on: private entry points of torch and jaxlib, devices, layouts, forks, the heap, callbacks, random seeds."""

from . import quiet_jax as quiet_jax  # before anything else imports JAX
