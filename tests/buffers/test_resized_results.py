"""Small results can be resized, as in eager mode, because torch allocates their memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dynaxla.buffers.addresses import _MAX_COPIED_BYTES

CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "cat(out=)": lambda y: torch.cat([torch.ones(40), torch.zeros(50)], out=y),
    "resize_": lambda y: y.resize_(500).fill_(1),
    "resize_as_": lambda y: y.resize_as_(torch.empty(30, 30)).fill_(2),
    "masked_select(out=)": lambda y: torch.masked_select(torch.arange(90.0), torch.ones(90, dtype=torch.bool), out=y),
    "freed": lambda y: y.untyped_storage().resize_(0),
}


def f(x: torch.Tensor) -> torch.Tensor:
    return (x * 2 + 1).sin()


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized:UserWarning")
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("size", [1, 12, _MAX_COPIED_BYTES // 4], ids=["one", "few", "most"])
def test_result_can_be_resized(name: str, size: int) -> None:
    x = torch.arange(float(size))
    compiled = torch.compile(f, backend="dynaxla")
    with torch.no_grad():
        for _ in range(2):
            result, expected = compiled(x), f(x)
            torch.testing.assert_close(result, expected)
            CHANGES[name](result)
            CHANGES[name](expected)
            assert result.shape == expected.shape
            assert result.untyped_storage().nbytes() == expected.untyped_storage().nbytes()
            if name != "freed":
                torch.testing.assert_close(result, expected)


def test_resizing_after_a_graph_break_and_in_gradients() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x * 3
        torch._dynamo.graph_break()
        return y.resize_(7).fill_(1) + 1

    with torch.no_grad():
        assert torch.compile(broken, backend="dynaxla")(torch.ones(2)).tolist() == [2.0] * 7
    net = torch.nn.Linear(3, 2)
    torch.compile(net, backend="dynaxla")(torch.ones(1, 3)).sum().backward()
    assert net.weight.grad is not None
    net.weight.grad.resize_(20)


def test_views_of_a_result_share_its_memory() -> None:
    def views(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x + 1
        return y, y[1:]

    with torch.no_grad():
        y, part = torch.compile(views, backend="dynaxla")(torch.zeros(4))
        y.mul_(3)
        assert part.tolist() == [3, 3, 3]
        y.resize_(100)
        y.fill_(5)
        assert part.tolist() == [5, 5, 5]
    reference = weakref.ref(part.untyped_storage())
    del y, part
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.bfloat16, torch.float64, torch.complex64])
def test_results_of_all_element_sizes_and_strides(dtype: torch.dtype) -> None:
    x = torch.arange(24).reshape(2, 3, 4).to(dtype)
    with torch.no_grad():
        for function in (lambda x: x.clone(), lambda x: x.transpose(0, 2).clone(), lambda x: x[:0].clone()):
            torch._dynamo.reset()
            result, expected = torch.compile(function, backend="dynaxla")(x), function(x)
            assert torch.equal(result, expected)
            assert result.stride() == expected.stride()


def test_callers_dispatch_mode_sees_no_allocation() -> None:
    ops: list[str] = []

    class OpRecorder(TorchDispatchMode):
        @classmethod
        def ignore_compile_internals(cls) -> bool:
            return True

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            ops.append(str(func))
            return func(*args, **(kwargs or {}))

    compiled = torch.compile(f, backend="dynaxla")
    with torch.no_grad():
        compiled(torch.ones(3))
        with OpRecorder():
            compiled(torch.ones(3))
    assert ops == ["aten.ones.default"], "the mode sees the op that makes the argument, and no allocation"
