"""Tests that run the blocks of each page as one program, and check the results that the page states. `make docs-test` runs all pages."""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import os
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest
import typer
from benchmarks.__main__ import app as benchmarks

import dynaxla
from commands import page_blocks
from dynaxla.cli import app
from support.paths import ROOT
from support.releases import IS_OLDEST
from support.timing import quick_compilation

PAGES = ROOT / "docs"
# By page: assertions after the page's blocks.
CHECKS = {
    "../README": """
assert y.shape == (3, 64, 256)
assert loss.device.type == "jax" and dynaxla.metrics.counter_value("CachedCompile") >= 6
assert x.grad.shape == x.shape
assert jax_fn(params, jnp.ones((2, 64))).shape == (2, 8)
""",
    "start": """
assert losses[-1] < losses[0]
assert dynaxla.metrics.counter_value("aten::linalg_ldl_factor_ex") == 1
""",
    "training": """
assert losses[-1] < losses[0]
assert len(seen) == 4 and seen[-1] < seen[0]
assert dynaxla.metrics.snapshot()["eager_steps"] >= 4
""",
    "generation": """
assert generated.shape == (2, 17)
""",
    "sizes": """
assert counts["graphs"] == 1 and counts["compile"] < 8
torch.testing.assert_close(early.shape, later.shape)
""",
    "freezing": "",
    "deployment": """
assert loaded(*inputs).shape == (4, 8)
""",
    "device": """
assert loss.device.type == "jax" and model.weight.grad.device.type == "jax"
assert dynaxla.metrics.snapshot()["lazy_ops"] > 0
torch.testing.assert_close(compiled(x).cpu(), model.cpu()(x.cpu()))
""",
    "tpus": """
assert y.device.type == "jax" and model.weight.grad.shape == (64, 64)
""",
    "gpus": """
assert model.weight.grad is not None
""",
    "looking-inside": """
assert list(__import__("pathlib").Path("graphs").rglob("*"))
""",
    "options": """
torch.testing.assert_close(step(torch.ones(2)), torch.full((2,), 2.0))
""",
    "troubleshooting": "",
    "architecture": "",
    "add-an-op": """
factors = torch.compile(lambda x: torch.ops.mylib.scale(x, 3.0), backend="dynaxla", options={"fallback": "error"})
torch.testing.assert_close(factors(torch.ones(2)), torch.full((2,), 3.0))
""",
    "torch-xla": """
assert len(losses) == 12 and sum(losses[6:]) < sum(losses[:6])  # of the same batches
assert prediction.shape == (16, 1)
""",
    "inductor": """
torch.testing.assert_close(by_inductor(x), model(x))
assert losses[-1] < losses[0]
""",
    "export": """
assert result.shape == (5, 4)
assert {path.name for path in __import__("pathlib").Path("linear").iterdir()} == {"program.mlirbc", "weights.safetensors", "manifest.json"}
""",
    "explain": """
assert __import__("pathlib").Path("explain.html").read_text().startswith("<!DOCTYPE html>")
assert costliest.line.source in ("hidden = F.gelu(self.first(x))", "return self.second(hidden)")
assert not optimizer.state and model.weight.grad is None
""",
    "engines": """
torch.testing.assert_close(result, model(x), rtol=1e-4, atol=1e-5)
assert verdict["chosen"] in {"dynaxla", "inductor", "eager"}
torch.testing.assert_close(total, torch.ones(3).sin() + 1)
assert "it is wrong: the results differ" in verdicts()[-1]["left_out"]["reversed"]
__import__("dynaxla").observe.engine_decisions.reset()
""",
    "torch-in-jax": """
import numpy as np
assert np.allclose(predicted, model(torch.from_numpy(np.array(x))).detach(), atol=1e-6)
assert np.allclose(batch[0], predicted, atol=1e-6)
loss(model(torch.from_numpy(np.array(x))), torch.from_numpy(np.array(y))).backward()
assert all(np.allclose(gradient[name], parameter.grad, atol=1e-5) for name, parameter in model.named_parameters())
assert np.allclose(scaled, 2 * x)
""",
    "jax-in-torch": """
torch.testing.assert_close(attended, torch.softmax(rotated(x, angles) @ x.T, -1))
cos, sin = angles.cos(), angles.sin()
torch.testing.assert_close(x.grad, torch.cat([cos + sin, cos - sin], -1))
expected = torch.ones(4, 4, requires_grad=True)
torch.nn.functional.silu(expected @ expected.T).sum().backward()
torch.testing.assert_close(torch.tensor(slope.tolist()), expected.grad)
""",
    "many-devices": """
assert losses[0] > losses[1] > losses[2]
weight = model[0].weight
assert planned.memory[0].arguments < (2 * 4096 * 16384 + 8192 * 4096) * 4 // 64
assert {item.axes for item in planned.collectives} <= {"fsdp", "tp"}
placed = __import__("jax").sharding.NamedSharding(mesh.jax, __import__("jax").sharding.PartitionSpec(*plan.specs.get("0.weight", ())))
for tensor in (weight, optimizer.state[weight]["exp_avg"]):
    assert dynaxla.sharding.sharding_of(tensor).is_equivalent_to(placed, 2)
assert plan.trial.memory <= 15_000
(memory,) = dynaxla.sharding.report(step, x, y).memory
assert memory.total <= 15_000
""",
    "many-processes": """
assert list(losses) == [*range(1, 9)] and losses[8] < losses[1]
assert sorted(path.name for path in Path("checkpoints").iterdir()) == ["2", "4", "6", "8"]
""",
    "torchax": """
torch.testing.assert_close(jnp.square(prediction - ys).mean().item(), torch_losses[0], rtol=1e-4, atol=1e-6)
torch.testing.assert_close(torch.tensor(losses), torch.tensor(torch_losses), rtol=1e-4, atol=1e-6)
assert losses[-1] < losses[0]
assert array.unsafe_buffer_pointer() == x.data_ptr() == tensor.data_ptr()
torch.testing.assert_close(torch.tensor(unit.tolist()), torch.nn.functional.normalize(x, dim=-1))
torch.testing.assert_close(torch.tensor(each.tolist()).mean(0), torch.tensor(gradient.tolist()))
with torch.no_grad():
    hidden = x
    for one in layers:
        hidden = one(hidden)
torch.testing.assert_close(torch.tensor(deep(stacked, xs).tolist()), hidden, rtol=1e-4, atol=1e-5)
torch.testing.assert_close(power(x), x**4)
torch.testing.assert_close(torch.tensor(held.tolist()), model.cpu()(x).detach(), rtol=1e-4, atol=1e-5)
""",
}


# By page: a text that the program prints.
SAYS = {
    "start": "Counter: calls\n  Value: 6\nCounter: capture",
    "training": "the step needs the value of a tensor",
    "freezing": "option freeze is for inference",
    "troubleshooting": "no lowering for shop.discount.default",
}
# By page: code before the page's blocks. transformers may find a torchvision of another build of torch, and a page's op must exist.
BEFORE = {
    "generation": "from dynaxla.bench.suites import import_package\nimport_package('transformers')",
    "architecture": "import torch",
    "add-an-op": """
import torch
torch.library.define("mylib::scale", "(Tensor x, float factor) -> Tensor")
torch.library.register_fake("mylib::scale")(lambda x, factor: torch.empty_like(x))
""",
}
# By page: environment variables of the program, and arguments of Python before the program's name.
VARIABLES = {
    "many-devices": {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
    "many-processes": {"OMP_NUM_THREADS": "1", "DYNAXLA_CACHE": ""},
}
RUNNERS = {
    "explain": [],  # the page shows lines of a file
    "many-processes": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
}
# Pages that take longer than the others; `make docs-test` runs them.
SLOW = {
    *("../README", "training", "looking-inside", "generation", "sizes", "deployment", "device", "torch-xla", "inductor"),
    *("jax-in-torch", "many-devices", "many-processes", "torchax"),
}
NEEDS = {"generation": "transformers"}
# Pages whose last blocks are quoted from the sources: the file of each of these blocks.
OPS = "src/dynaxla/lowering/ops"
QUOTED = {"add-an-op": [f"{OPS}/scans.py", "tests/lowering/table/reductions.py", f"{OPS}/convolution.py"]}
# Features that pages use and torch 2.11 does not have, with a description of its restriction.
NOT_IN_OLDEST = {
    "device.enable()": "no storages that can be made without memory, which the device needs",
    "aot_compile": "no aot_compile",
    '"spmd"': "graphs of parallel layers with DTensors and plain tensors, which XLA does not partition",
}
# Pages whose blocks are separate programs, which tests/docs/test_integrations.py runs.
ELSEWHERE = {"integrations"}


def blocks_of(page: str) -> list[str]:
    """Returns the blocks of a page's program."""
    return page_blocks.blocks_of(PAGES / f"{page}.md")


def all_pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(PAGES.rglob("*.md"))]


# torch.export's own copy of a tree of arguments causes this warning (torch 2.13).
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
@pytest.mark.usefixtures("quick_xla")
@pytest.mark.sample(usual=7)
@pytest.mark.parametrize("page", [pytest.param(page, marks=pytest.mark.slow) if page in SLOW else page for page in CHECKS])
def test_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page in NEEDS:
        pytest.importorskip(NEEDS[page])
    monkeypatch.chdir(tmp_path)
    # A fixed seed, since pages check that a loss of random weights and data falls. The page itself must import the name torch.
    seed = "__import__('torch').manual_seed(0)"
    blocks = blocks_of(page)
    program = "\n".join([seed, BEFORE.get(page, ""), *blocks[: len(blocks) - len(QUOTED.get(page, ()))], CHECKS[page]])
    if IS_OLDEST and (lacking := next((lacking for name, lacking in NOT_IN_OLDEST.items() if name in program), "")):
        pytest.skip(f"torch 2.11 has {lacking}")
    # Pages with changes that a process cannot undo, or with counts of a process, run in a separate process.
    if page in RUNNERS or any(name in program for name in ("device.enable()", "metrics.", "_import(", "dynaxla.lowers(")):
        (tmp_path / "page.py").write_text(program)
        environment = os.environ | {"XLA_FLAGS": quick_compilation.flags()} | VARIABLES.get(page, {})
        command = [sys.executable, *RUNNERS.get(page, []), "page.py"]
        process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert process.returncode == 0, process.stderr
        printed = process.stdout
    else:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            module = types.ModuleType("page")
            monkeypatch.setitem(sys.modules, "page", module)  # TorchDynamo looks here for the globals of functions
            exec(compile(program, f"{page}.md", "exec"), vars(module))
        printed = out.getvalue()
    assert SAYS.get(page, "") in printed


@pytest.mark.parametrize("page", sorted(SLOW))
def test_blocks_are_programs(page: str) -> None:
    """Checks the syntax of all blocks, and that the names of dynaxla exist, also for pages that only `make docs-test` runs."""
    tree = ast.parse("\n".join(blocks_of(page)))
    names = [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "dynaxla"]
    assert [name for name in names if not hasattr(dynaxla, name)] == []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dynaxla"):
            module = importlib.import_module(str(node.module))
            assert [item.name for item in node.names if not hasattr(module, item.name)] == []


def test_all_pages_with_blocks_are_listed() -> None:
    pages = {os.path.relpath(path.with_suffix(""), PAGES) for path in all_pages() if "```python" in path.read_text()}
    assert pages == CHECKS.keys() | ELSEWHERE


@pytest.mark.parametrize("page", QUOTED)
def test_quoted_blocks_equal_the_sources(page: str) -> None:
    for block, source in zip(blocks_of(page)[-len(QUOTED[page]) :], QUOTED[page], strict=True):
        lines = {line.strip().rstrip(",") for line in (ROOT / source).read_text().splitlines()}
        assert not {line.strip() for line in block.splitlines()} - lines, source


def commands_of(path: Path) -> list[list[str]]:
    """Returns the commands of a page's shell blocks, without variables before the commands."""
    blocks = re.findall(r"^```sh\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)
    lines = [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]
    return [[word for number, word in enumerate(line) if number or "=" not in word] for line in lines if line]


def test_commands_exist() -> None:
    command_line, tables = typer.main.get_command(app), typer.main.get_command(benchmarks)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = [command for path in all_pages() for command in commands_of(path)]
    assert len(commands) > 15
    for first, *others in commands:
        if first == "make":
            assert others[0] in targets, others
        elif first == "dynaxla":
            command_line.commands[others[0]].make_context(others[0], others[1:])  # raises for an unknown option
        elif [first, *others[:2]] == ["python", "-m", "benchmarks"]:
            tables.commands[others[2]].make_context(others[2], others[3:])
        else:
            assert first in ("pip",), first
