"""Tests of topologies of TPUs. For compilations see tests/cases/device/virtual_meshes.py and `make tpu-programs`."""

from __future__ import annotations

import importlib.util
import os

import pytest

from dynaxla.errors import ArgumentError, UnsupportedVersion
from dynaxla.lowering.ops import sharding_constraints
from dynaxla.runtime import meshes
from dynaxla.runtime.topologies import topology

HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None or "TPU_LIBRARY_PATH" in os.environ


def test_other_platform_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"platform 'cuda'(?s:.)*platform=\"tpu\""):
        topology("cuda", "v5e:2x2")


@pytest.mark.skipif(HAS_LIBTPU, reason="libtpu is installed")
def test_missing_libtpu_is_an_error() -> None:
    before = dict(os.environ)
    with pytest.raises(UnsupportedVersion, match=r"cannot compile for TPUs(?s:.)*pip install libtpu=="):
        topology("tpu", "v5e:2x2")
    assert dict(os.environ) == before


@pytest.mark.skipif(not HAS_LIBTPU, reason="libtpu is not installed")
def test_names_of_topologies() -> None:
    assert len(topology("tpu", "v5e:2x2").devices) == 4
    with pytest.raises(ArgumentError, match="'v9:2x2' is no topology of TPUs"):
        topology("tpu", "v9:2x2")


@pytest.mark.skipif(not HAS_LIBTPU, reason="libtpu is not installed")
@pytest.mark.parametrize("sizes", [(256,), (16, 16), (64, 4), (2, 8, 16)], ids=str)
def test_mesh_of_a_topology(sizes: tuple[int, ...]) -> None:
    """A mesh may divide the grid of chips in any way."""
    chips = topology("tpu", "v5e:16x16")
    names = tuple("abc"[: len(sizes)])
    with meshes.compile_only(chips):
        mesh = meshes.for_compilation(sharding_constraints.sharding_of(sizes, names, range(-256, 0), [*names]))
    assert mesh is not None
    assert mesh.mesh.devices.shape == sizes
    assert set(mesh.mesh.devices.flat) == set(chips.devices)
