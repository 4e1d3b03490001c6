"""Other people's models and training scripts on the device, in a process of its own for each kind."""

from __future__ import annotations

import importlib.util

import pytest
from newer import not_in_oldest
from scripts import run_script

pytestmark = not_in_oldest("storages that can be made without memory")


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers, of the extra `bench`")
def test_models() -> None:
    run_script("import device_cases; device_cases.run('models')")


def test_training_scripts() -> None:
    run_script("import device_cases; device_cases.run('training')")


def test_eight_devices() -> None:
    run_script("import device_cases; device_cases.run('eight')", XLA_FLAGS="--xla_force_host_platform_device_count=8", own=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ten", "timm", "transformers", "generate"])
def test_every_model(kind: str) -> None:
    run_script(f"from device_cases import models; assert not models.main({kind!r}, [])")
