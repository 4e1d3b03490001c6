"""Compiled functions among fake tensors: as in eager mode, fake results or eager's error; never a crash."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from dynaxla.observe import metrics
from dynaxla.runtime import eager_fallback

net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())
OPTIONS: list[dict[str, Any]] = [{}, {"freeze": True}]


@pytest.mark.parametrize("backend", ["dynaxla", "dynaxla_retrace"])
@pytest.mark.parametrize("before", [False, True], ids=["first", "after a real call"])
def test_a_model_made_and_called_under_a_fake_mode(backend: str, before: bool) -> None:
    if before:
        torch.compile(net, backend=backend)(torch.ones(2, 4))
    with FakeTensorMode():
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())
        compiled = torch.compile(model, backend=backend)
        for size in (2, 3):
            y = compiled(torch.randn(size, 4))
            assert isinstance(y, FakeTensor)
            assert y.shape == (size, 3)
        y.sum().backward()
        assert isinstance(model[0].weight.grad, FakeTensor)
        assert model[0].weight.grad.shape == (3, 4)
    assert metrics.snapshot().get("by_torch", 0) > 0


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_fake_tensors_beside_real_parameters(options: dict[str, Any]) -> None:
    """With a mode that allows it the results are fake, else eager's error comes; the program goes on with real ones."""
    compiled = torch.compile(net, backend="dynaxla", options=options)
    x = torch.randn(2, 4)
    with torch.no_grad():
        for again in (False, True):
            torch.testing.assert_close(compiled(x), net(x))
            for mode in (FakeTensorMode(allow_non_fake_inputs=True), FakeTensorMode()):
                fake = mode.from_tensor(x)
                if mode.allow_non_fake_inputs:
                    assert isinstance(compiled(fake), FakeTensor)
                    with mode:
                        assert isinstance(compiled(fake), FakeTensor)
                        assert isinstance(compiled(x), FakeTensor)
                else:
                    for given in (fake, x):
                        with pytest.raises(AssertionError, match="convert all Tensors to FakeTensors"), mode:
                            compiled(given)
            torch.testing.assert_close(compiled(x), net(x), msg=f"again: {again}")


def test_a_split_graph_and_a_custom_op() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.nonzero(x * 2)

    compiled = torch.compile(function, backend="dynaxla", fullgraph=True)
    x = torch.ones(3)
    assert torch.equal(compiled(x), function(x))
    with FakeTensorMode(), pytest.raises(DynamicOutputShapeException):
        compiled(torch.ones(3))
    assert torch.equal(compiled(x), function(x))


def test_make_fx_sees_the_ops() -> None:
    from dynaxla.backend import compile_graph
    from dynaxla.config import Options

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        return [x.sin() + 1]

    x = torch.ones(3)
    with torch.no_grad():
        compiled = compile_graph(make_fx(function)(x), [x], Options())
        torch.testing.assert_close(compiled(x), function(x))
        seen = make_fx(lambda x: compiled(x))(x)
    assert [node.target for node in seen.graph.nodes if node.op == "call_function"] == [
        torch.ops.aten.sin.default,
        torch.ops.aten.add.Tensor,
    ]


def test_who_looks_at_the_ops() -> None:
    for mode, looks in ((FakeTensorMode(), True), (FunctionalTensorMode(), True), (TorchDispatchMode(), False)):
        with mode, TorchDispatchMode():
            assert eager_fallback.is_being_traced() == looks
    assert not eager_fallback.is_being_traced()


def test_torch_runs_the_graph_below_autograd_and_keeps_no_argument() -> None:
    args = [torch.ones(3, requires_grad=True)]
    (result,) = eager_fallback.run(make_fx(lambda x: [x.sin()])(torch.ones(3)), args)
    assert args == []
    assert not result.requires_grad
