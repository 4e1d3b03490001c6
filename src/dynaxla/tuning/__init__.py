"""Which form of an op is the fastest: measured on this machine, for the shapes at hand, once."""

from .table import show
from .tuner import Measurement, Tuner, kept, tried

__all__ = ["Measurement", "Tuner", "kept", "show", "tried"]
