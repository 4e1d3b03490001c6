"""Small functions of the kinds that AOTAutograd's own tests cover. Each is compared with eager mode, and with aot_eager where that differs.

table.py defines a case; judge.py runs and compares a case. The other modules contain the cases, by kind.
"""

from __future__ import annotations

from . import aliases, effects, gradients, hooks, mutations, subclasses, unbacked
from .table import CASES as CASES

__all__ = ["CASES", "aliases", "effects", "gradients", "hooks", "mutations", "subclasses", "unbacked"]
