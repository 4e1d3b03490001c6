"""A module that moves to the device, or from it, keeps its parameters, as one that moves to a GPU does.

torch lays the data of a parameter on another device where it takes both for tensors of one kind; for its spare device it makes new
parameters. Tied weights would then be tied no more, and an optimizer or a list that was made before would have the old ones.
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
    """Have `nn.Module.to` and all that is made of the same keep the parameters that move between this device and another one."""
    apply = nn.Module._apply

    @functools.wraps(apply)
    def _apply(self: nn.Module, fn: Callable[..., Any], recurse: bool = True) -> Any:
        before = {} if torch.__future__.get_overwrite_module_params_on_conversion() else dict(self._parameters)
        result = apply(self, fn, recurse)
        for name, old in before.items():
            new = self._parameters.get(name)
            if old is not None and new is not None and new is not old and (storages.is_ours(old) or storages.is_ours(new)):
                private.swap_values(old, new)
                self._parameters[name] = old
        return result

    nn.Module._apply = _apply
