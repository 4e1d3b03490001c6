"""Reduces a program that disagrees: removes and simplifies parts as long as the verdict stays the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from .judge import Verdict, judge
from .observed import expect
from .program import Input, Program, Step
from .stepwise import Rejected


def minimise(program: Program, verdict: Verdict, judged: Callable[[Program], Verdict] | None = None, most_tries: int = 300) -> Program:
    """Returns a smaller program with the same verdict.

    Args:
        program: the program.
        verdict: its verdict.
        judged: returns the verdict of a candidate, or raises Rejected; by default `judge`.
        most_tries: the maximum number of candidates.
    """
    judged = judged or (lambda candidate: judge(candidate, expect(candidate)))
    tries = 0
    smaller = True
    while smaller:
        smaller = False
        for candidate in simplifications(program):
            tries += 1
            if tries > most_tries:
                return program
            torch._dynamo.reset()  # torch 2.11 stops after eight compilations of all functions together
            try:
                found = judged(candidate)
            except Rejected:
                continue
            if (found.outcome, found.kind) == (verdict.outcome, verdict.kind):
                program, smaller = candidate, True
                break
    return program


def simplifications(program: Program) -> Iterator[Program]:
    """Yields simpler programs, those that remove most first."""
    for index in reversed(range(len(program.steps))):
        yield from _without_step(program, index)
    for index in range(len(program.outputs)):
        if len(program.outputs) > 1:
            yield replace(program, outputs=(*program.outputs[:index], *program.outputs[index + 1 :]), container="tuple")
    for number in reversed(range(len(program.inputs))):
        yield from _without_input(program, number)
    if program.resized is not None:
        yield replace(program, resized=None)
    if program.dynamic:
        yield replace(program, dynamic=False)
    if program.mode != "plain":
        plain = replace(program, mode="plain", storages=tuple(replace(storage, gradient="none") for storage in program.storages))
        yield plain
        if program.mode == "train":
            yield replace(plain, mode="no_grad")
    if program.change != "none":
        yield replace(program, change="none")
    if program.container != "tuple":
        yield replace(program, container="tuple")
    for number, storage in enumerate(program.storages):
        for simpler in (replace(storage, gradient="none"), replace(storage, grid="quarters"), replace(storage, seed=0)):
            if simpler != storage:
                yield replace(program, storages=(*program.storages[:number], simpler, *program.storages[number + 1 :]))
    for number, item in enumerate(program.inputs):
        for simpler_input in (_contiguous(item), replace(item, role="argument"), replace(item, conj=False), replace(item, offset=0)):
            if simpler_input != item and program.resized is None:
                yield replace(program, inputs=(*program.inputs[:number], simpler_input, *program.inputs[number + 1 :]))


def _without_step(program: Program, index: int) -> Iterator[Program]:
    """Yields programs without a step. One of its operands replaces its results."""
    first = len(program.inputs) + sum(step.results for step in program.steps[:index])
    step = program.steps[index]
    for stand_in in dict.fromkeys(step.operands or (0,)):

        def renumber(value: int, stand_in: int = stand_in) -> int:
            if value < first:
                return value
            return stand_in if value < first + step.results else value - step.results

        steps = (*program.steps[:index], *[_renumbered(later, renumber) for later in program.steps[index + 1 :]])
        yield replace(program, steps=steps, outputs=tuple(map(renumber, program.outputs)))


def _without_input(program: Program, number: int) -> Iterator[Program]:
    used = {operand for step in program.steps for operand in step.operands} | set(program.outputs)
    if number in used or len(program.inputs) == 1 or any(item.same_as == number for item in program.inputs):
        return

    def renumber(value: int) -> int:
        return value - 1 if value > number else value

    def without(items: tuple[Input, ...]) -> tuple[Input, ...]:
        remaining = [*items[:number], *items[number + 1 :]]
        return tuple(replace(item, same_as=None if item.same_as is None else renumber(item.same_as)) for item in remaining)

    yield replace(
        program,
        inputs=without(program.inputs),
        resized=None if program.resized is None else without(program.resized),
        steps=tuple(_renumbered(step, renumber) for step in program.steps),
        outputs=tuple(map(renumber, program.outputs)),
    )


def _renumbered(step: Step, renumber: Callable[[int], int]) -> Step:
    return replace(step, operands=tuple(map(renumber, step.operands)))


def _contiguous(item: Input) -> Input:
    stride, step = [], 1
    for size in reversed(item.shape):
        stride.append(step)
        step *= max(size, 1)
    return replace(item, stride=tuple(reversed(stride)), offset=0)
