"""Finds the tests of the padding rules that find each planted fault in these rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from cases.faults import Fault
from cases.faults.padding import FAULTS
from support.comparisons import rounded_sizes
from support.timing import quick_compilation


def trials() -> Iterator[tuple[str, Callable[[], None]]]:
    """Yields the trials that must find the faults: each group of functions in the tests of the rules, as one program."""
    from passes.padding import (
        test_padded_layers,
        test_padded_order,
        test_padded_rules,
        test_padded_statistics,
        test_padded_windows,
        test_padded_writes,
    )

    tested = test_padded_order, test_padded_statistics, test_padded_windows, test_padded_writes, test_padded_rules, test_padded_layers
    for module in tested:
        for name, functions in vars(module).items():
            if name.isupper() and isinstance(functions, list) and callable(functions[0]):
                added = [lambda *args, own=function: own(*args) + 0 for function in functions]
                yield name, lambda functions=added: rounded_sizes.assert_one_program(functions, rounded_sizes.features)
    yield "GUARDS", _check_guards


def _check_guards() -> None:
    """A graph with the guard x + 1 <= y for two sizes. It does not hold for the rounded sizes."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x[:1]]) + (y * 2)[: x.shape[0] + 1]

    x, y = torch.ones(9), torch.ones(10)  # both are rounded to 12
    with rounded_sizes.poisoned():
        torch.testing.assert_close(rounded_sizes.compiled(function)(x, y), function(x, y))


def find(planted: Fault) -> str | None:
    """Returns the first trial that finds a fault, with its error; None if there is none."""
    for name, trial in trials():
        torch._dynamo.reset()
        with planted():
            try:
                trial()
            except Exception as error:
                return f"{name}: {type(error).__name__}: {(str(error).splitlines() or ['another program'])[0][:60]}"
    return None


def main(names: Sequence[str]) -> int:
    """Prints the trial that finds each fault."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        quick_compilation.apply(patch)
        for name in names or FAULTS:
            found[name] = find(FAULTS[name])
            print(f"{name:50} {found[name] or 'not found'}", flush=True)
    missed = [name for name, trial in found.items() if trial is None]
    print(f"{len(found) - len(missed)} of {len(found)} faults found")
    return int(bool(missed))
