"""`dynaxla export`: what the command line says of a model's inputs."""

from __future__ import annotations

import pytest
import typer

from dynaxla.cli.export_command import Input, examples, loaded, parsed


def test_inputs_and_their_dynamic_dimensions() -> None:
    inputs, largest = parsed(["float32[batch, 3]", "int64[batch,length<=4]", "bool[]"])
    assert inputs == [Input("float32", ("batch", 3)), Input("int64", ("batch", "length")), Input("bool", ())]
    assert largest == {"batch": None, "length": 4}
    assert examples(inputs, largest) == {"batch": 5, "length": 4}


@pytest.mark.parametrize("wrong", ["float32", "float32[3", "float32[-1]", "float32[a b<]"])
def test_what_is_no_tensor_is_refused(wrong: str) -> None:
    with pytest.raises(typer.BadParameter):
        parsed([wrong])


@pytest.mark.parametrize("wrong", ["math", "math:nothing", "no_such_module:f", "nowhere.py:f", "math:pi"])
def test_what_makes_no_module_is_refused(wrong: str) -> None:
    with pytest.raises(typer.BadParameter):
        loaded(wrong)
