"""Compiled graphs for a TPU that is simulated by the CPU: programs are those for a TPU, without kernels that only a TPU has."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
import torch
from torch import nn

import dynaxla
from dynaxla.engine import build
from dynaxla.errors import UnsupportedOp
from dynaxla.observe import coverage
from dynaxla.runtime import devices, late_checks
from support.comparisons.compare import assert_equal

from .running import compile_anew

BF16 = torch.bfloat16


@contextlib.contextmanager
def on_tpu() -> Iterator[list[str]]:
    """Inside, programs of the device are lowered as for a TPU. Yields the list of their StableHLO texts."""
    texts: list[str] = []

    def lower(unit: Any, traced: jax.stages.Traced) -> Any:
        lowered = original_lower(unit, traced)
        texts.append(lowered.as_text())
        return lowered

    original_lower, platform_of = build.lower, devices.platform_of
    with (
        mock.patch.object(build, "lower", lower),
        mock.patch.object(devices, "platform_of", lambda device: "tpu" if devices.is_in_xla(device) else platform_of(device)),
    ):
        yield texts


def _programs(function: Callable[..., Any], *tensors: torch.Tensor, **options: Any) -> list[str]:
    """Returns the StableHLO texts of a function's programs, and checks that the results are the CPU's."""
    with on_tpu() as texts:
        result = compile_anew(function, **options)(*[tensor.to("jax") for tensor in tensors])
    assert_equal(result.cpu(), function(*tensors), tolerance=(0.02, 0.02))
    return texts


def check_attention_is_one_op() -> None:
    coverage.reset()
    x = torch.randn(2, 4, 16, 8).to(BF16)
    (text,) = _programs(lambda x: nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True), x)
    assert coverage.snapshot().keys() == {"aten._scaled_dot_product_fused_attention_overrideable.default"}
    # The form that XLA:TPU fuses: products of precision DEFAULT, one select before the maximum, and a mask of rank 2.
    assert "HIGHEST" not in text
    assert text.count("stablehlo.select") == 1
    assert text.index("stablehlo.select") < text.index("applies stablehlo.maximum") < text.index("stablehlo.exponential")
    assert re.findall(r"stablehlo.iota.*: tensor<(\S+)xi32>", text) == ["16x16"] * 2


def check_dimensions_are_not_merged() -> None:
    net = nn.Linear(8, 8, dtype=BF16)
    x = torch.randn(2, 4, 8).to(BF16)
    (text,) = _programs(lambda x, w: nn.functional.linear(nn.functional.linear(x, w).relu(), w), x, net.weight.detach())
    assert "tensor<2x4x8xbf16>, tensor<8x8xbf16>" in text
    assert "stablehlo.reshape" not in text


class _Parts(nn.Module):
    """Its backward pass reads slices of a value, slices of a returned value, and a reshaped value."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.returned, self.rows = nn.Linear(8, 24), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second, _ = self.wide(x).chunk(3, -1)
        returned = self.returned(x)
        part = returned[..., 2:7]
        rows = self.rows(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        return nn.functional.gelu(first) * nn.functional.gelu(second), returned, part.sin() * part.exp(), rows.exp() * rows.sin()


def _results_and_gradients(function: Callable[..., tuple[torch.Tensor, ...]], model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    x = x.detach().requires_grad_()
    results = function(x)
    sum([(result * torch.arange(result.numel(), device=x.device).view(result.shape).cos()).sum() for result in results]).backward()
    return [tensor.detach().cpu() for tensor in (*results, x.grad, *(parameter.grad for parameter in model.parameters()))]


def check_slices_are_not_saved() -> None:
    """The backward pass slices only the returned value at an offset. Gradients are those of eager mode."""
    model, x = _Parts(), torch.randn(2, 4, 8)
    expected = _results_and_gradients(model, model, x)
    model.to("jax")
    for dynamic in (False, True):
        torch._dynamo.reset()
        with on_tpu() as texts:
            actual = _results_and_gradients(torch.compile(model, backend="dynaxla", dynamic=dynamic), model, x.to("jax"))
        assert_equal(actual, expected, tolerance=(1e-5, 1e-5))
        assert texts[-1].count("stablehlo.dynamic_slice") == 1


def check_write_to_a_saved_result_raises() -> None:
    """Autograd raises also if the backward pass reads only slices of the result."""
    layer, x = nn.Linear(8, 24).to("jax"), torch.randn(4, 8, device="jax")

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        result = layer(x)
        return result, result[:, :8].exp() * result[:, 8:16]

    for run in (function, compile_anew(function)):
        result, product = run(x)
        with torch.no_grad():
            result.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


def check_each_precision_has_a_program() -> None:
    x = torch.randn(4, 4, device="jax")
    with on_tpu() as texts:
        compiled = compile_anew(lambda x: x @ x)
        try:
            for value in ("highest", "medium", "high", "highest"):
                torch.set_float32_matmul_precision(value)
                compiled(x)
        finally:
            torch.set_float32_matmul_precision("highest")
    precisions = [re.findall(r"precision = \[(\w+)", text) for text in texts]
    assert precisions == [["HIGHEST"], ["DEFAULT"], ["HIGH"]], precisions


@torch.library.custom_op("simulated_tpu::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.cpu().numpy() * 2).to(x.device)


@doubled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def check_ops_without_lowering_run_between_programs() -> None:
    coverage.reset()
    assert len(_programs(lambda x: doubled(x + 1) * 3, torch.randn(4))) == 2
    assert coverage.snapshot()["simulated_tpu.doubled.default"]["fallback"] == 1
    assert len(_programs(lambda x: torch.linalg.eigvals(x @ x).abs().sort()[0] + 1, torch.randn(4, 4))) == 2
    with on_tpu(), pytest.raises(UnsupportedOp, match="cannot call torch's kernel"):
        compile_anew(lambda x: doubled(x) + 1, fallback="error")(torch.randn(4, device="jax"))


class _SlowCode:
    """The error code of checks. Its copy to the host is complete after `block_until_ready`, or once `has_arrived` is set."""

    def __init__(self, code: int) -> None:
        self.code, self.is_sent, self.has_arrived = code, False, False

    def copy_to_host_async(self) -> None:
        self.is_sent = True

    def is_ready(self) -> bool:
        return self.has_arrived

    def block_until_ready(self) -> None:
        assert self.is_sent
        self.has_arrived = True

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        assert self.has_arrived, "the call waits for the device"
        return np.array(self.code)


def check_no_call_waits_for_checks() -> None:
    """A failed check of an asynchronous device raises in a later call, and the program keeps the old values."""
    table, good, bad = torch.zeros(4, device="jax"), torch.tensor([1], device="jax"), torch.tensor([9], device="jax")
    codes: list[_SlowCode] = []

    def send_slowly(code: jax.Array) -> _SlowCode:
        codes.append(_SlowCode(int(code)))
        codes[-1].copy_to_host_async()
        return codes[-1]

    def step(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        table.add_(1)
        return table[index]

    with (
        on_tpu() as texts,
        mock.patch.object(late_checks, "is_asynchronous", return_value=True),
        mock.patch.object(late_checks.ArrayReports, "_send", lambda _, code: send_slowly(code)),
    ):
        compiled = compile_anew(step)
        assert compiled(table, good).tolist() == [1]
        compiled(table, bad)
        assert len(texts) == 1, "the checks should have no program of their own"
        assert table.tolist() == [1] * 4
        assert compiled(table, good).tolist() == [2]
        codes[0].has_arrived = codes[1].has_arrived = True
        with pytest.raises(IndexError, match="out of") as caught:
            compiled(table, good)
        assert "An earlier call" in caught.value.__notes__[0]
        assert table.tolist() == [2] * 4
        compiled(table, bad)
        with pytest.raises(IndexError):
            dynaxla.synchronize()
        dynaxla.synchronize()
