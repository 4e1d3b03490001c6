"""Tests of the facts that programs and measurements depend on: they stay the same on a machine, and differ between machines."""

from __future__ import annotations

import time
from pathlib import Path

import jax
import jaxlib
import pytest
import torch

import dynaxla
from dynaxla.runtime import clients, machine


class FakeGpu:
    platform, device_kind = "gpu", "NVIDIA H100"


def test_versions() -> None:
    assert machine.versions() == (dynaxla.__version__, torch.__version__, jax.__version__, jaxlib.__version__)


def test_machine_names() -> None:
    before = torch.get_num_threads()
    try:
        names = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            names.append(machine.machine_name(clients.cpu_device()))
            assert f"{clients.threads_of(clients.cpu_device())} threads" in names[-1]
    finally:
        torch.set_num_threads(before)
    assert all(name.endswith(f"jaxlib {jaxlib.__version__}") for name in names)
    assert machine.machine_name(FakeGpu()) == f"NVIDIA H100, jaxlib {jaxlib.__version__}"


def test_processor_facts_do_not_change() -> None:
    """/proc/cpuinfo also has the current clock speed, which changes."""
    first = machine.processor_facts()
    machine.processor_facts.cache_clear()
    assert machine.processor_facts() == first != ""
    assert "MHz" not in first
    assert len(set(first.splitlines())) == len(first.splitlines()), "a fact is repeated for each core"


def test_processor_facts_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise FileNotFoundError("/proc/cpuinfo")

    machine.processor_facts.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(machine, "open", refuse, raising=False)
        facts = machine.processor_facts()
    machine.processor_facts.cache_clear()
    assert torch.backends.cpu.get_cpu_capability() in facts


def test_hash_of_sources_is_none_after_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that has changed since its import is not the running code."""
    (tmp_path / "runtime").mkdir()
    (tmp_path / "runtime" / "machine.py").write_text("x = 1\n")
    hashes = set()
    for content in ("y = 1\n", "y = 2\n", "y = 2\n"):
        (tmp_path / "lowering.py").write_text(content)
        with monkeypatch.context() as patch:
            patch.setattr(machine, "__file__", str(tmp_path / "runtime" / "machine.py"))
            patch.setattr(machine, "_IMPORT_TIME", time.time() + 60)
            machine.sources.cache_clear()
            hashes.add(machine.sources())
            machine.sources.cache_clear()
            patch.setattr(machine, "_IMPORT_TIME", 0)
            assert machine.sources() is None
    machine.sources.cache_clear()
    assert len(hashes) == 2
    assert machine.sources() not in hashes


@pytest.mark.parametrize(
    ("flags", "wide", "avx2_alone"), [("avx2 avx512f avx512bw", True, False), ("avx avx2", False, True), ("asimd", False, False)]
)
def test_vector_extensions(flags: str, wide: bool, avx2_alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "processor_facts", lambda: f"flags\t\t: fpu {flags} sha_ni\n")
    assert (machine.has_wide_vectors(), machine.has_avx2_alone()) == (wide, avx2_alone)
