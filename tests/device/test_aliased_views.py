"""Tests of chains of views on the device, and of writes through views."""

from __future__ import annotations

from cases.aliased_views import Program, generate
from support.processes.device_checks import NEEDS_DEVICE, run_checks


@NEEDS_DEVICE
def test_programs_agree_with_the_cpu() -> None:
    """A sample of the programs; `python -m cases.aliased_views 2000 0` runs more."""
    run_checks("aliases")


def test_programs_depend_only_on_the_seed() -> None:
    assert generate(3) == generate(3)
    assert generate(3) != generate(4)


def test_programs_have_writes_and_views_of_views() -> None:
    programs = [generate(seed) for seed in range(40)]
    assert all("" in program.names for program in programs)
    assert sum(_longest_chain(program) > 1 for program in programs) > 30


def _longest_chain(program: Program) -> int:
    lengths = dict.fromkeys(program.base_names, 0)
    for line, name in zip(program.lines, program.names, strict=True):
        if name:
            expression = line.partition(" = ")[2]
            lengths[name] = 1 + max(length for base_name, length in lengths.items() if expression.startswith(base_name))
    return max(lengths.values())
