"""Implementations of attention: the choice of cuDNN, and equal results of all implementations."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
import torch

from dynaxla.lowering import Interpreter, Settings
from dynaxla.lowering.function import Function
from dynaxla.lowering.implementations import Chooser, Implementation, Implementations, Operand, choose_by_rules, choose_generic
from dynaxla.lowering.ops import attention_implementations
from dynaxla.lowering.ops.attention_implementations import ATTENTION, ATTENTION_GRADIENT, AttentionProblem
from support import internals
from support.comparisons.single_op import Call, graph_of
from support.fakes import simulated_cudnn
from support.timing import quick_compilation

aten = torch.ops.aten
BF16 = torch.bfloat16


def heads(
    rows: int = 16, columns: int = 16, size: int = 8, count: int = 4, key_heads: int = 4, dtype: torch.dtype = BF16
) -> list[torch.Tensor]:
    """Query, key and value as a linear layer returns them: the heads of a row are adjacent in memory."""
    torch.manual_seed(0)
    shapes = [(2, rows, count, size), *[(2, columns, key_heads, size)] * 2]
    return [torch.randn(shape).to(dtype).transpose(1, 2) for shape in shapes]


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0, is_causal: bool = False, **kwargs: Any) -> Call:
    return Call(aten._scaled_dot_product_flash_attention.default, (q, k, v, dropout_p, is_causal), kwargs)


def efficient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None, is_causal: bool = False, **kwargs: Any
) -> Call:
    return Call(aten._scaled_dot_product_efficient_attention.default, (q, k, v, mask, True, 0.0, is_causal), kwargs)


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> Call:
    return Call(aten._scaled_dot_product_cudnn_attention.default, (q, k, v, mask, True, 0.0, False, False))


def overrideable(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> Call:
    return Call(aten._scaled_dot_product_fused_attention_overrideable.default, (q, k, v, mask, 0.0, True))


def backward(forward: Call, grad_mask: bool = False, results: tuple[torch.Tensor, torch.Tensor] | None = None) -> Call:
    """The gradient's op. `results`: the forward's output and log-sum-exps; random tensors of the same shapes by default."""
    q, k, v = forward.args[:3]
    grad = torch.randn(*q.shape[:3], v.shape[3]).to(q.dtype)
    out, logsumexp = results or (torch.randn_like(grad), torch.randn(q.shape[:3]))
    rest = (None, None, q.shape[2], k.shape[2])
    logsumexp = logsumexp.reshape(logsumexp.shape[:3])
    seed = torch.zeros((), dtype=torch.int64)
    name, kwargs = forward.op._schema.name, forward.kwargs
    if "flash" in name:
        args: Sequence[Any] = (out, logsumexp, *rest, *forward.args[3:5], seed, seed)
        op = aten._scaled_dot_product_flash_attention_backward.default
    elif "efficient" in name:
        args = (forward.args[3], out, logsumexp, seed, seed, 0.0, [True, True, True, grad_mask], forward.args[6])
        op = aten._scaled_dot_product_efficient_attention_backward.default
    else:
        args = (out, logsumexp[..., None], seed, seed, forward.args[3], *rest, 0.0, False)
        op = aten._scaled_dot_product_cudnn_attention_backward.default
    return Call(op, (grad, q, k, v, *args), kwargs)


def function_of(
    calls: Sequence[Call], platform: str = "cuda", choose: Chooser = choose_by_rules, **settings: bool
) -> tuple[Function, list[Any]]:
    """Returns a function for a platform that makes the calls, and the inputs as arrays."""
    module, tensors, _ = graph_of(calls)
    arrays = [jax.numpy.asarray(x.double().numpy()).astype(str(x.dtype).removeprefix("torch.")) for x in tensors]
    return Function(Interpreter(module, platform), settings=Settings(**settings), choose=choose), arrays


def targets(*calls: Call, platform: str = "cuda", **settings: bool) -> list[str]:
    """The names of the cuDNN calls in the program of these ops."""
    with jax.enable_x64(True):
        function, arrays = function_of(calls, platform, **settings)
        draws = [jax.random.key(0)] if function.draws_random else []
        traced = jax.jit(lambda *args: function(args[: len(arrays)], *args[len(arrays) :]).outputs).trace(*arrays, *draws)
        return re.findall(r"@__cudnn\$(\w+)", traced.lower(lowering_platforms=(platform,)).as_text())


def padding(rows: int = 16, columns: int = 16, dtype: torch.dtype = BF16) -> torch.Tensor:
    """A mask that hides the last columns of every row and head."""
    hidden = torch.zeros(2, 1, rows, columns, dtype=dtype)
    hidden[..., -3:] = -float("inf")
    return hidden.expand(2, 4, rows, columns)


CUDNN_CASES = {
    "flash": lambda: flash(*heads()),
    "causal": lambda: flash(*heads(), is_causal=True),
    "float16": lambda: flash(*heads(dtype=torch.float16)),
    "odd lengths": lambda: flash(*heads(15, 17)),
    "scale": lambda: flash(*heads(), scale=0.3),
    "grouped heads": lambda: flash(*heads(key_heads=2)),
    "size 128": lambda: flash(*heads(size=128)),
    "efficient": lambda: efficient(*heads()),
    "causal efficient": lambda: efficient(*heads(), is_causal=True),
    "cudnn": lambda: cudnn(*heads()),
}

MASKED_CUDNN_CASES = {
    "efficient": lambda: efficient(*heads(), padding()),
    "cudnn": lambda: cudnn(*heads(), padding()[:, :1]),
    "bool": lambda: efficient(*heads(), padding() == 0),
    "each head": lambda: efficient(*heads(12, 20), torch.randn(2, 4, 12, 20, dtype=BF16)),
}

OTHER_CASES = {
    "float32": lambda: flash(*heads(dtype=torch.float32)),
    "float64": lambda: efficient(*heads(dtype=torch.float64)),
    "size 12": lambda: efficient(*heads(size=12)),
    "size 136": lambda: flash(*heads(size=136)),
    "one row": lambda: flash(*heads(1, 16)),
    "causal, not square": lambda: efficient(*heads(12, 16), is_causal=True),
    "causal and a mask": lambda: efficient(*heads(), padding(), is_causal=True),
    "odd lengths and a mask": lambda: efficient(*heads(15, 16), padding(15, 16)),
    "another dtype's mask": lambda: efficient(*heads(), padding(dtype=torch.float32)),
    "negative scale": lambda: flash(*heads(), scale=-0.3),
    "infinite scale": lambda: flash(*heads(), scale=float("inf")),
    "no columns": lambda: efficient(*heads(16, 0)),
    "narrow values": lambda: efficient(*heads(size=16)[:2], heads(size=8)[2]),
}


@pytest.mark.parametrize("name", CUDNN_CASES)
def test_cudnn_is_chosen(name: str) -> None:
    call = CUDNN_CASES[name]()
    assert targets(call) == ["fmhaSoftmax"]
    assert targets(backward(call)) == ["fmhaSoftmaxBackward"]


@pytest.mark.parametrize("name", MASKED_CUDNN_CASES)
def test_cudnn_is_chosen_with_a_mask(name: str) -> None:
    call = MASKED_CUDNN_CASES[name]()
    assert targets(call) == ["fmhaScaleBiasSoftmax"]
    assert targets(backward(call)) == ["fmhaScaleBiasSoftmaxBackward"]


@pytest.mark.parametrize("name", OTHER_CASES)
def test_cudnn_is_not_chosen(name: str) -> None:
    call = OTHER_CASES[name]()
    assert targets(call) == []
    assert targets(backward(call)) == []


def test_cudnn_is_not_chosen_for_a_masks_gradient() -> None:
    assert targets(backward(efficient(*heads(), padding()), grad_mask=True)) == []


def test_cudnn_is_not_chosen_for_dropout() -> None:
    call = flash(*heads(), dropout_p=0.1)
    assert targets(call) == []
    assert targets(backward(call)) == []


def test_cudnn_is_chosen_for_the_overrideable_op() -> None:
    assert targets(overrideable(*heads())) == ["fmhaSoftmax"]


@pytest.mark.parametrize(("platform", "names"), [("cpu", ["torch", "xla"]), ("rocm", ["xla"]), ("tpu", ["pallas", "row_blocks", "xla"])])
def test_other_platforms_have_other_implementations(platform: str, names: list[str]) -> None:
    x = Operand((2, 4, 16, 64), np.dtype(jax.numpy.bfloat16))
    problem = AttentionProblem(x, x, x, None, True, 0.125, False, False, "cuda")
    for implementations in (ATTENTION, ATTENTION_GRADIENT):
        assert [implementation.name for implementation in implementations.available(problem, {})] == ["cudnn", "blocks", "xla"]
        available = [implementation.name for implementation in implementations.available(replace(problem, platform=platform), {})]
        assert [name for name in available if name != "fused_softmax"] == names
    fused = [
        implementation.name
        for implementation in ATTENTION.available(replace(problem, platform=platform), {})
        if implementation.name == "fused_softmax"
    ]
    assert fused == (["fused_softmax"] if platform == "tpu" else [])
    masked = replace(problem, platform=platform, mask=Operand((1, 1, 16, 16), np.dtype(bool)))
    assert "fused_softmax" not in [implementation.name for implementation in ATTENTION.available(masked, {})]


def test_cudnn_is_not_chosen_with_an_unknown_jaxlib(monkeypatch: pytest.MonkeyPatch) -> None:
    internals.jaxlib_release(monkeypatch, "0.99.0")
    assert targets(flash(*heads())) == []


def test_cudnn_gets_operands_in_their_memory_order() -> None:
    """The user's transpose and the transpose for the call cancel out."""

    def layouts(*tensors: torch.Tensor) -> list[str]:
        with jax.enable_x64(True):
            function, arrays = function_of([flash(*tensors)])
            text = jax.jit(lambda *args: function(args).outputs).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
        (line,) = [line for line in text.splitlines() if "custom_call @__cudnn" in line]
        return re.findall(r"tensor<(\d+x\d+x\d+x\d+)xbf16>", line)[:3]

    heads_inside = heads(12, 20)
    assert layouts(*heads_inside) == ["2x12x4x8", "2x20x4x8", "2x20x4x8"]
    assert layouts(*(x.contiguous() for x in heads_inside)) == ["2x4x12x8", "2x4x20x8", "2x4x20x8"]


@pytest.mark.sample(usual=2)
@pytest.mark.parametrize(
    "make", [CUDNN_CASES["causal"], CUDNN_CASES["grouped heads"], CUDNN_CASES["odd lengths"], *MASKED_CUDNN_CASES.values()]
)
def test_values(make: Callable[[], Call], monkeypatch: pytest.MonkeyPatch) -> None:
    """Output and gradient equal those of the implementation that materializes the scores."""
    simulated_cudnn.install(monkeypatch)

    def results(call: Call, choose: Chooser) -> list[torch.Tensor]:
        function, arrays = function_of([call], choose=choose)
        return [torch.from_numpy(np.array(x, np.float64)) for x in jax.jit(lambda *args: function(args).outputs)(*arrays)]

    with jax.enable_x64(True):
        call = make()
        by_cudnn, by_xla = results(call, choose_by_rules), results(call, choose_generic)
        torch.testing.assert_close(by_cudnn, by_xla, rtol=0.02, atol=0.02)
        gradient = backward(call, results=(by_xla[0].to(BF16), by_xla[1].float()))
        torch.testing.assert_close(results(gradient, choose_by_rules), results(gradient, choose_generic), rtol=0.03, atol=0.03)


# --- the implementation by blocks of rows


def choose_blocks(implementations: Implementations[Any], problem: Any) -> Implementation[Any]:
    return implementations.by_name["blocks"] if "blocks" in implementations.by_name else choose_by_rules(implementations, problem)


def operand(*shape: int, dtype: str = "bfloat16") -> Operand:
    return Operand(shape, np.dtype(dtype))


LARGE = operand(8, 12, 1024, 64)
WITH_DROPOUT = AttentionProblem(LARGE, LARGE, LARGE, None, False, 0.125, True, False, "cuda")


def chosen(problem: AttentionProblem) -> str:
    names = {implementations.choose(problem, {}).name for implementations in (ATTENTION, ATTENTION_GRADIENT)}
    assert len(names) == 1
    return names.pop()


def test_choice_of_blocks() -> None:
    assert chosen(WITH_DROPOUT) == "blocks"
    float32 = operand(8, 12, 1024, 64, dtype="float32")
    assert chosen(replace(WITH_DROPOUT, query=float32, key=float32, value=float32)) == "blocks"
    assert chosen(replace(WITH_DROPOUT, mask=operand(8, 1, 1, 1024), is_causal=True)) == "blocks"
    assert chosen(replace(WITH_DROPOUT, has_dropout=False)) == "cudnn"
    assert chosen(replace(WITH_DROPOUT, query=float32, key=float32, value=float32, has_dropout=False)) == "xla"
    assert chosen(replace(WITH_DROPOUT, wants_mask_gradient=True)) == "xla"
    assert chosen(replace(WITH_DROPOUT, platform="rocm")) == "xla"
    short = operand(8, 12, 400, 64)
    assert chosen(replace(WITH_DROPOUT, query=short, key=short, value=short)) == "xla"
    assert chosen(replace(WITH_DROPOUT, query=operand(64, 64, 1, 64), key=operand(64, 64, 9000, 64))) == "xla"


@pytest.mark.parametrize(
    ("batch", "rows", "columns", "expected_rows"), [(8, 1024, 1024, 32), (1, 16384, 16384, 16), (1, 1000, 64, 1000), (64, 100, 9000, 16)]
)
def test_rows_of_a_block(batch: int, rows: int, columns: int, expected_rows: int) -> None:
    problem = replace(WITH_DROPOUT, query=operand(batch, 12, rows, 64), key=operand(batch, 12, columns, 64))
    assert attention_implementations._block_rows(problem) == expected_rows


def test_large_programs_do_not_materialize_scores() -> None:
    shape = (4, 8, 1024, 64)
    q, k, v = (torch.empty(shape, dtype=BF16, device="meta").new_zeros(shape, device="cpu") for _ in range(3))
    forward = flash(q, k, v, dropout_p=0.1)
    for call in (forward, backward(forward)):
        with jax.enable_x64(True):
            function, arrays = function_of([call])
            draws = [jax.random.key(0)] if function.draws_random else []
            traced = jax.jit(lambda arrays, draws: function(arrays, *draws).outputs).trace(arrays, draws)  # noqa: B023
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert "x128x1024xf32" in text
        assert "1024x1024" not in text


BLOCK_CASES = {
    "dropout": lambda: flash(*heads(10, 10, key_heads=2, dtype=torch.float32), dropout_p=0.3, is_causal=True),
    "half": lambda: flash(*heads(8, 13)),
    "mask": lambda: efficient(*heads(10, 16, dtype=torch.float32), mask_with_a_hidden_row(10, 16)),
    "one row of a mask": lambda: efficient(*heads(10, 16, dtype=torch.float32), padding(1, 16, torch.float32).expand(2, 4, 10, 16)),
}


def mask_with_a_hidden_row(rows: int, columns: int) -> torch.Tensor:
    """A mask that differs between heads and rows. It hides all columns of one row."""
    mask = torch.randn(2, 4, rows, columns)
    mask[:, :, 5] = -float("inf")
    return mask


def results_by(choose: Chooser, call: Call) -> list[torch.Tensor]:
    function, arrays = function_of([call], choose=choose)
    draws = [jax.random.key(7)] if function.draws_random else []
    results = jax.jit(lambda arrays, draws: function(arrays, *draws).outputs, compiler_options=quick_compilation.options())(arrays, draws)
    return [torch.from_numpy(np.array(x).astype(np.float64)) for x in results]


@pytest.mark.sample(usual=1)
@pytest.mark.parametrize("name", BLOCK_CASES)
def test_values_in_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal to the results without blocks. A key drops the same weights in both, so the gradient may use the other implementation."""
    internals.rows_of_attention_blocks(monkeypatch, 4)
    call = BLOCK_CASES[name]()
    tolerance = 0.02 if call.args[0].dtype == BF16 else 1e-5
    with jax.enable_x64(True):
        by_blocks, by_xla = results_by(choose_blocks, call), results_by(choose_generic, call)
        torch.testing.assert_close(by_blocks, by_xla, rtol=tolerance, atol=tolerance)
        gradient = backward(call, results=(by_xla[0].to(call.args[0].dtype), by_xla[1].float()))
        torch.testing.assert_close(
            results_by(choose_blocks, gradient), results_by(choose_generic, gradient), rtol=tolerance, atol=tolerance
        )


def test_gradients_in_blocks_match_jaxs(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX differentiates the forward's blocks. The blocks of our gradient get the key that the forward returns."""
    internals.rows_of_attention_blocks(monkeypatch, 4)
    call = flash(*heads(10, 13, dtype=torch.float32), dropout_p=0.3)
    with jax.enable_x64(True):
        function, arrays = function_of([call], choose=choose_blocks)
        gradient, inputs = function_of([backward(call)], choose=choose_blocks)
        grad = inputs[0]

        def gradients(arrays: list[Any], key: Any) -> tuple[Any, Any]:
            (out, logsumexp, *rest), pull = jax.vjp(lambda *arrays: function(arrays, key).outputs, *arrays)
            zeros = [np.zeros(x.shape, jax.dtypes.float0 if x.dtype.kind in "iu" else x.dtype) for x in (logsumexp, *rest)]
            state = next(x for x in rest if x.dtype.kind in "iu").ravel()[0]
            seed = jax.lax.bitcast_convert_type(state, np.int64)
            return pull((grad, *zeros)), gradient([grad, *arrays, out, logsumexp, seed, *inputs[7:]]).outputs

        by_jax, by_blocks = jax.jit(gradients, compiler_options=quick_compilation.options())(arrays, jax.random.key(7))
    for mine, theirs in zip(by_blocks, by_jax, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
