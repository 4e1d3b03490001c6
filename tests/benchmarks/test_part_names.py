"""Tests that the names of parts and engines, which commands know without importing torch, equal those of the tables."""

from __future__ import annotations

from benchmarks import choices, cpu, device_jax, engines, suites


def test_part_names_equal_the_tables() -> None:
    others = [choices.FIRST_CALL, choices.STARTS, choices.LAYERS, choices.MEMORY, choices.LENGTHS, choices.INTEROP]
    others += [choices.PROCESSES, choices.OPS]
    assert list(choices.PARTS) == [*cpu.PARTS, *others]
    assert list(choices.DEVICE_PARTS) == list(device_jax.PARTS)


def test_engine_and_suite_names_equal_the_tables() -> None:
    assert list(choices.ENGINES) == list(engines.ENGINES)
    assert list(choices.SUITES) == list(suites.SUITES)
