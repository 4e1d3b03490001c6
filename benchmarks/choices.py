"""The names of the parts of `cpu` and `device`."""

from __future__ import annotations

FIRST_CALL = "first-call"
STARTS = "starts"
LAYERS = "layers"
MEMORY = "training-memory"
LENGTHS = "lengths"
INTEROP = "interop"
PROCESSES = "processes"
OPS = "ops"
PARTS = (
    "batch1", "batch8", "batch1-threads2", "batch8-threads2", "frozen-batch1", "frozen-batch8", "bfloat16", "training-sgd",
    "training-adamw", "training-others", "small", "functions", "generation", "generation-bfloat16", "generation-row", "xla-options",
    "xla-options-small", FIRST_CALL, STARTS, LAYERS, MEMORY, LENGTHS, INTEROP, PROCESSES, OPS,
)  # fmt: skip
DEVICE_PARTS = ("inference", "forward-backward", "training-sgd")
