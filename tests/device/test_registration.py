"""Tests of the registration of the device. Most have their own process, because a process cannot disable the device again."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

import dynaxla
from support.comparisons.compare import assert_equal
from support.processes.device_checks import NEEDS_DEVICE, run_checks
from support.processes.scripts import completed, run_script


def test_import_does_not_register_the_device() -> None:
    assert not hasattr(torch, "jax")
    assert torch._C._get_privateuse1_backend_name() == "privateuseone"
    assert "enable" in dir(dynaxla.device)


@NEEDS_DEVICE
@pytest.mark.quick(only=True)
@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_ops_without_another_process(mode: str) -> None:
    """For `make quick`, which starts no processes."""
    dynaxla.device.enable()
    x, weight = torch.randn(3, 4), torch.randn(4, 2, requires_grad=True)
    expected = (x @ weight).relu().cumsum(0)
    expected.sum().backward()
    with dynaxla.device.lazy() if mode == "lazy" else contextlib.nullcontext():
        moved = weight.detach().to("jax").requires_grad_()
        result = (x.to("jax") @ moved).relu().cumsum(0)
        result.sum().backward()
        assert moved.grad is not None
        assert_equal((result.detach().cpu(), moved.grad.cpu()), (expected.detach(), weight.grad))


@NEEDS_DEVICE
def test_storages() -> None:
    run_checks("storages")


@NEEDS_DEVICE
def test_load_without_the_device(tmp_path: Path) -> None:
    """torch reports the missing device. With map_location, the file can be loaded."""
    path = tmp_path / "file.pt"
    run_script(f"import torch, dynaxla; dynaxla.device.enable(); torch.save(torch.arange(3.0).to('jax'), {str(path)!r})")
    process = completed(f"import torch; torch.load({str(path)!r})")
    assert process.returncode == 1
    assert "jax:0" in process.stderr
    run_script(f"import torch; assert torch.load({str(path)!r}, map_location='cpu').tolist() == [0, 1, 2]")


@NEEDS_DEVICE
def test_several_devices() -> None:
    backward = "import torch; x = torch.ones(1, requires_grad=True); (x * x).backward()"
    run_checks("several", backward, XLA_FLAGS="--xla_force_host_platform_device_count=4", own=True)


def test_enable_after_another_library_is_refused() -> None:
    process = completed("import torch; torch.utils.rename_privateuse1_backend('other'); import dynaxla; dynaxla.device.enable()")
    assert process.returncode == 1
    assert 'another library uses it as "other"' in process.stderr
