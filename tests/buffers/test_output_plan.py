"""Tests of buffers/output_plan.py: the memory in which each result of a graph is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax import numpy as jnp
from torch._functorch._aot_autograd import descriptors
from torch.fx.experimental.proxy_tensor import make_fx

from dynaxla.buffers.output_plan import Buffer, Empty, FromBuffer, FromInput, NonTensor, Output, Storages, only_saved, plan_outputs
from dynaxla.lowering import SymbolValues, TensorSpec
from dynaxla.runtime.layout import Layout

CPU = torch.device("cpu")
F32 = torch.float32


def graph_of(function: Callable[..., Any], *inputs: torch.Tensor) -> torch.fx.Graph:
    return make_fx(function, tracing_mode="fake")(*inputs).graph


def planned(graph: torch.fx.Graph) -> tuple[list[Output], list[Buffer]]:
    return plan_outputs(graph.find_nodes(op="placeholder"), graph.output_node().args[0], Storages(graph), SymbolValues())


def several_views(x: torch.Tensor) -> list[Any]:
    y = x + 1
    return [y, y.t(), y[1:], y]


X, Z = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.complex64)
# The function, its input, the expected outputs, and the shapes of the expected buffers.
CASES: dict[str, tuple[Callable[[torch.Tensor], list[Any]], torch.Tensor, list[Output], list[tuple[int, ...]]]] = {
    "the input": (lambda x: [x], X, [FromInput(0, (2, 3), (3, 1), 0, F32, True)], []),
    "views of the input": (
        lambda x: [x.t(), x[1:], x[:0]],
        X,
        [
            FromInput(0, (3, 2), (1, 3), 0, F32, False),
            FromInput(0, (1, 3), (3, 1), 3, F32, False),
            FromInput(0, (0, 3), (3, 1), 0, F32, False),
        ],
        [],
    ),
    "views of an input that starts late": (
        lambda x: [x[1:], x.view(torch.uint8)],
        torch.zeros(4, 3)[1:3],
        [FromInput(0, (1, 3), (3, 1), 3, F32, False), FromInput(0, (2, 12), (12, 1), 0, torch.uint8, False)],
        [],
    ),
    "the input as another dtype": (
        lambda x: [x.view(torch.int32)[1:], x.view(torch.uint8)],
        X,
        [FromInput(0, (1, 3), (3, 1), 3, torch.int32, False), FromInput(0, (2, 12), (12, 1), 0, torch.uint8, False)],
        [],
    ),
    "the input's conjugate": (lambda x: [x.conj()], Z, [FromInput(0, (2, 3), (3, 1), 0, Z.dtype, False, is_conj=True)], []),
    "two results": (
        lambda x: [x + 1, x.sum(0)],
        X,
        [FromBuffer(0, (2, 3), (3, 1), 0, F32, CPU), FromBuffer(1, (3,), (1,), 0, F32, CPU)],
        [(2, 3), (3,)],
    ),
    "several with one memory": (
        several_views,
        X,
        [
            FromBuffer(0, (2, 3), (3, 1), 0, F32, CPU),
            FromBuffer(0, (3, 2), (1, 3), 0, F32, CPU),
            FromBuffer(0, (1, 3), (3, 1), 3, F32, CPU),
            FromBuffer(0, (2, 3), (3, 1), 0, F32, CPU),
        ],
        [(2, 3)],
    ),
    "a part": (lambda x: [(x + 1)[1:]], X, [FromBuffer(0, (1, 3), (3, 1), 0, F32, CPU)], [(1, 3)]),
    "a part with gaps": (lambda x: [(x + 1)[:, 1:]], X, [FromBuffer(0, (2, 2), (3, 1), 1, F32, CPU)], [(2, 3)]),
    "a transposed result": (lambda x: [(x + 1).t()], X, [FromBuffer(0, (3, 2), (1, 3), 0, F32, CPU)], [(2, 3)]),
    "an expanded result": (lambda x: [(x + 1).expand(4, 2, 3)], X, [FromBuffer(0, (4, 2, 3), (0, 3, 1), 0, F32, CPU)], [(1, 2, 3)]),
    "an empty result": (lambda x: [(x + 1)[:0]], X, [Empty(TensorSpec((0, 3), (3, 1), F32, CPU))], []),
    "no tensors": (lambda x: [None, 3, x.shape[0]], X, [NonTensor(None, None), NonTensor(None, 3), NonTensor(None, 2)], []),
}


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_buffers(name: str) -> None:
    function, x, outputs, shapes = CASES[name]
    found, buffers = planned(graph_of(function, x))
    assert found == outputs
    assert [buffer.shape for buffer in buffers] == shapes


@pytest.mark.parametrize(
    ("shape", "stride", "offset", "is_conj", "is_neg"),
    [
        ((2, 3), (3, 1), 0, False, False),
        ((2, 3), (1, 2), 0, True, False),
        ((2, 3), (3, 1), 5, False, True),
        ((2, 3), (1, 2), 4, False, False),
        ((2, 3), (8, 2), 0, False, False),
        ((2, 3), (2, 5), 3, True, True),
    ],
    ids=str,
)
def test_buffer_equals_eager_modes_storage(
    shape: tuple[int, ...], stride: tuple[int, ...], offset: int, is_conj: bool, is_neg: bool
) -> None:
    layout = Layout.of(shape, stride)
    spec = TensorSpec(shape, stride, torch.complex64, CPU)
    buffer = Buffer(None, spec, layout, not layout.dense or offset > 0, is_conj, is_neg, offset)
    value = torch.randn(shape, dtype=torch.complex64)
    storage = torch.zeros(100, dtype=torch.complex64)
    stored_value = value.conj() if is_conj else value
    storage.as_strided(shape, stride, offset).copy_(-stored_value if is_neg else stored_value)
    with jax.enable_x64(True):
        packed = np.asarray(buffer.pack(jnp.asarray(value.numpy())))
    assert packed.shape == buffer.shape
    assert np.array_equal(packed.ravel(), storage[: packed.size].numpy())
    for computed in (value, value.t().contiguous().t(), value.conj().resolve_conj().conj(), value.expand(1, 2, 3)[0]):
        by_torch = buffer.pack_tensor(computed)
        assert (by_torch.is_contiguous(), by_torch.is_conj(), by_torch.is_neg()) == (True, False, False)
        assert np.array_equal(by_torch.numpy(), packed)


def test_only_saved_values_may_have_another_layout() -> None:
    def forward(x: torch.Tensor) -> list[torch.Tensor]:
        plain = x + 1
        saved_and_returned = x * 2
        saved = x * 3
        scattered = (x * 4)[:, 1:]
        return [plain, saved_and_returned, saved_and_returned, saved, scattered, x]

    graph = graph_of(forward, X)
    saved_output = descriptors.SavedForBackwardsAOTOutput
    plain = descriptors.PlainAOTOutput
    graph.output_node().meta["desc"] = [plain(0), plain(1), saved_output(0), saved_output(1), saved_output(2), saved_output(3)]
    outputs, buffers = planned(graph)
    (index,) = only_saved(outputs, buffers, graph.output_node())
    assert outputs[3].buffer == index
    del graph.output_node().meta["desc"]
    assert only_saved(outputs, buffers, graph.output_node()) == []
