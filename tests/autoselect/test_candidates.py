"""Tests of engines: backends of torch.compile by name, copies of graphs for them, and their failures."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dynaxla.autoselect import candidates
from dynaxla.errors import OptionError
from support.fakes import wrong_engines


def test_check_names() -> None:
    candidates.check_names(["dynaxla", "inductor", "eager"])
    with wrong_engines.planted(planted_right=wrong_engines.ENGINES["planted_right"]):
        candidates.check_names(["dynaxla", "planted_right"])
    with pytest.raises(OptionError, match=r"'planted_right' cannot be an engine; the valid names are: (.|\n)*register_backend"):
        candidates.check_names(["dynaxla", "planted_right"])


def test_change_of_a_copied_graph_leaves_the_original() -> None:
    def backend(module: Any, inputs: Any) -> Any:
        before = module.print_readable(print_output=False)
        copy = candidates.copy_graph(module)
        assert copy.print_readable(print_output=False) == before
        for submodule in copy.modules():
            if isinstance(submodule, torch.fx.GraphModule):
                for node in submodule.graph.nodes:
                    if node.op == "call_function":
                        node.target = torch.neg
        assert module.print_readable(print_output=False) == before
        return module.forward

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,)) * 2

    x = torch.rand(3)
    torch.testing.assert_close(torch.compile(function, backend=backend)(x), x.sin() * 2)


def test_failure_becomes_a_reason_except_errors_for_torch_dynamo() -> None:
    def fail(error: Exception) -> Any:
        def compile() -> Any:
            raise error

        return compile

    assert candidates.compiled_or_reason(fail(ValueError("too large\nby far"))) == "it cannot compile the graph: ValueError: too large"
    for error in (torch._dynamo.exc.RestartAnalysis(), OptionError("no")):
        with pytest.raises(type(error)):
            candidates.compiled_or_reason(fail(error))
