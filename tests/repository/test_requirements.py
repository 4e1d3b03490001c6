"""Checks that the installation of dynaxla replaces no torch and no JAX of the user, however new."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from support.paths import ROOT

REQUIREMENTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]


def plant(site: Path, name: str, version: str) -> None:
    """Writes the metadata of an installed package without files."""
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "INSTALLER").write_text("pip\n")
    (folder / "RECORD").write_text("")


@pytest.mark.parametrize(("torch", "jax"), [("9.0.0", "9.0.0"), ("2.11.0", "0.10.0"), ("2.99.0.dev20271101+cu140", "0.99.0.dev1")])
def test_pip_replaces_no_installed_package(torch: str, jax: str, tmp_path: Path) -> None:
    """pip resolves the requirements without an index, in an environment with these packages. It must install nothing."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    for text in REQUIREMENTS:
        requirement = Requirement(text)
        plant(site, requirement.name, {"torch": torch, "jax": jax}.get(requirement.name, "99.0"))
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "pip", "--isolated", "--python", tmp_path / "env" / "bin" / "python", "install", "--no-index"]
    command += ["--dry-run", "--quiet", "--report", report, *REQUIREMENTS]
    environment = {**os.environ, "PIP_CONFIG_FILE": os.devnull}  # a machine's own settings may have constraints
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert json.loads(report.read_text())["install"] == []


def test_older_torch_is_refused() -> None:
    assert not any(Requirement(text).specifier.contains("2.10") for text in REQUIREMENTS if Requirement(text).name == "torch")
