"""Measures, once for each problem, which implementation of an op is the fastest on this machine for the given shapes."""

from .tuner import Measurement, Tuner, kept, tried

__all__ = ["Measurement", "Tuner", "kept", "tried"]
