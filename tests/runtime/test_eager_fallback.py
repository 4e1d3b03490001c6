"""Tests of compiled functions with fake tensors: as in eager mode, results are fake, or eager mode's error is raised."""

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
def test_model_created_and_called_under_a_fake_mode(backend: str, before: bool) -> None:
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
def test_fake_tensors_with_real_parameters(options: dict[str, Any]) -> None:
    """If the mode allows it, results are fake; otherwise eager mode's error is raised. Later calls with real tensors work."""
    compiled = torch.compile(net, backend="dynaxla", options=options)
    x = torch.randn(2, 4)
    with torch.no_grad():
        for is_second_call in (False, True):
            torch.testing.assert_close(compiled(x), net(x))
            for mode in (FakeTensorMode(allow_non_fake_inputs=True), FakeTensorMode()):
                fake = mode.from_tensor(x)
                if mode.allow_non_fake_inputs:
                    assert isinstance(compiled(fake), FakeTensor)
                    with mode:
                        assert isinstance(compiled(fake), FakeTensor)
                        assert isinstance(compiled(x), FakeTensor)
                else:
                    for argument in (fake, x):
                        with pytest.raises(AssertionError, match="convert all Tensors to FakeTensors"), mode:
                            compiled(argument)
            torch.testing.assert_close(compiled(x), net(x), msg=f"second call: {is_second_call}")


def test_split_graph_under_a_fake_mode() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.nonzero(x * 2)

    compiled = torch.compile(function, backend="dynaxla", fullgraph=True)
    x = torch.ones(3)
    assert torch.equal(compiled(x), function(x))
    with FakeTensorMode(), pytest.raises(DynamicOutputShapeException):
        compiled(torch.ones(3))
    assert torch.equal(compiled(x), function(x))


def test_make_fx_traces_the_ops_of_a_compiled_graph() -> None:
    from dynaxla.backend import compile_graph
    from dynaxla.config import Options

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        return [x.sin() + 1]

    x = torch.ones(3)
    with torch.no_grad():
        compiled = compile_graph(make_fx(function)(x), [x], Options())
        torch.testing.assert_close(compiled(x), function(x))
        traced = make_fx(lambda x: compiled(x))(x)
    assert [node.target for node in traced.graph.nodes if node.op == "call_function"] == [
        torch.ops.aten.sin.default,
        torch.ops.aten.add.Tensor,
    ]


def test_is_being_traced_under_modes() -> None:
    for mode, is_traced in ((FakeTensorMode(), True), (FunctionalTensorMode(), True), (TorchDispatchMode(), False)):
        with mode, TorchDispatchMode():
            assert eager_fallback.is_being_traced() == is_traced
    assert not eager_fallback.is_being_traced()


def test_run_is_below_autograd_and_clears_the_arguments() -> None:
    args = [torch.ones(3, requires_grad=True)]
    (result,) = eager_fallback.run(make_fx(lambda x: [x.sin()])(torch.ones(3)), args)
    assert args == []
    assert not result.requires_grad
