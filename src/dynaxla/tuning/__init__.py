"""Which form of an op is the fastest: measured on this machine, for the shapes at hand, once."""

from .tuner import Measurement, Tuner, kept, tried

__all__ = ["Measurement", "Tuner", "kept", "tried"]
