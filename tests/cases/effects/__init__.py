"""Training steps whose Python code has side effects or reads values, for tests/training/test_effects.py."""

from cases.effects import effects as effects
from cases.effects import tensors as tensors
from cases.effects.world import CASES as CASES
