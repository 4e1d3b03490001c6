"""Everything that can be seen of a program's calls: results, arguments afterwards, all memory, gradients. And the comparison."""

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

# How far a result may move between runs with imitated rounding errors, relative to the largest numbers in it: farther, and comparing
# it would prove nothing.
MOST_DEVIATION = 0.1


class Disagreement(AssertionError):
    """The compiled program does something else than eager mode.

    Attributes: kind (one word for what differs).
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Facts:
    """A tensor but for its values. memory: a number that tensors on one storage share, and where in it the tensor starts, in bytes."""

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
    """One call. The lists of a kind have the same order in every run.

    Attributes: structure (the results' container); identical (which results are the same object as an argument or an earlier result);
    results, inputs: facts; values: by name, of results, of storages (gaps included), and of gradients (None where there is none).
    """

    structure: Any
    identical: list[int | None]
    results: list[Facts]
    inputs: list[Facts]
    values: dict[str, torch.Tensor | None]


@dataclass
class Expected:
    """What eager mode does, and how exactly that is known.

    Attributes: calls; bounds (for each call, by name, how far a value moves with another rounding); random (for each call, the names of
    values that depend on random numbers).
    """

    calls: list[Observation]
    bounds: list[dict[str, float]]
    random: list[set[str]]


Call = Callable[..., Any]


def observe(program: Program, make: Callable[[World], Call], seed: int = 0) -> list[Observation]:
    """Call the program with several sets of values.

    make: from the program's function (or module) to what is called; it may also look at the world's tensors.
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
    for place, result in enumerate(results, start=len(inputs)):
        identical.append(next((other for other in range(place) if everything[other] is result), None))
    memory = _memory(everything)
    facts = [_facts(tensor, where) for tensor, where in zip(everything, memory, strict=True)]
    values: dict[str, torch.Tensor | None] = {f"result {place}": _values(result) for place, result in enumerate(results)}
    if program.mode == "train":
        sources = [tensor for tensor in everything if tensor.requires_grad and (tensor.grad_fn is not None)]
        if sources:
            torch.autograd.backward(sources, [_cotangent(tensor) for tensor in sources])
        for place, leaf in enumerate(world.leaves):
            values[f"gradient {place}"] = None if leaf.grad is None else _values(leaf.grad)
            leaf.grad = None
    values |= {f"memory {place}": _values(storage) for place, storage in enumerate(world.storages)}
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
    """For each tensor with elements: the first one on the same storage, and how many bytes after that one's start it starts."""
    first: dict[int, int] = {}
    found: list[tuple[int, int] | None] = []
    for number, tensor in enumerate(tensors):
        if not tensor.numel():
            found.append(None)
            continue
        owner = first.setdefault(tensor.untyped_storage().data_ptr(), number)
        found.append((owner, tensor.data_ptr() - tensors[owner].data_ptr()))
    return found


def _values(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().clone()


def _cotangent(tensor: torch.Tensor) -> torch.Tensor:
    numbers = torch.arange(tensor.numel(), dtype=torch.float64) % 5 * 0.5 - 1
    return numbers.reshape(tensor.shape).to(tensor.dtype)


def expect(program: Program, disturbed: int = 3) -> Expected:
    """What eager mode does.

    Raises: Rejected if eager mode refuses the program, leaves its results undefined, or if they depend on how numbers are rounded.
    """
    with strict_warnings():
        return _expect(program, disturbed)


def _expect(program: Program, disturbed: int) -> Expected:
    calls = _accepted(program, lambda world: world.function)
    stepwise = Stepwise(program)
    random_values: list[set[str]] = []

    def followed(world: World) -> Call:
        def run(*arguments: torch.Tensor) -> Any:
            result = stepwise.run(world.tensors)
            random_values.append(_random_names(program, stepwise, world))
            return result

        return run

    again = _accepted(program, followed)
    bounds: list[dict[str, float]] = [{} for _ in calls]
    for call, other in zip(calls, again, strict=True):
        for _, error in _differences(call, other, {}, set(), "eager mode run step by step"):
            raise Rejected(str(error))
    for seed in range(disturbed):
        noise = torch.Generator().manual_seed(seed)
        runs = _accepted(program, lambda world, noise=noise: lambda *_: Stepwise(program, noise).run(world.tensors))
        for call, moved, bound, chance in zip(calls, runs, bounds, random_values, strict=True):
            _widen_bounds(call, moved, bound, chance)
    # A gradient is rounded wherever it passes a value of a coarser dtype than its own, which the noise does not imitate.
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
        # Whatever eager mode raises, it does not accept the program.
        raise Rejected(f"{type(error).__name__}: {error}") from error


def _random_names(program: Program, stepwise: Stepwise, world: World) -> set[str]:
    names = {f"result {place}" for place, output in enumerate(program.outputs) if output in stepwise.random}
    names |= {f"memory {world.inputs[number].storage}" for number in stepwise.random if number < len(world.inputs)}
    if program.mode == "train" and program.is_random:
        names |= {f"gradient {place}" for place in range(len(world.leaves))}
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
    """Raises: Disagreement, the first."""
    for error in disagreements(expected, actual).values():
        raise error


def disagreements(expected: Expected, actual: Sequence[Observation]) -> dict[tuple[int, str], Disagreement]:
    """What differs from eager mode, by call and by what differs there."""
    found: dict[tuple[int, str], Disagreement] = {}
    for number, (theirs, mine) in enumerate(zip(expected.calls, actual, strict=True)):
        for what, error in _differences(theirs, mine, expected.bounds[number], expected.random[number], f"call {number}: eager mode"):
            found[number, what] = error
    return found


def _differences(
    theirs: Observation, mine: Observation, bounds: dict[str, float], random: set[str], who: str
) -> Iterator[tuple[str, Disagreement]]:
    if mine.structure != theirs.structure:
        yield "structure", Disagreement("structure", f"{who} gives {theirs.structure}, not {mine.structure}")
        return
    for role, expected_facts, actual_facts in (("result", theirs.results, mine.results), ("input", theirs.inputs, mine.inputs)):
        for place, (expected, actual) in enumerate(zip(expected_facts, actual_facts, strict=True)):
            for name, value in vars(expected).items():
                if getattr(actual, name) != value:
                    message = f"{who} gives {role} {place} with {name} {value}, not {getattr(actual, name)}"
                    yield f"{role} {place} {name}", Disagreement(name, message)
    inputs = len(theirs.inputs)
    objects = [*range(inputs), *(place if other is None else other for place, other in enumerate(theirs.identical, start=inputs))]
    for place, same in enumerate(mine.identical, start=inputs):
        # The other way round it is torch.compile that makes an alias of what is the same object in eager mode.
        if same is not None and objects[same] != objects[place]:
            message = f"{who} returns as result {place - inputs} another object than as {same - inputs}"
            yield f"identity {place}", Disagreement("identity", message)
    for name, value in theirs.values.items():
        error = None if name in random else _differing_values(name, value, mine.values[name], bounds.get(name, 0.0), who)
        if error is not None:
            yield name, error


def _differing_values(name: str, theirs: torch.Tensor | None, mine: torch.Tensor | None, bound: float, who: str) -> Disagreement | None:
    kind = name.split()[0]
    if theirs is None or mine is None:
        return None if theirs is mine else Disagreement(kind, f"{who} gives {name} = {theirs}, not {mine}")
    if (theirs.shape, theirs.dtype) != (mine.shape, mine.dtype):
        return Disagreement(kind, f"{who} gives {name} as {theirs.dtype}{list(theirs.shape)}, not {mine.dtype}{list(mine.shape)}")
    rtol, atol = TOLERANCE.get(theirs.dtype, (0.0, 0.0))
    try:
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol + 4 * bound, equal_nan=True)
    except AssertionError as error:
        return Disagreement(kind, f"{who} gives {name} =\n{theirs}\nnot\n{mine}\n{error}")
    return None
