"""A backend that compiles with given implementations of ops."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

from dynaxla.backend import dynaxla


def variable(implementations: Mapping[str, str]) -> str:
    """Returns the value of DYNAXLA_IMPLEMENTATIONS for implementations by op."""
    return ",".join(f"{op}={implementation}" for op, implementation in implementations.items())


def backend_with(implementations: Mapping[str, str]) -> Callable[..., Any]:
    """Returns dynaxla's backend of torch.compile, with these implementations in the environment."""

    def backend(*args: Any, **settings: Any) -> Any:
        with mock.patch.dict(os.environ, DYNAXLA_IMPLEMENTATIONS=variable(implementations)):
            return dynaxla(*args, **settings)

    return backend
