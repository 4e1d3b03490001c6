"""Tests of `dynaxla export`: a model's inputs on the command line, and the exported model."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import typer
from torch import nn
from typer.testing import CliRunner

import dynaxla
from dynaxla import cli
from dynaxla.cli.export_command import InputSpec, compilation_result, example_sizes, load_model, parse_inputs
from dynaxla.errors import ArtifactError
from dynaxla.runtime.topologies import Topology


def test_inputs_and_their_dynamic_dimensions() -> None:
    inputs, largest = parse_inputs(["float32[batch, 3]", "int64[batch,length<=4]", "bool[]"])
    assert inputs == [InputSpec("float32", ("batch", 3)), InputSpec("int64", ("batch", "length")), InputSpec("bool", ())]
    assert largest == {"batch": None, "length": 4}
    assert example_sizes(inputs, largest) == {"batch": 5, "length": 4}


@pytest.mark.parametrize("wrong", ["float32", "float32[3", "float32[-1]", "float32[a b<]"])
def test_invalid_input_is_refused(wrong: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_inputs([wrong])


@pytest.mark.parametrize("wrong", ["math", "math:nothing", "no_such_module:f", "nowhere.py:f", "math:pi"])
def test_invalid_model_is_refused(wrong: str) -> None:
    with pytest.raises(typer.BadParameter):
        load_model(wrong)


def test_compilation_result_has_memory_for_a_topology() -> None:
    batch = torch.export.Dim("batch", max=512)
    model = dynaxla.export(nn.Linear(64, 512), (torch.zeros(5, 64),), dynamic_shapes=({0: batch},), platforms=("cpu",))
    topology = Topology("cpu", "stand-in", (jax.devices("cpu")[0],))
    result = compilation_result(model, topology, [InputSpec("float32", ("batch", 64))], {"batch": 512})
    assert result.startswith("compiles for one chip of stand-in, batch=512: 0.3 MiB of weights and inputs, 1.0 MiB of outputs")
    model = dynaxla.export(nn.Linear(64, 512), (torch.zeros(5, 64),), platforms=("tpu",))
    with pytest.raises(ArtifactError, match="is for tpu, not for cpu"):
        compilation_result(model, topology, [InputSpec("float32", (5, 64))], {})


def test_exported_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function makes the model, which is exported in evaluation mode. An existing directory and a missing platform are refused."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    (tmp_path / "net_to_export.py").write_text(
        "import torch\n"
        "def make():\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout(0.5))\n"
        "    model.load_state_dict(torch.load('weights.pt'))\n"
        "    return model\n"
    )
    monkeypatch.chdir(tmp_path)
    command = ["export", "net_to_export.py:make", "--input", "float32[batch<=8,4]", "--output", "saved", "--platforms", "cpu"]
    result = CliRunner().invoke(cli.app, command)
    assert result.exit_code == 0, result.output
    assert "takes input: float32[batch, 4]" in result.output
    x = torch.randn(5, 4)
    np.testing.assert_allclose(dynaxla.load(tmp_path / "saved").call(x.numpy()), model.eval()(x).detach(), rtol=1e-5, atol=1e-6)
    for arguments, message in (([], "exists already"), (["--overwrite", "--compile", "v5e:2x2"], "add --platform tpu")):
        refused = CliRunner().invoke(cli.app, [*command, *arguments])
        assert (refused.exit_code, message in refused.output) == (2, True), refused.output
