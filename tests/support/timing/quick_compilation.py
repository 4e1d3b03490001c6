"""Cheaper compilation by XLA, for tests whose subject is not the code that XLA makes."""

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
    """XLA's options, as far as this XLA has them. Without the older emitters (jaxlib 0.12) no fusions: that halves the time."""
    found = quick_options()
    return found if "xla_cpu_use_fusion_emitters" in found else {**found, "xla_disable_hlo_passes": "fusion"}


def flags() -> str:
    """The same as a value of the variable XLA_FLAGS, for a process whose own JAX compiles, too."""
    return " ".join(f"--{name}={str(value).lower()}" for name, value in options().items())


def apply(patch: pytest.MonkeyPatch, own_options: Mapping[str, Any] | None = None) -> None:
    """XLA compiles graphs with these options, by default `options()`, until `patch` is undone."""
    options_for, quick = engine_compile.options_for, options() if own_options is None else own_options
    patch.setattr(engine_compile, "options_for", lambda *problem: {**options_for(*problem), **quick})
