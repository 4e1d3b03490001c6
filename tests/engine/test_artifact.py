"""Tests of engine/artifact.py: files of `torch.compile(...).aot_compile` run in another process without a capture, or are refused there."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cases.exported_functions import CASES, Case, compiled, gelus, made
from dynaxla.engine import artifact
from dynaxla.engine.artifact import Artifact, load
from dynaxla.errors import ArtifactError, OptionError, UnsupportedTensor
from dynaxla.observe import metrics
from support.paths import TESTS
from support.processes.time_limits import PATIENCE
from support.releases import not_in_oldest

pytestmark = not_in_oldest("aot_compile")
x = torch.randn(8, 8)


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sets Inductor's cache directory, to which torch also writes pickled functions."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))
    metrics.reset()
    yield
    metrics.reset()


@pytest.mark.usefixtures("quick_xla")
def test_another_process_runs_saved_functions(tmp_path: Path) -> None:
    for name, case in CASES.items():
        owner = made(case)
        function = compiled(case, owner)
        if case.trains:  # the file has a backward program only after a backward pass has run
            case.run(made(case), function)
        function.save_compiled_function(str(tmp_path / name))
    command = [sys.executable, "-c", f"from cases import exported_functions; exported_functions.main({str(tmp_path)!r})"]
    process = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert process.returncode == 0, process.stderr
    report = json.loads(process.stdout.splitlines()[-1])
    assert {name: found["wrong"] for name, found in report.items() if found["wrong"]} == {}
    assert all(found["calls"] and not found["capture"] for found in report.values()), report
    # Programs that call torch's kernels are traced again, from the graph in the file.
    assert {name for name, found in report.items() if found["trace"]} <= {"torch's kernel", "training with statistics", "frozen"}, report


def save(case: Case, path: Path) -> Any:
    function = compiled(case, made(case))
    function.save_compiled_function(str(path))
    return function


def load_function(path: Path) -> Any:
    with path.open("rb") as file:
        return torch.compiler.load_compiled_function(file, f_globals=globals())


def test_file_of_another_machine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(CASES["function"], tmp_path / "file")
    with torch.no_grad():
        torch.testing.assert_close(load_function(tmp_path / "file")(x), gelus(x))
    for module, name, message in (
        (artifact.machine, "versions", "made with torch other, and this process has"),
        (artifact.machine, "processor_facts", "made with the processor"),
    ):
        with monkeypatch.context() as patch:
            value = ("0.1.0", "other", "1", "1") if name == "versions" else "other"
            patch.setattr(module, name, lambda value=value: value)
            content = Artifact({"nodes": []}, artifact.Options(), artifact.Bundle()).content()
        with pytest.raises(ArtifactError, match=message):
            load(content)


def test_damaged_bytes_are_refused() -> None:
    content = Artifact({"nodes": []}, artifact.Options(), artifact.Bundle({("programs", "a"): b"code"})).content()
    assert load(content).content() == content
    for damaged in (content[:-1], content[:-1] + b"f", b"", b"\0" + content[1:]):
        with pytest.raises(ArtifactError, match="damaged"):
            load(damaged)


def test_pickle_has_no_classes_of_dynaxla() -> None:
    """A pickle names no class of dynaxla, only the function that reads the bytes."""
    content = pickle.dumps(Artifact({"nodes": []}, artifact.Options(), artifact.Bundle()))
    assert content.count(b"dynaxla.") == 1
    assert b"dynaxla.engine.artifact\x94\x8c\x04load" in content


@pytest.mark.parametrize(
    ("function", "options", "error", "message"),
    [
        (gelus, {"tune": True}, OptionError, "tune"),
        (lambda x: x.nonzero(), {}, ArtifactError, "has dynamic sizes"),
        (lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), {}, ArtifactError, "cannot be written to a file"),
    ],
    ids=["tune", "nonzero", "cond"],
)
def test_unsupported_functions_are_refused(function: Any, options: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        torch.compile(function, fullgraph=True, backend="dynaxla", options=options).aot_compile(((x,), {}))


def test_dynamic_sizes_are_refused() -> None:
    dynamic = torch.randn(5, 4)
    torch._dynamo.mark_dynamic(dynamic, 0)
    with pytest.raises(ArtifactError, match="depends on dynamic sizes"):
        torch.compile(torch.sin, fullgraph=True, backend="dynaxla").aot_compile(((dynamic,), {}))


def test_retracing_and_disabled_cache_are_refused() -> None:
    with pytest.raises(OptionError, match="traces at every call"):
        torch.compile(gelus, backend="dynaxla_retrace", fullgraph=True).aot_compile(((x,), {}))
    with torch._functorch.config.patch(enable_autograd_cache=False), pytest.raises(OptionError, match="needs AOTAutograd's cache"):
        torch.compile(gelus, backend="dynaxla", fullgraph=True).aot_compile(((x,), {}))


def shift_in_place(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x * y


def test_overlapping_inputs_are_refused_before_any_write(tmp_path: Path) -> None:
    """TorchDynamo's guards accept them, and in eager mode both inputs would change."""
    function = torch.compile(shift_in_place, fullgraph=True, backend="dynaxla").aot_compile(((torch.ones(4), torch.ones(4)), {}))
    function.save_compiled_function(str(tmp_path / "file"))
    for run in (function, load_function(tmp_path / "file")):
        whole = torch.arange(6.0)
        for first in (True, False):
            with pytest.raises((UnsupportedTensor, RuntimeError), match=r"shares memory|GuardManager"):
                run(whole[:4], whole[2:])
            assert whole.equal(torch.arange(6.0))
            if first:
                separate, factors = torch.ones(4), torch.full((4,), 2.0)
                torch.testing.assert_close(run(separate, factors), torch.full((4,), 4.0))
                assert separate.equal(torch.full((4,), 2.0))


def test_error_names_an_unregistered_op() -> None:
    nodes = [["placeholder", "x", "x", None, ["tuple"], ["dict", [], []], None, None, None, ""]]
    nodes.append(["call_function", "y", "nobody.twice.default", None, ["tuple", ["node", 0]], ["dict", [], []], None, None, None, ""])
    content = Artifact(
        {"name": "graph", "phase": "inference", "static": [], "remade": [], "nodes": nodes}, artifact.Options(), artifact.Bundle()
    ).content()
    with pytest.raises(ArtifactError, match=r"an op that is not registered(.|\n)*import"):
        load(content).post_compile()


def test_torchs_cache_distinguishes_options_and_backends() -> None:
    """With force_autograd_cache, a graph that was compiled by another backend or with other options is a miss."""

    def run(backend: str, **options: Any) -> dict[str, int]:
        torch._dynamo.reset()
        metrics.reset()
        torch._dynamo.utils.counters.clear()
        arguments = {"options": options} if options else {}
        torch.testing.assert_close(torch.compile(gelus, backend=backend, **arguments)(x), gelus(x))
        counters = dict(torch._dynamo.utils.counters["aot_autograd"])
        return {name: counters.get(f"autograd_cache_{name}", 0) for name in ("hit", "miss", "saved")}

    miss, hit = {"hit": 0, "miss": 1, "saved": 1}, {"hit": 1, "miss": 0, "saved": 0}
    with torch._functorch.config.patch(force_autograd_cache=True, bundled_autograd_cache=True), torch.no_grad():
        assert run("aot_eager") == miss
        assert run("dynaxla") == miss
        assert run("dynaxla", exact_rng=True) == miss
        assert run("dynaxla") == hit
        assert metrics.snapshot().get("trace", 0) == 0
        assert metrics.snapshot()["calls"] == 1
