"""The torch device "jax": plain torch tensors whose storages hold jax.Arrays."""

from .modes import lazy as lazy
from .modes import set_mode as set_mode
from .modes import sync as sync
from .registration import enable as enable
