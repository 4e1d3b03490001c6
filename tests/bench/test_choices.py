"""The help's names are those of the tables, which the help does not import."""

from __future__ import annotations

import torch

from dynaxla.bench import choices, cpu, device_jax, engines, suites, training


def test_the_help_names_what_there_is() -> None:
    assert list(choices.SUITES) == list(suites.SUITES)
    assert list(choices.MODELS) == [case.name for case in suites.MODELS]
    assert list(choices.ENGINES) == list(engines.ENGINES)
    assert list(choices.OPTIMIZERS) == list(training.OPTIMIZERS)
    others = [choices.FIRST_CALL, choices.STARTS, choices.LAYERS, choices.MEMORY, choices.LENGTHS, choices.INTEROP]
    others += [choices.PROCESSES, choices.OPS]
    assert list(choices.PARTS) == [*cpu.PARTS, *others]
    assert list(choices.DEVICE_PARTS) == list(device_jax.PARTS)
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in choices.DTYPES)
