"""Steps that run lazily, for tests/training/test_lazy.py."""

from lazy_cases import effects as effects
from lazy_cases import tensors as tensors
from lazy_cases.world import CASES as CASES
