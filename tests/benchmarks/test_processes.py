"""Tests of a runner in another process."""

from __future__ import annotations

import pytest
import torch
from benchmarks.processes import Remote

from benchmarks import suites
from dynaxla.bench.engines import ENGINES
from dynaxla.bench.runner import ModelSetup, RemoteError, first_line


@pytest.mark.thorough
def test_remote_runner_gives_the_local_results_and_measures_memory() -> None:
    case = suites.choose("breaks", ["branch"])[0]
    setup = ModelSetup()
    inputs = setup.inputs(case, torch.Generator().manual_seed(3))
    remote = Remote(ENGINES["eager"], case, setup)
    try:
        with torch.no_grad():
            assert torch.equal(remote.call(inputs), setup.model(case)(*inputs))
        assert remote.time([inputs] * 2).wall_seconds > 0
        large = (torch.randn(100_000, 256),)
        memory = remote.memory([large])
        assert memory.peak_bytes > 2 * large[0].nbytes
        assert memory.kept_bytes < memory.peak_bytes
        with pytest.raises(RemoteError) as caught:
            remote.call((torch.randn(8, 3),))
        assert first_line(caught.value).startswith("RuntimeError: Given normalized_shape")
        assert torch.equal(remote.call(inputs), remote.call(inputs))
    finally:
        remote.close()
