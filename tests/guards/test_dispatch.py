"""Tests of guards/dispatch.py: the arguments that ops write to, with and without a declaration in the schema."""

from __future__ import annotations

from typing import Any

import torch

from dynaxla.guards.dispatch import written_arguments

aten = torch.ops.aten
X, Y = torch.ones(2, 3), torch.zeros(2, 3)


def test_arguments_that_are_written() -> None:
    assert written_arguments(aten.add.Tensor, (X, Y), {}) == {}
    for op, args, kwargs, expected in [
        (aten.add_.Tensor, (X, Y), {}, {"self": X}),
        (aten.mul.out, (X, X), {"out": Y}, {"out": Y}),
        (aten._foreach_add_.List, ([X, Y], [Y, X]), {}, {"self": [X, Y]}),
        (
            *(aten.native_batch_norm.out, (X, None, None, None, None, True, 0.1, 1e-5)),
            *({"out": Y, "save_mean": X, "save_invstd": X}, {"out": Y, "save_mean": X, "save_invstd": X}),
        ),
    ]:
        found = written_arguments(op, args, kwargs)
        assert found.keys() == expected.keys(), op
        assert all(_ids(found[name]) == _ids(expected[name]) for name in expected), op


def test_running_statistics_are_written() -> None:
    mean, variance = torch.zeros(3), torch.ones(3)
    for op in (aten.native_batch_norm.default, aten.cudnn_batch_norm.default):
        for training in (True, False):
            found = written_arguments(op, (X, None, None, mean, variance, training, 0.1, 1e-5), {})
            assert _ids(list(found.values())) == ([id(mean), id(variance)] if training else [])
    assert not any(written_arguments(aten.native_batch_norm.default, (X, None, None, None, None, True, 0.1, 1e-5), {}).values())


def _ids(value: Any) -> list[int]:
    return [id(item) for item in (value if isinstance(value, list) else [value])]
