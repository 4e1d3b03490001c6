"""Steps whose Python has effects, or looks at values, for tests/training/test_effects.py."""

from effect_cases import effects as effects
from effect_cases import tensors as tensors
from effect_cases.world import CASES as CASES
