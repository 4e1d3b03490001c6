"""Tests of the doctor: it reports a working environment as good, and finds planted faults."""

from __future__ import annotations

import io
from importlib import metadata

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from dynaxla import cli, doctor
from dynaxla.doctor import Status
from dynaxla.lowering.cpu import onednn_support


def statuses(findings: list[doctor.Finding]) -> list[Status]:
    return [finding.status for finding in findings]


def test_this_environment_is_not_broken() -> None:
    findings = doctor.examine()
    assert Status.BROKEN not in statuses(findings), findings
    values = {finding.what: finding.value for finding in findings}
    assert values["torch"] == metadata.version("torch")
    assert values["x * 2 + 1 on cpu"] == "compiled, and the result is right"
    assert values["zero-copy on cpu"] == "the input was shared with XLA"
    assert any(finding.topic == "fast paths" for finding in findings)
    assert all(finding.fix for finding in findings if finding.status in (Status.DOUBT, Status.BROKEN))


@pytest.mark.parametrize(
    ("version", "status"),
    [
        (None, Status.BROKEN),
        ("2.9.1", Status.BROKEN),
        ("2.13.0+cpu", Status.GOOD),
        ("2.11.0", Status.GOOD),
        ("2.99.0.dev20261101", Status.DOUBT),
    ],
)
def test_versions_of_torch(version: str | None, status: Status) -> None:
    assert doctor.check_version("torch", version).status is status


def test_versions_of_jax_jaxlib_and_python() -> None:
    assert doctor.check_version("jax", "0.9.2").status is Status.BROKEN
    assert doctor.check_version("jax", "0.10.2").status is Status.GOOD
    for release in onednn_support.KNOWN:
        assert doctor.check_version("jax", ".".join(map(str, release))).status is Status.GOOD
    assert doctor.check_jaxlib("0.10.2", "0.10.1").status is Status.GOOD
    assert doctor.check_jaxlib("0.10.2", "0.9.0").status is Status.DOUBT
    assert doctor.check_jaxlib("0.10.2", None).status is Status.BROKEN
    assert doctor.check_python((3, 9)).status is Status.BROKEN


def test_wrong_sums_of_jax_are_noted() -> None:
    """Sums of products of reshaped operands were wrong with jaxlib 0.10.2 on a processor with AVX-512."""
    shape = (1, 2, 64, 8)
    assert doctor.examine_jax_defaults(lambda q, k: np.full(shape, 8)) == []
    (finding,) = doctor.examine_jax_defaults(lambda q, k: np.full(shape, np.nan))
    assert finding.status is Status.NOTE
    assert "XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type" in finding.fix


def test_missing_entry_point_is_broken() -> None:
    assert statuses(doctor.examine_backends(["inductor"], [])) == [Status.BROKEN] * 3
    uninstalled = doctor.examine_backends(["inductor", "dynaxla_auto", "dynaxla_retrace"], ["dynaxla_retrace"])
    assert statuses(uninstalled) == [Status.BROKEN, Status.GOOD, Status.GOOD]
    assert "pip install" in uninstalled[0].fix
    assert "restart" in doctor.examine_backends([], ["dynaxla", "dynaxla_retrace"])[0].fix


def test_missing_and_gated_fast_paths() -> None:
    findings = doctor.examine_fast_paths({"import": "missing", "alias": "gated: TypeError", "export": "live"}, ["torch._C._gone"])
    assert statuses(findings) == [Status.BROKEN, Status.DOUBT, Status.DOUBT, Status.GOOD]
    assert f"torch 2.11 to {doctor.TESTED['torch']}" in findings[0].fix


@pytest.mark.parametrize(
    ("variables", "cuda", "status"),
    [
        ({}, True, Status.GOOD),
        ({"TORCHDYNAMO_DISABLE": "1"}, False, Status.BROKEN),
        ({"TORCHDYNAMO_DISABLE": "0"}, False, Status.GOOD),
        ({"JAX_PLATFORMS": "cuda"}, True, Status.DOUBT),
        ({"JAX_PLATFORMS": "cuda,cpu"}, True, Status.NOTE),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}, True, Status.DOUBT),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}, False, Status.NOTE),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, True, Status.NOTE),
        ({"XLA_CLIENT_MEM_FRACTION": "0.5"}, True, Status.DOUBT),
        ({"XLA_FLAGS": "--xla_dump_to=x"}, False, Status.NOTE),
    ],
)
def test_environment_variables(variables: dict[str, str], cuda: bool, status: Status) -> None:
    assert doctor.examine_environment(variables, cuda)[0].status is status


def test_misaligned_memory() -> None:
    memory = torch.zeros(64)  # torch's own allocator aligns it
    assert statuses(doctor.examine_allocator([memory, memory[16:]])) == [Status.GOOD]
    finding = doctor.examine_allocator([memory, memory[4:], memory[8:]])[0]
    assert (finding.status, finding.value) == (Status.DOUBT, "2 of 3 tensors misaligned")


def test_failing_and_wrong_backend_is_broken() -> None:
    def failing(*_: object) -> None:
        raise ValueError("no")

    def wrong(module: torch.fx.GraphModule, _: object) -> object:
        return lambda *args: [result + 1 for result in module(*args)]

    assert doctor.examine_programs(failing)[0].status is Status.BROKEN
    finding = doctor.examine_programs(wrong)[0]
    assert (finding.status, finding.value) == (Status.BROKEN, "compiled, and the result is wrong")


def test_steps_are_examined_after_a_failing_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> object:
        raise RuntimeError("no program")

    findings = doctor.examine_programs(failing)
    assert statuses(findings) == [Status.BROKEN, Status.GOOD, Status.GOOD, Status.GOOD]
    assert [finding.what for finding in findings[1:]] == [
        "JAX alone (cpu)", "torch's memory handed to XLA (cpu)", "XLA's memory handed to torch (cpu)"
    ]  # fmt: skip
    monkeypatch.setattr(doctor.transfer, "import_tensor", failing)
    monkeypatch.setattr(doctor.transfer, "export_array", lambda *_: torch.zeros(8))
    jax_alone, import_step, export_step = doctor.examine_steps(torch.device("cpu"))
    assert jax_alone.status is Status.GOOD
    assert (import_step.status, import_step.value) == (Status.BROKEN, "RuntimeError: no program")
    assert (export_step.status, export_step.value) == (Status.BROKEN, "gives 0.0 instead of 28.0")


def test_examine_gpu_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The finding depends on the build of torch."""

    def jax_platform(name: str) -> doctor.Finding:
        return doctor.Finding("devices", f"jax sees {name}", "nothing", Status.BROKEN, "a plugin")

    monkeypatch.setattr(doctor, "_jax_platform", jax_platform)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for version, value in ((None, "not a CUDA build"), ("13.0", "CUDA 13.0 finds no GPU")):
        monkeypatch.setattr(torch.version, "cuda", version)
        findings = doctor.examine_gpu()
        assert [(finding.what, finding.value) for finding in findings] == [("torch and a GPU", value), ("jax sees cuda", "nothing")]
        assert statuses(findings) == [Status.BROKEN] * 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert doctor.examine_gpu() == []


def test_missing_gpu_is_broken_only_with_option_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("versions", "devices", "backends", "fast_paths", "kernels", "jax_defaults", "environment", "allocator", "programs"):
        monkeypatch.setattr(doctor, f"examine_{name}", lambda: [])
    monkeypatch.setattr(doctor, "examine_gpu", lambda: [doctor.Finding("devices", "a GPU", "none", Status.BROKEN)])
    for arguments, code in (([], 0), (["--gpu"], 1)):
        assert CliRunner().invoke(cli.app, ["doctor", *arguments]).exit_code == code


def test_failing_examination_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def examine_devices() -> list[doctor.Finding]:
        raise RuntimeError("driver")

    monkeypatch.setattr(doctor, "examine_devices", examine_devices)
    assert any(finding.topic == "devices" and finding.status is Status.BROKEN for finding in doctor.examine())


def test_brackets_are_shown() -> None:
    text = io.StringIO()
    doctor.show(
        [doctor.Finding("check", "jax cuda", "no [plugin]", Status.BROKEN, "pip install 'jax[cuda13]'")], Console(file=text, width=120)
    )
    assert "no [plugin]" in text.getvalue()
    assert "pip install 'jax[cuda13]'" in text.getvalue()


def test_libtpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._libtpu() == []
    monkeypatch.setattr(doctor.importlib.metadata, "version", {"libtpu": "0.0.42"}.__getitem__)
    (finding,) = doctor._libtpu()
    assert (finding.status, finding.what, finding.value) == (doctor.Status.NOTE, "libtpu 0.0.42", "JAX's default backend is cpu")
    monkeypatch.setattr(doctor.jax, "default_backend", lambda: "tpu")
    (finding,) = doctor._libtpu()
    assert finding.status == doctor.Status.GOOD
