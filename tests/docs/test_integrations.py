"""Tests that run each block of docs/integrations.md in its own process, if the block's libraries are installed."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT

DOCUMENT = ROOT / "docs" / "integrations.md"
SECTIONS = {
    section.partition("\n")[0]: re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    for section in DOCUMENT.read_text().split("\n## ")[1:]
}
# transformers' Trainer needs accelerate, torchtitan needs triton.
NEEDS = {
    "transformers: Trainer": ("transformers", "accelerate"),
    "transformers: generate": ("transformers",),
    "TorchDynamo's guards": ("torch",),
    "accelerate": ("accelerate",),
    "Lightning": ("lightning",),
    "torchtitan": ("torchtitan", "triton"),
}
COUNT = "\nfrom dynaxla.observe import metrics\nassert metrics.snapshot().get('calls', 0) > 0, 'dynaxla ran nothing'\n"


def test_all_sections_with_blocks_are_listed() -> None:
    assert [name for name, blocks in SECTIONS.items() if blocks] == list(NEEDS)
    assert all(len(SECTIONS[name]) == 1 for name in NEEDS)


@functools.cache
def is_broken(package: str) -> bool:
    if importlib.util.find_spec(package) is None:
        return False
    return subprocess.run([sys.executable, "-c", f"import {package}"], capture_output=True, check=False).returncode != 0


@pytest.mark.sample(usual=2)
@pytest.mark.parametrize("name", NEEDS)
def test_block_runs(name: str, tmp_path: Path) -> None:
    for package in NEEDS[name]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    if "transformers" in NEEDS[name] and is_broken("torchvision"):
        pytest.skip("torchvision is installed, but for another build of torch: transformers cannot be imported with it")
    script = tmp_path / "block.py"
    script.write_text(SECTIONS[name][0] + COUNT)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    process = subprocess.run([sys.executable, str(script)], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
