"""Tests of torch's caches of compiled results, used together with dynaxla. (For aot_compile see tests/engine/test_artifact.py.)"""

from __future__ import annotations

from pathlib import Path

import torch

from support.processes.scripts import run_script
from support.timing import quick_compilation

CACHE = """
import os, torch
torch.set_num_threads(1)
def f(x):
    return (x.sin() @ x.t()).relu()
x = torch.arange(12.0).reshape(3, 4)
def run():
    torch.testing.assert_close(torch.compile(f, backend="dynaxla", options={{"cache": {cache!r}}})(x), f(x))
"""
SAVED = (
    CACHE
    + """
run()
kept = torch.compiler.save_cache_artifacts()
if kept is not None:
    torch._dynamo.reset()
    torch.compiler.load_cache_artifacts(kept[0])
run()
"""
)


def test_results_with_torch_cache_artifacts(tmp_path: Path) -> None:
    run_script(SAVED.format(cache=str(tmp_path)), XLA_FLAGS=quick_compilation.flags())


def test_results_with_torch_caching_precompile(tmp_path: Path) -> None:
    """The second process loads the files of the first one."""
    folder = str(tmp_path / "torch's")
    script = (
        f"import os\nos.environ['TORCHINDUCTOR_CACHE_DIR'] = {folder!r}\n"
        + CACHE.format(cache=str(tmp_path / "ours"))
        + "torch._dynamo.config.caching_precompile = True\nrun()\n"
    )
    assert isinstance(torch._dynamo.config.caching_precompile, bool)
    for _ in range(2):
        run_script(script, XLA_FLAGS=quick_compilation.flags())
