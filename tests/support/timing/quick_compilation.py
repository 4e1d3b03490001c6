"""Cheaper compilation by XLA, for tests that do not check the code that XLA generates."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import pytest

from dynaxla.engine import compile as engine_compile
from dynaxla.engine.options import quick_options

# True in a run of `make quick`.
is_asked_for = False


@functools.cache
def options() -> Mapping[str, Any]:
    """Returns the options for quick compilation that the installed XLA has. In jaxlib 0.12, fusions are disabled, which halves the time."""
    known = quick_options()
    return known if "xla_cpu_use_fusion_emitters" in known else {**known, "xla_disable_hlo_passes": "fusion"}


def flags() -> str:
    """Returns the options as a value of XLA_FLAGS, for a process in which JAX also compiles code of its own."""
    return " ".join(f"--{name}={str(value).lower()}" for name, value in options().items())


def apply(patch: pytest.MonkeyPatch, own_options: Mapping[str, Any] | None = None) -> None:
    """Makes XLA compile graphs with these options, by default `options()`, until `patch` is undone."""
    options_for, quick = engine_compile.options_for, options() if own_options is None else own_options
    patch.setattr(engine_compile, "options_for", lambda *problem: {**options_for(*problem), **quick})
