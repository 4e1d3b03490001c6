"""Generates random programs: inputs, steps and outputs. Eager mode accepts every program that is returned."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from . import creation, indexing, pointwise, reductions, views, writes  # noqa: F401  (these modules register steps)
from .builder import Builder, NoneFits
from .choices import Choices, SeededChoices, chance, pick
from .observed import Expected, expect
from .program import CONTAINERS, ROLES, Input, Program, Storage
from .registry import FAMILIES
from .stepwise import Rejected, storage_key

# The relative frequency of each family of steps.
WEIGHTS = {
    "views": 28,
    "writes": 24,
    "binary": 16,
    "unary": 10,
    "reductions": 8,
    "indexing": 9,
    "products": 3,
    "creation": 2,
}
DTYPES = (
    [torch.float32] * 8
    + [torch.int64] * 3
    + [torch.float64, torch.bfloat16, torch.int32, torch.bool] * 2
    + [torch.float16, torch.int8, torch.int16, torch.uint8, torch.complex64]
)
# The same for programs with rounded sizes: reductions, indexing and products are more frequent, because most padding rules are for these.
ROUNDED_WEIGHTS = {
    "views": 20,
    "writes": 12,
    "binary": 14,
    "unary": 8,
    "reductions": 20,
    "indexing": 18,
    "products": 6,
    "creation": 2,
}
ROUNDED_DTYPES = [dtype for dtype in DTYPES if not dtype.is_complex]
FLOATS = [torch.float32] * 6 + [torch.float64] * 2 + [torch.bfloat16, torch.float16, torch.complex64]
CHANNELS_LAST = (0, 2, 3, 1)


def generate(seed: int, rounded: bool = False) -> tuple[Program, Expected]:
    """Returns the program of a seed, and its results in eager mode.

    Args:
        seed: the seed.
        rounded: True for a program whose sizes can usually be rounded up.
    """
    choices = SeededChoices(seed)
    while True:
        try:
            return draw_program(choices, rounded)
        except Rejected:
            continue


def draw_program(choices: Choices, rounded: bool = False) -> tuple[Program, Expected]:
    """Returns a random program, and its results in eager mode.

    Args:
        choices: the source of random decisions.
        rounded: True for a program whose sizes can usually be rounded up.

    Raises: Rejected if eager mode rejects the drawn program, or does not define its results.
    """
    mode = pick(choices, ["plain", "plain", "no_grad", "train"])
    program = draw_inputs(choices, mode, rounded)
    builder = Builder(choices, program)
    weights = ROUNDED_WEIGHTS if rounded else WEIGHTS
    with_random = not rounded and chance(choices, 6)
    length, tries = choices.integer(2, 9), 0
    while len(builder.program.steps) < length and tries < 60:
        tries += 1
        family = pick(choices, [family for family, weight in weights.items() for _ in range(weight)])
        if with_random and chance(choices, 25):
            family = "random"
        draw = pick(choices, list(FAMILIES[family].values()))
        try:
            step = draw(builder)
        except NoneFits:
            continue
        builder.append(step)
    program = _with_outputs(choices, builder, rounded)
    if program.resized is not None:
        with contextlib.suppress(Rejected):
            return program, expect(program)
        program = replace(program, resized=None)
    return program, expect(program)


@dataclass(frozen=True)
class InputLayout:
    """The memory layout of an input, independent of the sizes.

    Attributes:
        size_indices: for each dimension, the index of its size; None for a dimension of size 1.
        order: the dimensions, from the outermost to the innermost in memory.
        gaps: for each dimension, the factor by which its stride is greater than necessary.
        expanded: the dimensions with stride 0.
        overlapping: a dimension whose stride is set to 1, so that its elements may overlap other elements; None if there is none.
        offset: the offset in the storage, in elements.
    """

    size_indices: tuple[int | None, ...]
    order: tuple[int, ...]
    gaps: tuple[int, ...]
    expanded: frozenset[int]
    overlapping: int | None
    offset: int

    @staticmethod
    def draw(choices: Choices) -> InputLayout:
        """Returns a random layout."""
        rank = pick(choices, [2, 1, 3, 2, 3, 0, 4])
        size_indices: list[int | None] = [(2 - dim) % 3 for dim in range(rank)][::-1]
        for dim in range(rank):
            if chance(choices, 15):
                size_indices[dim] = pick(choices, [None, 0, 1, 2])
        kind = pick(choices, ["dense"] * 8 + ["permuted"] * 4 + ["gaps"] * 4 + ["expanded"] * 2 + ["overlapping"])
        order, gaps = list(range(rank)), [1] * rank
        if kind == "permuted" or (kind in ("gaps", "expanded") and chance(choices, 30)):
            left = list(range(rank))
            order = [left.pop(choices.integer(0, len(left) - 1)) for _ in range(rank)]
            if rank == 4 and chance(choices, 50):
                order = list(CHANNELS_LAST)
        if kind == "gaps" and rank:
            gaps[choices.integer(0, rank - 1)] = choices.integer(2, 3)
        expanded = frozenset(dim for dim in range(rank) if chance(choices, 60)) if kind == "expanded" else frozenset()
        overlapping = choices.integer(0, rank - 1) if kind == "overlapping" and rank else None
        offset = choices.integer(1, 17) if chance(choices, 30) else 0
        return InputLayout(tuple(size_indices), tuple(order), tuple(gaps), expanded, overlapping, offset)

    def input(self, sizes: Sequence[int], storage: int, role: str, conj: bool) -> Input:
        """Returns an input with this layout.

        Args:
            sizes: the sizes to which `size_indices` refers.
            storage: the index of the input's storage.
            role: one of ROLES.
            conj: True for a tensor with the conjugate bit.
        """
        shape = tuple(1 if index is None else sizes[index] for index in self.size_indices)
        stride, step = [0] * len(shape), 1
        for dim in reversed(self.order):
            if dim not in self.expanded:
                stride[dim] = step * self.gaps[dim]
                step = stride[dim] * max(shape[dim], 1)
        if self.overlapping is not None:
            stride[self.overlapping] = 1
        return Input(storage, shape, tuple(stride), self.offset, role, conj)


def draw_inputs(choices: Choices, mode: str, rounded: bool = False) -> Program:
    """Returns a program with inputs, and without steps and outputs.

    Args:
        choices: the source of random decisions.
        mode: the mode of the program.
        rounded: True for a program with dynamic sizes. In such a program no size is 0, and the first argument has a dynamic size,
            because torch.compile treats 0, 1 and the sizes of parameters as constants.
    """
    sizes = [choices.integer(2, 5) if rounded else choices.integer(1, 4) for _ in range(3)]
    if not rounded and chance(choices, 5):
        sizes[choices.integer(0, 2)] = 0
    count = choices.integer(1, 4)
    roles = ["argument"] * count
    if chance(choices, 25) and not (rounded and count == 1):
        roles[-1] = pick(choices, ["parameter", "buffer"])
        if count > 2:
            roles[-2] = pick(choices, ROLES)
    dtypes = [dtype for dtype in FLOATS if not dtype.is_complex] if rounded else FLOATS
    dtypes = dtypes if mode == "train" else ROUNDED_DTYPES if rounded else DTYPES
    palette = [pick(choices, dtypes) for _ in range(choices.integer(1, 3))]
    layouts: list[InputLayout] = []
    storages: list[Storage] = []
    inputs: list[Input] = []
    for number, role in enumerate(roles):
        if number and role == "argument" and chance(choices, 4):
            layouts.append(layouts[0])
            inputs.append(replace(inputs[0], same_as=0))
            continue
        layout = InputLayout.draw(choices)
        if rounded and not number:
            while not any(index is not None for index in layout.size_indices):
                layout = InputLayout.draw(choices)
        if number and chance(choices, 22):
            storage = choices.integer(0, len(storages) - 1)
            if chance(choices, 30):
                earlier_layout = next(other for other, item in zip(layouts, inputs, strict=True) if item.storage == storage)
                layout = replace(earlier_layout, offset=choices.integer(0, 3))
        else:
            storage = len(storages)
            storages.append(_draw_storage(choices, pick(choices, palette), mode))
        conj = storages[storage].dtype.is_complex and role == "argument" and chance(choices, 25)
        layouts.append(layout)
        inputs.append(layout.input(sizes, storage, role, conj))
    resized = None
    if "parameter" not in roles and "buffer" not in roles and mode != "train" and chance(choices, 12):
        other_sizes = [*sizes[:2], sizes[2] + choices.integer(1, 2)]
        resized = tuple(
            replace(layout.input(other_sizes, item.storage, item.role, item.conj), same_as=item.same_as)
            for layout, item in zip(layouts, inputs, strict=True)
        )
    for number, storage in enumerate(storages):
        users = [item for item in [*inputs, *(resized or ())] if item.storage == number]
        is_of_module = any(item.role != "argument" for item in users)
        gradient = "leaf" if is_of_module and storage.gradient == "computed" else storage.gradient
        storages[number] = replace(storage, size=max(item.extent for item in users), gradient=gradient)
    change = pick(choices, ["none", "copy", "data", "replace"]) if set(roles) != {"argument"} else "none"
    dynamic = chance(choices, 8)
    return Program(tuple(storages), tuple(inputs), (), (), mode=mode, change=change, resized=resized, dynamic=dynamic)


def _draw_storage(choices: Choices, dtype: torch.dtype, mode: str) -> Storage:
    """Returns a random storage. `draw_inputs` sets its size after the inputs are drawn."""
    inexact = dtype.is_floating_point or dtype.is_complex
    grid = pick(choices, ["quarters", "whole", "positive", "ordered", "special" if dtype.is_floating_point else "wide"])
    gradient_percent = {"plain": 0, "no_grad": 15, "train": 75}[mode]
    gradient = pick(choices, ["leaf", "computed"]) if inexact and chance(choices, gradient_percent) else "none"
    return Storage(dtype, 0, grid, choices.integer(0, 10**6), gradient)


def _with_outputs(choices: Choices, builder: Builder, rounded: bool) -> Program:
    """Returns the builder's program with at most six outputs: the results that no step uses, and other values.

    Args:
        choices: the source of random decisions.
        builder: the builder of the program.
        rounded: True for a program whose outputs usually share no memory.
    """
    program = builder.program
    used = {operand for step in program.steps for operand in step.operands}
    results = range(len(program.inputs), len(builder.tensors))
    outputs = [value for value in results if value not in used]
    for _ in range(choices.integer(0, 3)):
        outputs.append(choices.integer(0, len(builder.tensors) - 1))
    if rounded and not chance(choices, 10):
        outputs = [*{storage_key(builder.tensors[value]): value for value in outputs}.values()]
    outputs = outputs[-6:] or [len(builder.tensors) - 1]
    container = pick(choices, CONTAINERS) if len(outputs) == 1 else pick(choices, CONTAINERS[:3])
    return replace(program, outputs=tuple(outputs), container=container)
