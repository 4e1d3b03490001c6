"""Tests of models and training scripts of other libraries on the device, each kind in its own process."""

from __future__ import annotations

import importlib.util

import pytest

from dynaxla.bench.suites import MODELS
from support.processes.device_checks import NEEDS_DEVICE, run_checks
from support.processes.scripts import run_script

pytestmark = NEEDS_DEVICE


@pytest.mark.thorough
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers, of the extra `bench`")
def test_models() -> None:
    run_checks("models")


@pytest.mark.thorough
def test_training_scripts() -> None:
    run_checks("training")


@pytest.mark.thorough
def test_eight_devices() -> None:
    run_checks("eight", XLA_FLAGS="--xla_force_host_platform_device_count=8")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ten", "timm", "transformers", "generate"])
def test_all_models_of_a_kind(kind: str) -> None:
    run_script(f"from cases.device import models; assert not models.main({kind!r}, [])")


@pytest.mark.slow
@pytest.mark.parametrize("name", [case.name for case in MODELS])
def test_training_of_a_benchmark_model(name: str) -> None:
    run_script(f"from cases.device import models; assert not models.main('training', [{name!r}])")
