"""Metadata with concrete numbers, also of tensors with symbolic sizes."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from dynaxla.lowering.metadata import SymbolValues, TensorSpec

CPU = torch.device("cpu")


def test_symbols_get_their_values() -> None:
    """Also expressions of symbols: strides, offsets, computed sizes."""
    dynamic = StatelessSymbolicContext([DimDynamic.DYNAMIC] * 2)
    x = torch.empty(5, 7)
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        fake = mode.from_tensor(x, symbolic_context=dynamic)
        rows, columns = fake.shape
        assert isinstance(rows, torch.SymInt)
        assert isinstance(columns, torch.SymInt)
        symbols = SymbolValues({rows.node.expr: 11, columns.node.expr: 3})
        view = fake.t()[1:]
        both = torch.cat([fake, fake])
    assert symbols.spec(fake) == TensorSpec((11, 3), (3, 1), torch.float32, CPU)
    assert symbols.spec(view) == TensorSpec((2, 11), (1, 3), torch.float32, CPU, 1)
    assert symbols.spec(both).shape == (22, 3)
    assert symbols.concrete([fake, rows * columns, (None, 2.5, "text")]) == (symbols.spec(fake), 33, (None, 2.5, "text"))
    assert SymbolValues({rows.node.expr: 2, columns.node.expr: 3}).spec(both).shape == (4, 3), "each SymbolValues has its own values"


def test_sparse_tensor_has_no_strides() -> None:
    assert SymbolValues().spec(torch.eye(3).to_sparse()) == TensorSpec((3, 3), (), torch.float32, CPU)


def test_order_and_description() -> None:
    symbols = SymbolValues()
    channels_last = symbols.spec(torch.empty(2, 3, 4, 5, dtype=torch.bfloat16).to(memory_format=torch.channels_last))
    assert channels_last.order == (0, 2, 3, 1)
    assert (str(channels_last), channels_last.jax_dtype.name) == ("bf16[2, 3, 4, 5]", "bfloat16")
    assert symbols.spec(torch.empty(3, 1).expand(3, 4)).order == (0, 1)
    assert symbols.spec(torch.empty(())).order == ()
