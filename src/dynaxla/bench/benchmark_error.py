"""The exception for requests that the benchmark cannot meet."""

from __future__ import annotations


class BenchmarkError(Exception):
    """Raised for a request that cannot be met, such as an unknown name, or a package that is not installed."""
