"""Makes a module that moves to or from the device keep its parameter objects, like a module that moves to a GPU.

torch keeps a parameter object and swaps its data only if it considers the tensors on both devices compatible. For its spare device type
(PrivateUse1), torch creates new parameters. Tied weights would no longer be tied, and existing optimizers would refer to old parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..runtime import private
from . import storages


def install() -> None:
    """Patches `nn.Module._apply`, so that `nn.Module.to` and similar methods keep the objects of parameters."""
    apply = nn.Module._apply

    @functools.wraps(apply)
    def _apply(self: nn.Module, fn: Callable[..., Any], recurse: bool = True) -> Any:
        before = {} if torch.__future__.get_overwrite_module_params_on_conversion() else dict(self._parameters)
        result = apply(self, fn, recurse)
        after = dict(self._parameters)  # a ScriptModule's own mapping has no `get`
        for name, old in before.items():
            new = after.get(name)
            if old is not None and new is not None and new is not old and (storages.is_jax_tensor(old) or storages.is_jax_tensor(new)):
                private.swap_values(old, new)
                self._parameters[name] = old
        return result

    nn.Module._apply = _apply
