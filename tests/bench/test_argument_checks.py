"""Tests of the checks of a command's arguments, which run before any measurement."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dynaxla.bench import argument_checks
from dynaxla.bench.benchmark_error import BenchmarkError


def test_split_at_commas_and_with_extra_names() -> None:
    assert argument_checks.split_at_commas(["a, b", "c", ",,"]) == ["a", "b", "c"]
    assert argument_checks.split_at_commas(None) == []
    assert argument_checks.with_extra_names(["a"], ["b"]) == ["a", "b"]
    assert argument_checks.with_extra_names([], ["b"]) == [], "no names mean the usual ones, not these alone"


def test_dtypes_and_devices() -> None:
    assert argument_checks.check_dtype("bfloat16") is torch.bfloat16
    assert argument_checks.check_device("cpu") == torch.device("cpu")
    with pytest.raises(BenchmarkError, match="unknown dtype 'int8'; the valid names are: float32"):
        argument_checks.check_dtype("int8")  # torch has it, the benchmark does not
    for name, message in {
        "abacus": "unknown device",
        "meta": "unknown device",
        f"cuda:{torch.cuda.device_count()}": "CUDA devices",
    }.items():
        with pytest.raises(BenchmarkError, match=message):
            argument_checks.check_device(name)


def test_a_directory_is_made_and_nothing_is_left_in_it(tmp_path: Path) -> None:
    argument_checks.check_writable(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(BenchmarkError, match="cannot write to"):
        argument_checks.check_writable(tmp_path / "file" / "below")
