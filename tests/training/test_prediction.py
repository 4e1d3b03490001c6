"""What an op gives is known before it runs: it must be what the op really gives, or nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dynaxla.training.kinds import tensors_in
from dynaxla.training.prediction import Unpredictable, predict
from dynaxla.training.traces import Given, New, geometry

aten = torch.ops.aten


def predicted(op: Any, *args: Any, **kwargs: Any) -> tuple[Any, int]:
    return predict(op, args, kwargs, list(tensors_in((args, kwargs))))


def new(tensor: torch.Tensor) -> New:
    return New(geometry(tensor), tensor.device, tensor.untyped_storage().nbytes())


X = torch.randn(4, 6)
CALLS: dict[str, tuple[Any, ...]] = {
    "transposed operands": (aten.add.Tensor, X.t(), X.t()),
    "a part of a storage": (aten.mul.Tensor, X[1:, ::2], 2.0),
    "channels last": (aten.relu.default, torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)),
    "a conjugate": (aten.sum.default, torch.randn(3, dtype=torch.complex64).conj()),
    "a negative view": (aten.clone.default, torch.randn(3, dtype=torch.complex64).conj().imag),
    "no tensors": (aten.arange.default, 5),
    "nothing in it": (aten.mm.default, torch.ones(0, 3), torch.ones(3, 2)),
}


@pytest.mark.parametrize("name", CALLS)
def test_one_new_tensor(name: str) -> None:
    op, *args = CALLS[name]
    assert predicted(op, *args) == (new(op(*args)), 1)


def test_several_results() -> None:
    values, places = aten.sort.default(X, 0)
    assert predicted(aten.sort.default, X, 0) == ([new(values), new(places)], 2)


def test_arguments_that_come_back() -> None:
    y = X.clone()
    assert predicted(aten.add_.Tensor, y, X) == (Given(0), 0)
    assert predicted(aten.mul.out, X, X, out=y) == (Given(2), 0)
    assert torch.equal(y, X)  # nothing has run


def test_one_tensor_for_two_results_is_two() -> None:
    def twice(x: torch.Tensor) -> list[torch.Tensor]:
        return [x + 1] * 2

    assert predicted(twice, X) == ([new(X), new(X)], 2)


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.t.default, (X,)),
        (aten.nonzero.default, (X,)),
        (aten.mm.default, (X, X)),
        (lambda x, y: torch.mul(x, x, out=y), (X, torch.empty(0))),
        (aten.to_sparse.default, (X,)),
        (lambda x: (x + 1)[1:], (X,)),
        (lambda x: ((y := x + 1), y[0]), (X,)),
    ],
    ids=[
        "a view",
        "a size of values",
        "what torch refuses",
        "an out that grows",
        "not strided",
        "a part of a storage",
        "two in one storage",
    ],
)
def test_what_cannot_be_foreseen(op: Any, args: Any) -> None:
    with pytest.raises(Unpredictable):
        predicted(op, *args)
