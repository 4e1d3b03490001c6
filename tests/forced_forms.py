"""Compilation with forms that the caller chooses."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

from dynaxla.backend import dynaxla


def variable(forms: Mapping[str, str]) -> str:
    """The value of DYNAXLA_FORMS for forms by op."""
    return ",".join(f"{op}={form}" for op, form in forms.items())


def backend_with(forms: Mapping[str, str]) -> Callable[..., Any]:
    """A backend of torch.compile: dynaxla's, which finds these forms in the environment."""

    def backend(*args: Any, **settings: Any) -> Any:
        with mock.patch.dict(os.environ, DYNAXLA_FORMS=variable(forms)):
            return dynaxla(*args, **settings)

    return backend
