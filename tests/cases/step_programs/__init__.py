"""Programs of other people's kinds around a training step: each gives the same with a compiled step as without."""

from . import python as python
from . import trainers as trainers
from .program import PROGRAMS as PROGRAMS
