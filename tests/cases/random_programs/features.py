"""The features that a program tests, for statistics."""

from __future__ import annotations

import torch

from .observed import Expected
from .program import Input, Program
from .stepwise import overlaps_itself


def features(program: Program, expected: Expected) -> set[str]:
    first = expected.calls[0]
    count = len(program.inputs)
    found = {f"mode {program.mode}"}
    for number, storage in enumerate(program.storages):
        before = torch.tensor(storage.values(0), dtype=storage.dtype)
        after = first.values[f"memory {number}"]
        if after is not None and not torch.equal(_plain(before), _plain(after)):
            found.add("an input changed")
    owners = [facts.memory[0] for facts in first.results if facts.memory is not None]
    if any(owner < count for owner in owners):
        found.add("a result in an input's memory")
    if len({owner for owner in owners if owner >= count}) < sum(owner >= count for owner in owners):
        found.add("results that share memory")
    if any(other is not None for other in first.identical):
        found.add("one tensor returned twice, or an input returned")
    if len({item.storage for item in program.inputs}) < count:
        found.add("inputs that share memory")
    if len({storage.dtype for storage in program.storages}) > 1:
        found.add("inputs of several dtypes")
    for item in program.inputs:
        found |= _input_features(item)
    for name, holds in {
        "parameters or buffers": program.is_module,
        "parameters that change between calls": program.change != "none",
        "another size at a later call": program.resized is not None,
        "symbolic sizes": program.dynamic,
        "random numbers": program.is_random,
        "gradients": any(name.startswith("gradient") and value is not None for name, value in first.values.items()),
        "infinities or NaNs": any(storage.grid == "special" for storage in program.storages),
    }.items():
        if holds:
            found.add(name)
    return found


def _input_features(item: Input) -> set[str]:
    size = item.extent
    tensor = torch.empty(size, dtype=torch.uint8).as_strided(item.shape, item.stride, item.offset)
    return {
        name
        for name, holds in {
            "an expanded input": any(step == 0 and extent > 1 for extent, step in zip(item.shape, item.stride, strict=True)),
            "an input that overlaps itself": 0 not in item.stride and overlaps_itself(tensor),
            "an input that is not contiguous": not tensor.is_contiguous(),
            "an input with an offset": item.offset > 0,
            "an input of rank 0": not item.shape,
            "an input without elements": 0 in item.shape,
            "an input with the conjugate bit": item.conj,
            "one tensor given twice": item.same_as is not None,
        }.items()
        if holds
    }


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor with NaNs replaced, so that equal tensors compare equal."""
    return torch.nan_to_num(tensor, 12345) if tensor.is_floating_point() else tensor


def compared(expected: Expected) -> int:
    """Returns the number of compared values: results, storages, gradients."""
    return sum(name not in random for call, random in zip(expected.calls, expected.random, strict=True) for name in call.values)
