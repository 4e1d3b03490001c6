"""Assertions in graphs: a condition that depends on values raises at the call, any other when the graph is captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from support.comparisons.single_op import run_op

aten = torch.ops.aten

GOOD, BAD = torch.tensor(2.0), torch.tensor(0.0)
ASSERTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "x is zero": lambda x: aten._assert_async.msg(x, "x is zero"),
    "x must not be zero": lambda x: aten._functional_assert_async.msg(x, "x must not be zero", x.new_zeros(())),
}


@pytest.mark.parametrize("message", ASSERTIONS)
def test_values(message: str) -> None:
    assertion = ASSERTIONS[message]
    compiled = torch.compile(lambda x: (assertion(x), x + 1), backend="dynaxla", fullgraph=True, options={"fallback": "error"})
    assert compiled(GOOD)[1] == 3
    with pytest.raises(RuntimeError, match=message):
        assertion(BAD)
    with pytest.raises(RuntimeError, match=message):
        compiled(BAD)


def test_no_message() -> None:
    """AOTAutograd would remove the op, as if it had no effect."""
    run_op(aten._assert_async.default, GOOD, expected=())
    with pytest.raises(RuntimeError, match="single nonzero value"):
        run_op(aten._assert_async.default, BAD, expected=())


def test_one_element() -> None:
    compiled = torch.compile(lambda x: (aten._assert_async.msg(x, "no"), x + 1)[1], backend="dynaxla", fullgraph=True)
    with pytest.raises(RuntimeError, match="Boolean value of Tensor with 2 values is ambiguous"):
        compiled(torch.ones(2))


def test_numbers() -> None:
    run_op(aten._assert_scalar.default, 1, "no", expected=())
    with pytest.raises(RuntimeError, match="it is zero"):
        run_op(aten._assert_scalar.default, 0, "it is zero", expected=())


def test_metadata() -> None:
    """The metadata was checked when the graph was captured."""

    def function(x: torch.Tensor) -> torch.Tensor:
        aten._assert_tensor_metadata(x, dtype=torch.float32, device=torch.device("cpu"), layout=torch.strided)
        return x + 1

    compiled = torch.compile(function, backend="dynaxla", fullgraph=True, options={"fallback": "error"})
    assert compiled(torch.ones(2, 3)).sum() == 12
    with pytest.raises(Exception, match="Tensor dtype mismatch"):
        compiled(torch.ones(2, 3, dtype=torch.float64))
