"""Calls that the device refuses raise torch's kinds of error and change nothing. Also: details of ops, copies, files and warnings."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from torch import nn

from dynaxla.observe import metrics

from .harmless import check_a_sample_of_all_calls as check_a_sample_of_all_calls


def _refuses(call: Callable[[torch.Tensor, int], torch.Tensor], x: torch.Tensor, number: int) -> bool:
    """True if eager mode raises for the number. torch 2.15 takes every bound of clamp."""
    try:
        call(x.clone(), number)
    except RuntimeError:
        assert number not in (5, 0.5)
        return True
    return False


def check_numbers_beyond_a_dtype() -> None:
    """A number that the dtype cannot hold does not use the program of another number, in either order."""
    for first, second in ((5, 300), (300, 5), (0.5, torch.inf), (0.5, torch.nan)):
        for call in (
            torch.Tensor.fill_, lambda x, n: x.clamp(max=n), lambda x, n: x.masked_fill(x > 0, n), torch.full_like,
            lambda x, n: x.index_fill(0, torch.tensor([0], device=x.device), n), lambda x, n: torch.where(x > 0, x, n),
        ):  # fmt: skip
            for number in (first, second):
                on_cpu, on_device = (torch.ones(3, dtype=torch.int8, device=device) for device in ("cpu", "jax"))
                if _refuses(call, on_cpu, number):
                    with pytest.raises(RuntimeError, match="without overflow"):
                        call(on_device, number)
                    assert on_device.tolist() == [1, 1, 1]
                else:
                    torch.testing.assert_close(call(on_device, number).cpu(), call(on_cpu, number), equal_nan=True, rtol=0, atol=0)
    x = torch.zeros(2, dtype=torch.float16, device="jax")
    with pytest.raises(RuntimeError, match="without overflow"):
        x.fill_(1e6)
    with pytest.raises(RuntimeError, match="without overflow"):
        torch.compile(lambda x: x.masked_fill(x > 0, 1e6), backend="dynaxla")(x)
    assert (x + 1e6).tolist() == [torch.inf] * 2
    assert (torch.ones(2, dtype=torch.int8, device="jax") + 300).tolist() == [45, 45]
    integers = torch.arange(1, 4, device="jax")
    assert (integers**2).tolist() == [1, 4, 9]
    for power in (lambda: integers**-1, lambda: integers.pow_(-2)):
        with pytest.raises(RuntimeError, match="negative integer powers"):
            power()


def check_errors_are_torchs() -> None:
    """Errors about dtypes, shapes and devices have the CPU's messages."""
    x = torch.arange(6, device="jax").view(2, 3)
    with pytest.raises(RuntimeError, match="same dtype"):
        torch.compile(torch.mm, backend="dynaxla")(x, x.t().float())
    with pytest.raises(NotImplementedError, match="not implemented for 'Long'"):
        nn.functional.layer_norm(x, (3,))
    with pytest.raises(NotImplementedError, match="not implemented for 'Long'"):
        nn.functional.batch_norm(x, None, None, training=True)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        x.float() @ x.float()
    with pytest.raises(RuntimeError, match="single memory location"):
        torch.masked_select(x.float(), x > 2, out=torch.zeros(1, device="jax").expand(3))
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(2, 3)
    with pytest.raises(RuntimeError, match="cpu and jax:0"):
        nn.Linear(3, 2)(x.float())
    with pytest.raises(RuntimeError, match='there is no "jax:9"'):
        torch.ones(2).to("jax:9")
    with pytest.raises(TypeError, match=r"\.cpu\(\)"):
        x.numpy()
    with pytest.raises(TypeError, match=r"\.cpu\(\)"):
        np.asarray(x)
    with pytest.raises(RuntimeError, match="complex32"):
        x.chalf()
    with pytest.raises(NotImplementedError, match="sparse"):
        x.to_sparse()
    with pytest.raises(RuntimeError, match="to be on cpu"):
        torch.tensor_split(x, torch.tensor([1], device="jax"))
    with pytest.raises(RuntimeError, match="memory location"):
        torch.take(x, torch.tensor([1, 2], device="jax"), out=x)
    wide = torch.zeros(6, device="jax").expand(2, 6)
    with pytest.raises(RuntimeError, match="single memory location"):
        torch.index_select(torch.ones(3, 6, device="jax"), 1, torch.tensor([0, 1], device="jax"), out=wide)
    assert (x.shape, wide.shape) == ((2, 3), (2, 6))
    for read_address in (x.data_ptr, getattr(x, "const_data_ptr", x.data_ptr)):
        with pytest.raises(RuntimeError):
            read_address()
    assert torch.ones(2).data_ptr() != 0


def check_sharing_between_processes_is_refused() -> None:
    x = torch.ones(2, device="jax")
    for share in (x.share_memory_, lambda: nn.Linear(2, 2).to("jax").share_memory(), x.untyped_storage().share_memory_):
        with pytest.raises(RuntimeError, match=r"\.cpu\(\)"):
            share()
    with pytest.raises(RuntimeError, match=r"\.cpu\(\)"):
        ForkingPickler.dumps(x)


def check_non_blocking_copies() -> None:
    x = torch.arange(3.0).to("jax", non_blocking=True)
    assert x.to("cpu", non_blocking=True).tolist() == x.to("cpu", torch.float64, non_blocking=True).tolist() == [0, 1, 2]
    assert nn.Linear(2, 2).to("jax", non_blocking=True).to("cpu", non_blocking=True).weight.device.type == "cpu"


def check_decomposed_ops() -> None:
    """Ops without a lowering are decomposed, and compiled as one program."""
    x = torch.randn(3, 4)

    def compute(x: torch.Tensor) -> list[torch.Tensor]:
        f = nn.functional
        return [
            f.mse_loss(x, x * 2), f.smooth_l1_loss(x, x * 3), f.huber_loss(x, -x), f.soft_margin_loss(x, x.sign()), f.mish(x),
            f.multi_margin_loss(x, torch.ones(3, dtype=torch.long, device=x.device)), f.glu(x), f.hardswish(x), f.layer_norm(x, (4,)),
        ]  # fmt: skip

    before = metrics.snapshot().get("device_fallbacks", 0)
    for actual, expected in zip(compute(x.to("jax")), compute(x), strict=True):
        torch.testing.assert_close(actual.cpu(), expected, rtol=1e-4, atol=1e-5)
    assert metrics.snapshot().get("device_fallbacks", 0) == before
    device_ops = metrics.snapshot()["device_ops"]
    nn.functional.layer_norm(x.to("jax"), (4,))
    nn.functional.mse_loss(x.to("jax"), x.to("jax"))
    assert metrics.snapshot()["device_ops"] == device_ops + 2


def check_alpha_and_beta_are_inputs() -> None:
    x = torch.randn(3, 3)
    on_device = x.to("jax")
    compilations = []
    for step in range(5):
        numbers = {"beta": 0.3 * step + 0.2, "alpha": step + 1.5}
        for name, left, right in (("addmm", x, x), ("addmv", x, x[0]), ("addr", x[0], x[1])):
            first = x[0] if name == "addmv" else x
            expected = getattr(torch, name)(first, left, right, **numbers)
            actual = getattr(torch, name)(first.to("jax"), left.to("jax"), right.to("jax"), **numbers)
            torch.testing.assert_close(actual.cpu(), expected, rtol=1e-4, atol=1e-5)
        compilations.append(metrics.snapshot()["compile"])
    assert compilations[0] == compilations[-1]
    assert torch.addmm(on_device * torch.nan, on_device, on_device, beta=0).isfinite().all()


def check_batch_norm_statistics_with_out() -> None:
    """Running statistics are updated if the results are written with `out`."""
    for device in ("cpu", "jax"):
        x = torch.arange(12.0).reshape(4, 3).to(device)
        mean, variance = torch.zeros(3, device=device), torch.ones(3, device=device)
        out = [torch.empty(0, device=device) for _ in range(3)]
        torch.native_batch_norm(x, None, None, mean, variance, True, 0.1, 1e-5, out=out)
        torch.testing.assert_close(mean.cpu(), torch.tensor([0.45, 0.55, 0.65]))
        assert out[0].shape == (4, 3)


def check_std_and_var_do_not_warn() -> None:
    """A warning about degrees of freedom would fail: checks run with warnings as errors."""
    x = torch.randn(3, 2)
    for actual, expected in ((x.to("jax").std(0), x.std(0)), (x.to("jax").var(), x.var()), (torch.var_mean(x.to("jax"), 1)[0], x.var(1))):
        torch.testing.assert_close(actual.cpu(), expected)


def check_refused_calls_are_not_logged() -> None:
    """torch logs each call that its fake kernels refuse. On the device, the error is enough."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(handler)
    try:
        with pytest.raises(RuntimeError):
            torch.ones(3, 4, device="jax") @ torch.ones(3, 5, device="jax")
    finally:
        logger.removeHandler(handler)
    assert not records
    assert not logger.filters


def check_files_load_without_the_device() -> None:
    """A file that was saved from the device loads onto the CPU, with map_location."""
    file = io.BytesIO()
    torch.save({"x": torch.arange(3.0).to("jax")}, file)
    file.seek(0)
    assert torch.load(file, map_location="cpu")["x"].tolist() == [0, 1, 2]
