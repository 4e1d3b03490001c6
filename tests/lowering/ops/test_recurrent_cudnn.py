"""cuDNN's recurrent networks, which have a kernel for GPUs alone, compared with torch's networks on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from commands.lower_everywhere.capture import of_function
from commands.lower_everywhere.lower import calls, stablehlo
from dynaxla.errors import UnsupportedOp
from dynaxla.lowering import Settings
from support import internals
from support.comparisons.compare import assert_equal
from support.comparisons.gradients import leaf
from support.comparisons.single_op import run_op

aten = torch.ops.aten
INPUT, HIDDEN, TIME, BATCH = 3, 4, 5, 2
MODES = {"RNN_RELU": 0, "RNN_TANH": 1, "LSTM": 2, "GRU": 3}


@dataclass
class NetworkCase:
    """A network of torch's, its inputs, and the corresponding arguments of cuDNN's op."""

    net: Any
    x: Any
    hx: torch.Tensor
    cx: torch.Tensor | None

    @property
    def weights(self) -> list[torch.Tensor]:
        return [weight.detach() for weight in self.net._flat_weights]

    @property
    def operands(self) -> list[torch.Tensor]:
        data = self.x.data if isinstance(self.x, PackedSequence) else self.x
        return [data, self.hx, *([] if self.cx is None else [self.cx]), *self.weights]

    def by_torch(self) -> list[torch.Tensor]:
        states = self.hx if self.cx is None else (self.hx, self.cx)
        output, last = self.net(self.x, states)
        output = output.data if isinstance(output, PackedSequence) else output
        return [output, *([last] if self.cx is None else last)]

    def __post_init__(self) -> None:
        """Reads the network's attributes, because TorchDynamo does not trace through networks."""
        net, is_packed = self.net, isinstance(self.x, PackedSequence)
        self.sizes = self.x.batch_sizes.tolist() if is_packed else []
        self.per_layer = len(net._flat_weights) // (net.num_layers * (1 + net.bidirectional))
        self.network_settings = (MODES[net.mode], HIDDEN, net.proj_size, net.num_layers, net.batch_first and not is_packed)
        self.bidirectional = net.bidirectional

    def call(self, data: torch.Tensor, *rest: torch.Tensor, train: bool = True, dropout: float = 0.0) -> tuple[Any, ...]:
        """The op's arguments for these operands."""
        hx, cx, weights = (rest[0], None, rest[1:]) if self.cx is None else (rest[0], rest[1], rest[2:])
        buffer = torch.cat([weight.detach().flatten() for weight in weights])
        call_settings = (dropout, train, self.bidirectional, self.sizes, None)
        return data, list(weights), self.per_layer, buffer, hx, cx, *self.network_settings, *call_settings


def network_case(kind: str, is_packed: bool = False, dtype: torch.dtype = torch.float32, **settings: Any) -> NetworkCase:
    mode = {"nonlinearity": kind.removeprefix("RNN_").lower()} if kind.startswith("RNN") else {}
    net = getattr(nn, kind.partition("_")[0])(INPUT, HIDDEN, **mode, **settings).to(dtype)
    x = torch.randn(BATCH, TIME, INPUT, dtype=dtype) if net.batch_first else torch.randn(TIME, BATCH, INPUT, dtype=dtype)
    count = net.num_layers * (1 + net.bidirectional)
    hx, cx = torch.randn(count, BATCH, net.proj_size or HIDDEN, dtype=dtype), torch.randn(count, BATCH, HIDDEN, dtype=dtype)
    if is_packed:
        x = pack_padded_sequence(x, torch.tensor([TIME, 2]), batch_first=net.batch_first)
    return NetworkCase(net, x, hx, cx if kind == "LSTM" else None)


CASES = {
    "relu": lambda: network_case("RNN_RELU", num_layers=2),
    "tanh, both ways": lambda: network_case("RNN_TANH", bidirectional=True),
    "lstm": lambda: network_case("LSTM"),
    "lstm, both ways, batch first": lambda: network_case("LSTM", num_layers=2, bidirectional=True, batch_first=True),
    "lstm, no bias, packed": lambda: network_case("LSTM", bias=False, bidirectional=True, is_packed=True),
    "lstm, projection": lambda: network_case("LSTM", proj_size=2, num_layers=2, bidirectional=True),
    "lstm, projection, no bias": lambda: network_case("LSTM", proj_size=2, bias=False),
    "gru, float64": lambda: network_case("GRU", num_layers=2, batch_first=True, dtype=torch.float64),
    "gru, packed": lambda: network_case("GRU", num_layers=2, bidirectional=True, is_packed=True, batch_first=True),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("name", CASES)
def test_values(name: str) -> None:
    case = CASES[name]()
    results = run_op(aten._cudnn_rnn.default, *case.call(*case.operands, train=False))
    expected = [result.detach() for result in case.by_torch()]
    count = len(expected)
    assert_equal(list(results[:count]), [result.contiguous() for result in expected], tolerance=(1e-5, 1e-6))
    assert results[2].shape == (case.cx.shape if case.cx is not None else (0,))
    assert results[3].shape == (0,)
    assert torch.equal(results[4], torch.cat([weight.flatten() for weight in case.weights]))


@pytest.mark.sample(usual=2)
@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str) -> None:
    """Traced by AOTAutograd, with rnn_gradients instead of torch's backward op. The first and the last result are used."""
    case = CASES[name]()
    result_indices = (0, 2) if case.cx is not None else (0, 1)

    def function(*operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = torch.ops.aten._cudnn_rnn(*case.call(*operands))
        return tuple(results[index] for index in result_indices)

    mine = [leaf(operand) for operand in case.operands]
    actual = torch.compile(function, backend="dynaxla", fullgraph=True, options={"fallback": "error"})(*mine)

    theirs = [leaf(operand) for operand in case.operands]
    data, hx, *rest = theirs
    x = PackedSequence(data, case.x.batch_sizes) if isinstance(case.x, PackedSequence) else data
    cx = rest.pop(0) if case.cx is not None else None
    names = [name for name, _ in case.net.named_parameters()]
    output, last = torch.func.functional_call(case.net, dict(zip(names, rest, strict=True)), (x, hx if cx is None else (hx, cx)))
    output = output.data if isinstance(output, PackedSequence) else output
    expected = (output, last if cx is None else last[1])

    assert_equal(list(actual), list(expected), tolerance=(1e-5, 1e-6))
    cotangents = [torch.randn_like(result) for result in expected]
    torch.autograd.backward(expected, cotangents)
    torch.autograd.backward(actual, cotangents)
    assert_equal([operand.grad for operand in mine], [operand.grad for operand in theirs], tolerance=(1e-4, 1e-5))


def test_gradient_of_the_input_alone() -> None:
    """The states and the weights need no gradients."""
    case = network_case("LSTM")
    _, *fixed = case.operands

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._cudnn_rnn(*case.call(x, *fixed))[0]

    x, y = leaf(case.x), leaf(case.x)
    torch.compile(function, backend="dynaxla", fullgraph=True, options={"fallback": "error"})(x).square().sum().backward()
    case.net(y, (case.hx, case.cx))[0].square().sum().backward()
    assert_equal(x.grad, y.grad, tolerance=(1e-4, 1e-5))


def test_half_types_are_computed_in_float32() -> None:
    case = network_case("LSTM")
    halves = [operand.bfloat16() for operand in case.operands]
    results = run_op(aten._cudnn_rnn.default, *case.call(*halves, train=False))
    wide = run_op(aten._cudnn_rnn.default, *case.call(*[half.float() for half in halves], train=False))
    assert_equal([item.dtype for item in results[:3]], [torch.bfloat16] * 3)
    assert_equal([item.float() for item in results[:3]], [item.bfloat16().float() for item in wide[:3]], tolerance=(1e-2, 1e-3))


def test_dropout_without_effect() -> None:
    two_layers, one_layer = network_case("LSTM", num_layers=2), network_case("LSTM")
    for case, train in ((two_layers, False), (one_layer, True)):
        results = run_op(aten._cudnn_rnn.default, *case.call(*case.operands, dropout=0.5, train=train))
        assert_equal(results[0], case.by_torch()[0].detach(), tolerance=(1e-5, 1e-6))


def test_cudnns_random_state_raises() -> None:
    case = network_case("LSTM", num_layers=2)
    *operands, _ = case.call(*case.operands, dropout=0.5)
    with pytest.raises(UnsupportedOp, match="cuDNN's own random numbers"):
        run_op(aten._cudnn_rnn.default, *operands, torch.zeros(8, dtype=torch.uint8))


def run_by_layers(case: NetworkCase, operands: list[torch.Tensor], masks: torch.Tensor, dropout: float) -> torch.Tensor:
    """Runs each layer of the case as a network of torch's, with dropout by `masks` between the layers."""
    data, hx, *rest = operands
    cx = rest.pop(0) if case.cx is not None else None
    directions = 1 + case.bidirectional
    x = (
        PackedSequence(data, case.x.batch_sizes)
        if isinstance(case.x, PackedSequence)
        else data.transpose(0, 1)
        if case.network_settings[4]
        else data
    )
    for layer in range(case.net.num_layers):
        names = [name for name, _ in case.net.named_parameters() if name.endswith((f"_l{layer}", f"_l{layer}_reverse"))]
        parameters = dict(zip([name.replace(f"_l{layer}", "_l0") for name in names], rest[: len(names)], strict=True))
        rest = rest[len(names) :]
        width = case.net.input_size if layer == 0 else masks.shape[-1]
        net = type(case.net)(width, HIDDEN, bidirectional=case.bidirectional)
        states = slice(layer * directions, (layer + 1) * directions)
        x, _ = torch.func.functional_call(net, parameters, (x, hx[states] if cx is None else (hx[states], cx[states])))
        if layer < len(masks):
            values, sizes = pad_packed_sequence(x) if isinstance(x, PackedSequence) else (x, None)
            values = torch.where(masks[layer], values / (1 - dropout), 0)
            x = values if sizes is None else pack_padded_sequence(values, sizes)
    return x.data if isinstance(x, PackedSequence) else x.transpose(0, 1) if case.network_settings[4] else x


DROPOUT_CASES = {
    "lstm, batch first": lambda: network_case("LSTM", num_layers=3, batch_first=True),
    "gru, both ways, packed": lambda: network_case("GRU", num_layers=2, bidirectional=True, is_packed=True),
}


@pytest.mark.sample(usual=1)
@pytest.mark.parametrize("name", DROPOUT_CASES)
def test_dropout_between_layers(name: str) -> None:
    """The reserve holds the masks. Forward and backward have the same dropout."""
    case = DROPOUT_CASES[name]()

    def function(*operands: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        results = torch.ops.aten._cudnn_rnn(*case.call(*operands, dropout=0.4))
        return results[0], results[3]

    compiled = torch.compile(function, backend="dynaxla", fullgraph=True, options={"fallback": "error"})
    mine, theirs = ([leaf(operand) for operand in case.operands] for _ in range(2))
    actual, masks = compiled(*mine)
    expected = run_by_layers(case, theirs, masks, 0.4)
    assert_equal(actual, expected, tolerance=(1e-5, 1e-6))
    cotangent = torch.randn_like(expected)
    expected.backward(cotangent)
    actual.backward(cotangent)
    assert_equal([operand.grad for operand in mine], [operand.grad for operand in theirs], tolerance=(1e-4, 1e-5))
    _, again = compiled(*mine)
    assert 0 < masks.float().mean() < 1
    assert not torch.equal(masks, again)


def test_long_sequence_is_a_loop_on_cuda() -> None:
    """The program does not grow with the number of steps, and has no custom calls."""
    case = network_case("LSTM")
    sizes = []
    for time in (5, 50):
        operands = [torch.randn(time, BATCH, INPUT), *case.operands[1:]]
        (graph,) = of_function(lambda *operands: torch.ops.aten._cudnn_rnn(*case.call(*operands))[:3], operands, "cuda")
        text = stablehlo(graph, "cuda")
        assert calls(text) == set()
        sizes.append(text.count("stablehlo."))
    assert sizes[0] == sizes[1]


def test_precision_is_that_of_recurrent_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the precision of convolutions nor that of matrix products."""
    case = network_case("LSTM")
    counts = []
    for settings in (Settings(matmul_tf32=True, convolution_tf32=True), Settings(recurrent_tf32=True)):
        internals.torch_settings(monkeypatch, settings)
        (graph,) = of_function(lambda *operands: torch.ops.aten._cudnn_rnn(*case.call(*operands))[:3], case.operands, "cuda")
        text = stablehlo(graph, "cuda")
        counts.append((text.count("stablehlo.dot_general"), text.count("[HIGHEST, HIGHEST]")))
    assert counts == [(2, 2), (2, 0)]
