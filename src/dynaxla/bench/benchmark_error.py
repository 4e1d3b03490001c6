"""What the benchmark tells its user."""

from __future__ import annotations


class BenchmarkError(Exception):
    """A request that cannot be met: an unknown name, or something that is not installed."""
