"""Helpers of the tests: comparisons with eager mode, other processes, fakes, cheaper compilation, small models."""
