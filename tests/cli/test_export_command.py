"""`dynaxla export`: what the command line says of a model's inputs."""

from __future__ import annotations

import pytest
import typer

from dynaxla.cli.export_command import InputSpec, example_sizes, load_model, parse_inputs


def test_inputs_and_their_dynamic_dimensions() -> None:
    inputs, largest = parse_inputs(["float32[batch, 3]", "int64[batch,length<=4]", "bool[]"])
    assert inputs == [InputSpec("float32", ("batch", 3)), InputSpec("int64", ("batch", "length")), InputSpec("bool", ())]
    assert largest == {"batch": None, "length": 4}
    assert example_sizes(inputs, largest) == {"batch": 5, "length": 4}


@pytest.mark.parametrize("wrong", ["float32", "float32[3", "float32[-1]", "float32[a b<]"])
def test_what_is_no_tensor_is_refused(wrong: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_inputs([wrong])


@pytest.mark.parametrize("wrong", ["math", "math:nothing", "no_such_module:f", "nowhere.py:f", "math:pi"])
def test_what_makes_no_module_is_refused(wrong: str) -> None:
    with pytest.raises(typer.BadParameter):
        load_model(wrong)
