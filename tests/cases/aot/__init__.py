"""Small functions of the kinds that AOTAutograd's own tests are about, each compared with eager mode and, where they differ, aot_eager.

table.py says what a case is; judge.py runs and compares one. The other modules hold the cases, by kind.
"""

from __future__ import annotations

from . import aliases, effects, gradients, hooks, mutations, subclasses, unbacked
from .table import CASES as CASES

__all__ = ["CASES", "aliases", "effects", "gradients", "hooks", "mutations", "subclasses", "unbacked"]
