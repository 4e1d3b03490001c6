"""The observable effects of a program's calls, and their comparison: results, arguments after the call, storages, gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from support.comparisons.compare import TOLERANCE, strides

from .program import Program, World
from .stepwise import Rejected, Stepwise, strict_warnings

# The maximum difference of a result between runs with simulated rounding errors, relative to its largest element. If it is larger, a
# comparison would prove nothing.
MOST_DEVIATION = 0.1


class Disagreement(AssertionError):
    """The compiled program differs from eager mode.

    Attributes:
        kind: the kind of difference, in one word.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Facts:
    """The metadata of a tensor.

    Attributes:
        memory: the number of the first tensor on the same storage, and the offset from its start in bytes; None for an empty tensor.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool
    is_leaf: bool
    is_conj: bool
    is_neg: bool
    memory: tuple[int, int] | None


@dataclass(frozen=True)
class Observation:
    """The effects of one call.

    Attributes:
        structure: the pytree structure of the results.
        identical: for each result, the number of the argument or earlier result that is the same object; None if there is none.
        results: the metadata of the results.
        inputs: the metadata of the inputs after the call.
        values: by name, the values of results, storages (including gaps) and gradients (None for a missing gradient).
    """

    structure: Any
    identical: list[int | None]
    results: list[Facts]
    inputs: list[Facts]
    values: dict[str, torch.Tensor | None]


@dataclass
class Expected:
    """The effects of a program in eager mode, and their accuracy.

    Attributes:
        calls: the observations of the calls.
        bounds: for each call, by name, the maximum difference of a value with other rounding.
        random: for each call, the names of values that depend on random numbers.
    """

    calls: list[Observation]
    bounds: list[dict[str, float]]
    random: list[set[str]]


Call = Callable[..., Any]


def observe(program: Program, make: Callable[[World], Call], seed: int = 0) -> list[Observation]:
    """Calls the program with several sets of values, and returns an observation of each call.

    Args:
        program: the program.
        make: returns the function to call. It gets the world, with the program's function (or module) and the live tensors.
        seed: the seed of random numbers in the first call.
    """
    world = World(program)
    call = make(world)
    observations = []
    with torch.no_grad() if program.mode == "no_grad" else contextlib.nullcontext():
        for number in range(2):
            arguments = world.prepare(number)
            observations.append(_observe_call(program, world, call, arguments, seed + number))
        if program.mode != "train":
            observations.append(_observe_call(program, world, call, arguments, seed))
        if program.resized is not None:
            observations.append(_observe_call(program, world, call, world.prepare(2, program.resized), seed))
    return observations


def _observe_call(program: Program, world: World, call: Call, arguments: Sequence[torch.Tensor], seed: int) -> Observation:
    if program.is_random:
        torch.manual_seed(seed)
    outcome = call(*arguments)
    results, structure = pytree.tree_flatten(outcome)
    if not all(isinstance(result, torch.Tensor) for result in results):
        raise Disagreement("structure", f"results that are no tensors: {results}")
    inputs = world.tensors
    everything = [*inputs, *results]
    identical: list[int | None] = []
    for index, result in enumerate(results, start=len(inputs)):
        identical.append(next((other for other in range(index) if everything[other] is result), None))
    locations = _memory(everything)
    facts = [_facts(tensor, location) for tensor, location in zip(everything, locations, strict=True)]
    values: dict[str, torch.Tensor | None] = {f"result {index}": _values(result) for index, result in enumerate(results)}
    if program.mode == "train":
        sources = [tensor for tensor in everything if tensor.requires_grad and (tensor.grad_fn is not None)]
        if sources:
            torch.autograd.backward(sources, [_cotangent(tensor) for tensor in sources])
        for index, leaf in enumerate(world.leaves):
            values[f"gradient {index}"] = None if leaf.grad is None else _values(leaf.grad)
            leaf.grad = None
    values |= {f"memory {index}": _values(storage) for index, storage in enumerate(world.storages)}
    return Observation(structure, identical, facts[len(inputs) :], facts[: len(inputs)], values)


def _facts(tensor: torch.Tensor, memory: tuple[int, int] | None) -> Facts:
    return Facts(
        tensor.dtype,
        tuple(tensor.shape),
        strides(tensor),
        tensor.requires_grad,
        tensor.is_leaf,
        tensor.is_conj(),
        tensor.is_neg(),
        memory,
    )


def _memory(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int] | None]:
    """Returns `Facts.memory` of each tensor."""
    first: dict[int, int] = {}
    locations: list[tuple[int, int] | None] = []
    for number, tensor in enumerate(tensors):
        if not tensor.numel():
            locations.append(None)
            continue
        owner = first.setdefault(tensor.untyped_storage().data_ptr(), number)
        locations.append((owner, tensor.data_ptr() - tensors[owner].data_ptr()))
    return locations


def _values(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().clone()


def _cotangent(tensor: torch.Tensor) -> torch.Tensor:
    numbers = torch.arange(tensor.numel(), dtype=torch.float64) % 5 * 0.5 - 1
    return numbers.reshape(tensor.shape).to(tensor.dtype)


def expect(program: Program, disturbed: int = 3) -> Expected:
    """Returns the effects of a program in eager mode.

    Args:
        program: the program.
        disturbed: the number of runs with simulated rounding errors.

    Raises: Rejected if eager mode rejects the program, does not define its results, or if these depend on rounding.
    """
    with strict_warnings():
        return _expect(program, disturbed)


def _expect(program: Program, disturbed: int) -> Expected:
    calls = _accepted(program, lambda world: world.function)
    stepwise = Stepwise(program)
    random_values: list[set[str]] = []

    def make_stepwise(world: World) -> Call:
        def run(*arguments: torch.Tensor) -> Any:
            result = stepwise.run(world.tensors)
            random_values.append(_random_names(program, stepwise, world))
            return result

        return run

    again = _accepted(program, make_stepwise)
    bounds: list[dict[str, float]] = [{} for _ in calls]
    for call, other in zip(calls, again, strict=True):
        for _, error in _differences(call, other, {}, set(), "eager mode run step by step"):
            raise Rejected(str(error))
    for seed in range(disturbed):
        noise = torch.Generator().manual_seed(seed)
        runs = _accepted(program, lambda world, noise=noise: lambda *_: Stepwise(program, noise).run(world.tensors))
        for call, moved, bound, chance in zip(calls, runs, bounds, random_values, strict=True):
            _widen_bounds(call, moved, bound, chance)
    # A gradient may pass through values of a coarser dtype than its own, and is rounded there. The noise does not simulate this.
    coarsest = max((torch.finfo(value.dtype).eps for value in stepwise.values if value.requires_grad), default=0.0)
    for call, bound in zip(calls, bounds, strict=True):
        for name, value in call.values.items():
            if name.startswith("gradient") and value is not None and value.numel():
                sizes = value.abs().double()
                bound[name] = max(bound.get(name, 0.0), coarsest * float(sizes.nan_to_num(0.0, 0.0).max()))
    return Expected(calls, bounds, random_values)


def _accepted(program: Program, make: Callable[[World], Call]) -> list[Observation]:
    try:
        return observe(program, make)
    except Rejected:
        raise
    except Exception as error:
        # Any exception means that eager mode does not accept the program.
        raise Rejected(f"{type(error).__name__}: {error}") from error


def _random_names(program: Program, stepwise: Stepwise, world: World) -> set[str]:
    names = {f"result {index}" for index, output in enumerate(program.outputs) if output in stepwise.random}
    names |= {f"memory {world.inputs[number].storage}" for number in stepwise.random if number < len(world.inputs)}
    if program.mode == "train" and program.is_random:
        names |= {f"gradient {index}" for index in range(len(world.leaves))}
    return names


def _widen_bounds(call: Observation, moved: Observation, bounds: dict[str, float], random: set[str]) -> None:
    for name, value in call.values.items():
        other = moved.values[name]
        if value is None or other is None or name in random or not value.numel():
            continue
        if not (value.is_floating_point() or value.is_complex()):
            if not torch.equal(value, other):
                raise Rejected(f"{name} depends on how numbers are rounded")
            continue
        parts, others = _parts(value), _parts(other)
        if not torch.equal(parts.isfinite(), others.isfinite()):
            raise Rejected(f"{name} depends on how numbers are rounded")
        finite = parts.isfinite()
        if finite.any():
            deviation = float((parts - others)[finite].abs().max())
            bounds[name] = max(bounds.get(name, 0.0), deviation)
            if deviation > MOST_DEVIATION * max(1.0, float(parts[finite].abs().max())):
                raise Rejected(f"{name} is known too inexactly")


def _parts(value: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(value).double() if value.is_complex() else value.double()


def check_agreement(expected: Expected, actual: Sequence[Observation]) -> None:
    """Raises the first Disagreement, if there is one."""
    for error in disagreements(expected, actual).values():
        raise error


def disagreements(expected: Expected, actual: Sequence[Observation]) -> dict[tuple[int, str], Disagreement]:
    """Returns the differences from eager mode, by the number of the call and the name of the value."""
    found: dict[tuple[int, str], Disagreement] = {}
    for number, (theirs, mine) in enumerate(zip(expected.calls, actual, strict=True)):
        for name, error in _differences(theirs, mine, expected.bounds[number], expected.random[number], f"call {number}: eager mode"):
            found[number, name] = error
    return found


def _differences(
    theirs: Observation, mine: Observation, bounds: dict[str, float], random: set[str], reference: str
) -> Iterator[tuple[str, Disagreement]]:
    if mine.structure != theirs.structure:
        yield "structure", Disagreement("structure", f"{reference} gives {theirs.structure}, not {mine.structure}")
        return
    for role, expected_facts, actual_facts in (("result", theirs.results, mine.results), ("input", theirs.inputs, mine.inputs)):
        for index, (expected, actual) in enumerate(zip(expected_facts, actual_facts, strict=True)):
            for name, value in vars(expected).items():
                if getattr(actual, name) != value:
                    message = f"{reference} gives {role} {index} with {name} {value}, not {getattr(actual, name)}"
                    yield f"{role} {index} {name}", Disagreement(name, message)
    inputs = len(theirs.inputs)
    objects = [*range(inputs), *(index if other is None else other for index, other in enumerate(theirs.identical, start=inputs))]
    for index, same in enumerate(mine.identical, start=inputs):
        # Not the other way round: torch.compile may return an alias of an object that eager mode returns itself.
        if same is not None and objects[same] != objects[index]:
            message = f"{reference} returns different objects as result {index - inputs} and as {same - inputs}"
            yield f"identity {index}", Disagreement("identity", message)
    for name, value in theirs.values.items():
        error = None if name in random else _differing_values(name, value, mine.values[name], bounds.get(name, 0.0), reference)
        if error is not None:
            yield name, error


def _differing_values(
    name: str, theirs: torch.Tensor | None, mine: torch.Tensor | None, bound: float, reference: str
) -> Disagreement | None:
    kind = name.split()[0]
    if theirs is None or mine is None:
        return None if theirs is mine else Disagreement(kind, f"{reference} gives {name} = {theirs}, not {mine}")
    if (theirs.shape, theirs.dtype) != (mine.shape, mine.dtype):
        return Disagreement(kind, f"{reference} gives {name} as {theirs.dtype}{list(theirs.shape)}, not {mine.dtype}{list(mine.shape)}")
    rtol, atol = TOLERANCE.get(theirs.dtype, (0.0, 0.0))
    try:
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol + 4 * bound, equal_nan=True)
    except AssertionError as error:
        return Disagreement(kind, f"{reference} gives {name} =\n{theirs}\nnot\n{mine}\n{error}")
    return None
