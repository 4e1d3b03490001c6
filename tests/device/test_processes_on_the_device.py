"""The device in a process with other things: threads, forks, signals, its exit, other compilers, and what others have done before."""

from __future__ import annotations

from pathlib import Path

from newer import not_in_oldest
from scripts import completed, run_script

pytestmark = not_in_oldest("storages that can be made without memory")


def test_threads_children_and_interruptions() -> None:
    run_script("import device_cases; device_cases.run('sharing')")


def test_exits() -> None:
    """With tensors in globals and in cycles, and work under way: silently, and with the script's own status."""
    for end, status in (("", 0), ("sys.exit(3)", 3), ("raise ValueError('mine')", 1)):
        done = completed(
            f"""
import sys, torch, dynaxla
dynaxla.enable_device()
large = torch.randn(600, 600).to("jax")
kept = torch.nn.Linear(4, 4).to("jax")
loss = kept(torch.ones(2, 4, device="jax")).sum()
loss.backward(retain_graph=True)
cycle = [large]
cycle.append(cycle)
for _ in range(20):
    large = large @ large * 1e-2
{end}
""",
            own=True,
        )
        assert done.returncode == status, done.stderr[-2000:]
        assert done.stderr.strip().rpartition("\n")[2] == ("ValueError: mine" if status == 1 else ""), done.stderr[-2000:]


def test_what_others_did_before_and_do_after() -> None:
    """A script written for CUDA asks what there is; Inductor has compiled and trained, and does so again."""
    run_script("""
import warnings, torch
assert not torch.cuda.is_available()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()).to(device)
optimizer = torch.optim.AdamW(model.parameters())
with torch.autocast(device.type, dtype=torch.bfloat16, enabled=False), torch.random.fork_rng():
    model(torch.ones(2, 4, device=device)).sum().backward()
optimizer.step()
torch.accelerator.is_available(), torch.get_default_device(), torch.amp.GradScaler(device.type, enabled=False)
x = torch.randn(3, 4)
for backend in ("inductor", "aot_eager", "dynaxla"):
    before = torch.compile(lambda x: torch.tanh(x @ x.T) * 2, backend=backend)
    expected = before(x)

    import dynaxla
    dynaxla.enable_device()
    torch.testing.assert_close(before(x), expected)
    torch.testing.assert_close(torch.compile(lambda x: torch.tanh(x @ x.T) * 2, backend=backend)(x), expected)
    for function in (torch.compile(model, backend=backend), model):
        optimizer.zero_grad()
        function(x).sum().backward()
        optimizer.step()
""")


def test_graphs_that_an_earlier_process_left_are_found(tmp_path: Path) -> None:
    """In processes that have enabled the device and in those that have not, from one another."""
    script = """
import sys, torch, dynaxla
from dynaxla.observe import metrics
if sys.argv[2] == "with":
    dynaxla.enable_device()
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()).eval()
with torch.no_grad():
    torch.compile(model, backend="dynaxla", options={"cache": sys.argv[1]})(torch.ones(2, 4))
print(metrics.snapshot().get("kept_graphs", 0))
"""
    for first, second in (("without", "with"), ("with", "without")):
        folder = tmp_path / first
        found = [int(run_script(script, [str(folder), enabled])) for enabled in (first, second)]
        assert found == [0, 1], first
