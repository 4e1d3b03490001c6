"""Topologies of TPUs: errors. What is compiled for a topology is in cases/device/virtual_meshes.py, and in `make tpu-programs`."""

from __future__ import annotations

import importlib.util
import os

import pytest

from dynaxla.errors import ArgumentError, UnsupportedVersion
from dynaxla.runtime.topologies import topology

HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None or "TPU_LIBRARY_PATH" in os.environ


def test_other_platforms() -> None:
    with pytest.raises(ArgumentError, match=r"platform 'cuda'(?s:.)*platform=\"tpu\""):
        topology("cuda", "v5e:2x2")


@pytest.mark.skipif(HAS_LIBTPU, reason="libtpu is installed")
def test_a_machine_without_libtpu() -> None:
    before = dict(os.environ)
    with pytest.raises(UnsupportedVersion, match=r"cannot compile for TPUs(?s:.)*pip install libtpu=="):
        topology("tpu", "v5e:2x2")
    assert dict(os.environ) == before


@pytest.mark.skipif(not HAS_LIBTPU, reason="libtpu is not installed")
def test_names() -> None:
    assert len(topology("tpu", "v5e:2x2").devices) == 4
    with pytest.raises(ArgumentError, match="'v9:2x2' is no topology of TPUs"):
        topology("tpu", "v9:2x2")
