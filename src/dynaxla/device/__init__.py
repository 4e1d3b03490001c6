"""The torch device "jax": plain tensors whose storages hold jax.Arrays."""

from .registration import enable_device as enable_device
