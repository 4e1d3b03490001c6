"""The blocks of pages run as they stand, one after the other, and compute what the pages say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGES = Path(__file__).parents[1] / "docs"
# By page: what holds when its blocks have run.
CHECKS = {
    "export": """
assert found.shape == (5, 4)
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
__import__("dynaxla").observe.verdicts.reset()
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


# What a page's program needs of its environment, and what runs it.
VARIABLES = {
    "many-devices": {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
    "many-processes": {"OMP_NUM_THREADS": "1", "DYNAXLA_CACHE": ""},
}
RUNNERS = {
    "explain": [],  # its lines are those of a file
    "many-processes": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
}


def blocks_of(page: str) -> list[str]:
    """The program of a page."""
    return re.findall(r"^```python\n(.*?)^```", (PAGES / f"{page}.md").read_text(), re.MULTILINE | re.DOTALL)


# torch.export's own copy of a tree of arguments warns of itself (torch 2.13).
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
@pytest.mark.parametrize("page", CHECKS)
def test_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program = "\n".join([*blocks_of(page), CHECKS[page]])
    if page in RUNNERS or "enable_device()" in program:  # the device is for a process's life
        (tmp_path / "page.py").write_text(program)
        environment = os.environ | VARIABLES.get(page, {})
        command = [sys.executable, *RUNNERS.get(page, []), "page.py"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    else:
        exec(compile(program, f"{page}.md", "exec"), {"__name__": "page"})
