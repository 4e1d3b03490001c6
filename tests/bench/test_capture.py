"""Tests of the counts of graphs and ops that TorchDynamo captures."""

from __future__ import annotations

import torch

from benchmarks import suites
from dynaxla.bench import capture
from support.fakes.tiny_benchmark import Tiny, tiny_inputs


def test_capture_counts_graphs_and_ops() -> None:
    with torch.no_grad():
        whole = capture.count_captures(Tiny().eval(), tiny_inputs(2, torch.Generator()))
        case = suites.choose("breaks", ["item"])[0]
        broken = capture.count_captures(case.build(), case.inputs(1, torch.Generator()))
    assert (whole.graphs, whole.graph_calls, whole.captured_share, whole.breaks) == (1, 1, 1.0, {})
    assert whole.ops_per_graph == whole.largest_graph == whole.eager_ops == 5, "two products, their transposed weights, and the maximum"
    assert broken.graph_calls == 2
    assert 0.9 < broken.captured_share < 1
    assert any("item()" in reason for reason in broken.breaks)
