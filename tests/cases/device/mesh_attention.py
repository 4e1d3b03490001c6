"""With eight devices: attention needs no communication if batch and heads are sharded, in each mode.

XLA reports on stderr if it gathers a tensor that it cannot reshard. The test reads stderr.
"""

from __future__ import annotations

from unittest import mock

import torch
from torch import nn

from dynaxla import sharding
from dynaxla.lowering.ops import attention_implementations
from dynaxla.sharding import Mesh, mark_sharding

from .on_meshes import spec_of
from .running import MODES, array_of, compile_anew
from .simulated_tpu import on_tpu

MESH = Mesh((2, 4), ("fsdp", "tp"))
# The batch is larger than the axis that it is sharded along: a dimension of batch and heads could not be sharded along both axes.
BATCH, LENGTH, HEADS, WIDTH = 4, 6, 4, 8


def _heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)


def fused(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return nn.functional.scaled_dot_product_attention(*map(_heads, (query, key, value)), is_causal=True).transpose(1, 2).flatten(2)


def by_hand(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    query, key, value = map(_heads, (query, key, value))
    weights = (query @ key.transpose(-1, -2) / WIDTH**0.5).softmax(-1)
    return (weights @ value).transpose(1, 2).reshape(BATCH, LENGTH, HEADS * WIDTH)


def check_heads_stay_sharded() -> None:
    for function in (fused, by_hand):
        host = [torch.randn(BATCH, LENGTH, HEADS * WIDTH, requires_grad=True) for _ in range(3)]
        expected = function(*host)
        expected.square().sum().backward()
        for mode in (*MODES, "compiled"):
            sharded = [mark_sharding(x.detach().to("jax"), MESH, ("fsdp", None, "tp")).requires_grad_() for x in host]
            run = compile_anew(function) if mode == "compiled" else function
            with MODES.get(mode, MODES["eager"])():
                result = run(*sharded)
                result.square().sum().backward()
            assert spec_of(result.detach()) == ("fsdp", None, "tp"), mode
            torch.testing.assert_close(result.detach().cpu(), expected.detach(), rtol=1e-4, atol=1e-5)
            for x, y in zip(sharded, host, strict=True):
                torch.testing.assert_close(x.grad.cpu(), y.grad, rtol=1e-4, atol=1e-5)
            if mode == "compiled":
                report = sharding.report(lambda *args, compiled=run: compiled(*args).square().mean().backward(), *sharded)
                programs = {item.program for item in report.memory if item.program.startswith("dynaxla_")}
                assert len(programs) == 2, report
                assert not [item for item in report.collectives if item.program in programs], "only eager mode's mean may communicate"


def check_products_of_sharded_heads() -> None:
    """The result's array has separate dimensions for batch and heads, as its operands have. The tensor is like any other."""
    x, y = (torch.randn(BATCH, HEADS, *shape) for shape in ((LENGTH, WIDTH), (WIDTH, LENGTH)))
    sharded = [mark_sharding(value.to("jax"), MESH, ("fsdp", "tp")).flatten(0, 1) for value in (x, y)]
    result, expected = torch.bmm(*sharded), x.flatten(0, 1) @ y.flatten(0, 1)
    assert array_of(result).shape == (BATCH, HEADS, LENGTH, LENGTH)
    assert tuple(array_of(result).sharding.spec) == ("fsdp", "tp")
    torch.testing.assert_close(result.cpu(), expected)
    result[3:7].mul_(2)
    result.transpose_(0, 2)
    expected[3:7].mul_(2)
    expected.transpose_(0, 2)
    for view in (result, result.contiguous(), result[1:]):
        torch.testing.assert_close(view.cpu(), expected[1:] if view.shape[0] < LENGTH else expected)
    compiled = compile_anew(lambda x, y: torch.bmm(x, y).sum((0, 1)))
    torch.testing.assert_close(compiled(*sharded).cpu(), (x.flatten(0, 1) @ y.flatten(0, 1)).sum((0, 1)), rtol=1e-4, atol=1e-5)


def check_long_attention_is_computed_in_blocks_on_a_tpu() -> None:
    """Each device computes the scores of its own heads, in blocks of rows, without communication."""
    length = 40
    for key_heads in (HEADS, HEADS // 2):
        host = [torch.randn(BATCH, count, length, WIDTH, requires_grad=True) for count in (HEADS, key_heads, key_heads)]

        def function(*operands: torch.Tensor, is_grouped: bool = key_heads < HEADS) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(*operands, is_causal=True, enable_gqa=is_grouped)

        expected = function(*host)
        expected.square().sum().backward()
        axis = "tp" if key_heads == HEADS else None
        sharded = [mark_sharding(x.detach().to("jax"), MESH, ("fsdp", axis)).requires_grad_() for x in host]
        with on_tpu() as texts, mock.patch.multiple(attention_implementations, _LARGE_SCORES_BYTES=0, _BLOCK_BYTES=0):
            compiled = compile_anew(function)
            result = compiled(*sharded)
            result.square().sum().backward()
        assert all("stablehlo.while" in text and f"{length}x{length}x" not in text for text in texts)
        torch.testing.assert_close(result.detach().cpu(), expected.detach(), rtol=1e-4, atol=1e-5)
        for x, y in zip(sharded, host, strict=True):
            torch.testing.assert_close(x.grad.cpu(), y.grad, rtol=1e-4, atol=1e-5)
