"""Tests of engine/trace_outputs.py: the metadata of a trace is part of the output tree."""

from __future__ import annotations

import jax
import pytest

from dynaxla.engine.trace_outputs import TracedOutputs, TraceMetadata


def test_metadata_is_in_the_output_tree() -> None:
    metadata = TraceMetadata(((IndexError, "out of range"),), (3,), ("kernel",), 2)
    traced = jax.jit(lambda x: TracedOutputs([x, x + 1], metadata)).trace(jax.ShapeDtypeStruct((2,), "float32"))
    assert traced.out_info.metadata == metadata
    assert [array.shape for array in traced.out_info.arrays] == [(2,), (2,)]
    with pytest.raises(AttributeError):
        metadata.draws = 3  # type: ignore[misc]
