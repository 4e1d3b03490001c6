"""The torch device "jax": plain torch tensors whose storages hold jax.Arrays.

`enable` registers the device. Its ops run at once (eager mode). Inside `lazy`, or after `set_mode("lazy")`, they are recorded, and run
later as one program: when a value is read, or at `sync`.
"""

from .modes import lazy as lazy
from .modes import set_mode as set_mode
from .modes import sync as sync
from .registration import enable as enable
