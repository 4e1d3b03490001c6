"""`dynaxla export`: what the command line says of a model's inputs."""

from __future__ import annotations

import jax
import pytest
import torch
import typer
from torch import nn

import dynaxla
from dynaxla.cli.export_command import InputSpec, compilation_result, example_sizes, load_model, parse_inputs
from dynaxla.errors import ArtifactError
from dynaxla.runtime.topologies import Topology


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


def test_the_memory_of_a_model_on_a_topology() -> None:
    batch = torch.export.Dim("batch", max=512)
    model = dynaxla.export(nn.Linear(64, 512), (torch.zeros(5, 64),), dynamic_shapes=({0: batch},), platforms=("cpu",))
    topology = Topology("cpu", "stand-in", (jax.devices("cpu")[0],))
    found = compilation_result(model, topology, [InputSpec("float32", ("batch", 64))], {"batch": 512})
    assert found.startswith("compiles for one chip of stand-in, batch=512: 0.3 MiB of weights and inputs, 1.0 MiB of outputs")
    model = dynaxla.export(nn.Linear(64, 512), (torch.zeros(5, 64),), platforms=("tpu",))
    with pytest.raises(ArtifactError, match="is for tpu, not for cpu"):
        compilation_result(model, topology, [InputSpec("float32", (5, 64))], {})
