"""Training programs as users write them. Each must have the same results with and without a compiled step."""

from . import python as python
from . import trainers as trainers
from .program import PROGRAMS as PROGRAMS
