"""Measures, once for each problem, which implementation of an op is the fastest on this machine for the given shapes."""

from .tuner import Measurement, Tuner, measurements, stored_measurements

__all__ = ["Measurement", "Tuner", "measurements", "stored_measurements"]
