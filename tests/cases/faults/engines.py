"""Faults in the comparison of engines with eager mode, and in the choice among them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from dynaxla.autoselect import verification
from dynaxla.autoselect.contest import SingleProcessBallot
from dynaxla.autoselect.verification import Expected

from . import FaultList

FAULTS = FaultList()


@FAULTS.add
def results_of_engines_are_not_compared() -> AbstractContextManager[Any]:
    return patch.object(Expected, "_value_difference", lambda self, mine: "")


@FAULTS.add
def gradients_of_engines_are_not_compared() -> AbstractContextManager[Any]:
    return patch.object(verification, "_gradients", lambda results, args: [])


@FAULTS.add
def writes_of_engines_are_not_compared() -> AbstractContextManager[Any]:
    return patch.object(Expected, "_input_difference", lambda self, mine: "")


@FAULTS.add
def strides_of_engines_are_not_compared() -> AbstractContextManager[Any]:
    original = verification._metadata
    return patch.object(verification, "_metadata", lambda item: {name: fact for name, fact in original(item).items() if name != "strides"})


@FAULTS.add
def memory_that_engines_share_is_not_compared() -> AbstractContextManager[Any]:
    return patch.object(verification, "_storage_owners", lambda run: ["" for _ in run.results])


@FAULTS.add
def the_slowest_engine_is_chosen() -> AbstractContextManager[Any]:
    return patch.object(SingleProcessBallot, "decide", lambda self, sizes, seconds: max(seconds, key=seconds.__getitem__))
