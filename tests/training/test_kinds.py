"""What a lazy step does with an op follows from its schema and its tags."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dynaxla.training.kinds import Kind, drops, functional_of, kind_of, tensors_in, with_tensors, written_by

aten = torch.ops.aten
X, Y = torch.ones(2, 3), torch.zeros(2, 3)

KINDS: dict[Kind, list[Any]] = {
    Kind.NATIVE: [aten.sym_size.int, aten.is_same_size.default, torch.ops.prim.device.default],
    Kind.VIEW: [
        *(aten.view.default, aten.split.Tensor, aten._unsafe_view.default, aten.unsafe_split.Tensor),
        *(aten.lift_fresh.default, aten.t_.default, aten.detach.default),
    ],
    Kind.RANDOM: [aten.rand.default, aten.uniform_.default, aten.bernoulli.default, aten.randperm.default],
    # They ask for values, give other sizes by values, exchange memory, or are not ATen's.
    Kind.OUTSIDE: [
        *(aten.item.default, aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default),
        *(aten.set_.source_Tensor, aten.resize_.default, torch.ops.c10d.allreduce_.default, torch.ops.higher_order.cond),
    ],
    # Attention carries the tag of a draw even where it drops nothing.
    Kind.RECORD: [aten.add.Tensor, aten.add_.Tensor, aten.mul.out, aten.sort.default, aten._scaled_dot_product_flash_attention.default],
}


@pytest.mark.parametrize(("kind", "op"), [(kind, op) for kind, ops in KINDS.items() for op in ops], ids=str)
def test_kinds(kind: Kind, op: Any) -> None:
    assert kind_of(op) == kind


def test_what_an_op_writes_to() -> None:
    assert written_by(aten.add.Tensor, (X, Y), {}) == []
    for op, args, kwargs, wanted in [
        (aten.add_.Tensor, (X, Y), {}, [X]),
        (aten.mul.out, (X, X), {"out": Y}, [Y]),
        (aten._foreach_add_.List, ([X, Y], [Y, X]), {}, [X, Y]),
        (aten.native_batch_norm.out, (X, None, None, None, None, True, 0.1, 1e-5), {"out": Y, "save_mean": X, "save_invstd": X}, [Y, X, X]),
    ]:
        found = written_by(op, args, kwargs)
        assert len(found) == len(wanted), op
        assert all(one is other for one, other in zip(found, wanted, strict=True)), op


def test_running_statistics_are_written_to() -> None:
    mean, variance = torch.zeros(3), torch.ones(3)
    for op in (aten.native_batch_norm.default, aten.cudnn_batch_norm.default):
        for training in (True, False):
            found = written_by(op, (X, None, None, mean, variance, training, 0.1, 1e-5), {})
            assert [id(tensor) for tensor in found] == ([id(mean), id(variance)] if training else [])
    assert written_by(aten.native_batch_norm.default, (X, None, None, None, None, True, 0.1, 1e-5), {}) == []


def test_dropping_in_attention() -> None:
    op = aten.scaled_dot_product_attention.default
    assert not drops(op, (X, X, X), {})
    assert not drops(op, (X, X, X), {"dropout_p": 0.0})
    assert drops(op, (X, X, X), {"dropout_p": 0.5})
    assert drops(op, (X, X, X, None, 0.5), {})
    assert not drops(aten.add.Tensor, (X, X), {})


def test_views_in_place_have_a_functional_one() -> None:
    assert functional_of(aten.t_.default) is aten.t.default
    assert functional_of(aten.squeeze_.dim) is aten.squeeze.dim


def test_tensors_among_arguments() -> None:
    arguments = ([X, 1, (Y, None)], {"a": X, "b": "text"})
    assert list(map(id, tensors_in(arguments))) == [id(X), id(Y), id(X)]
    assert with_tensors(arguments, lambda tensor: "X" if tensor is X else "Y") == (["X", 1, ("Y", None)], {"a": "X", "b": "text"})
