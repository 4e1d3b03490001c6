"""A program as data: inputs are described by their memory, steps by their source text."""

from __future__ import annotations

import functools
import itertools
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

ROLES = ("argument", "parameter", "buffer")
CONTAINERS = ("tuple", "list", "dict", "single")


@dataclass(frozen=True)
class Storage:
    """The memory of one or more inputs.

    Attributes:
        dtype: the dtype.
        size: the size in elements.
        grid: the set of possible values, see `_grid`.
        seed: the seed with which values are drawn.
        gradient: "none"; "leaf" (its inputs are leaves that require grad); "computed" (its inputs are views of a result).
    """

    dtype: torch.dtype
    size: int
    grid: str
    seed: int
    gradient: str = "none"

    def values(self, call: int) -> list[Any]:
        """Returns the storage's values in a call."""
        rng = random.Random(f"{self.seed}:{call}")
        grid = _grid(self.dtype, self.grid)
        if self.grid == "ordered" and not self.dtype.is_complex and self.dtype != torch.bool:
            step, start = (1, 0) if not self.dtype.is_floating_point else (0.25, -min(self.size, 100) // 8)
            return [start + step * (number % 100) for number in rng.sample(range(self.size), self.size)]
        if self.dtype.is_complex:
            return [complex(rng.choice(grid), rng.choice(grid)) for _ in range(self.size)]
        return [rng.choice(grid) for _ in range(self.size)]


def _grid(dtype: torch.dtype, name: str) -> list[Any]:
    """Returns numbers that are exact in every dtype, and differ by more than rounding errors."""
    if dtype == torch.bool:
        return [False, True]
    if dtype.is_floating_point or dtype.is_complex:
        quarters = [number / 4 for number in range(-12, 13)]
        return {
            "whole": [float(number) for number in range(-3, 4)],
            "positive": [number / 4 for number in range(1, 13)],
            "special": [*quarters, *[float("nan"), float("inf"), float("-inf")] * 3],
        }.get(name, quarters)
    limits = torch.iinfo(dtype)
    low = max(limits.min, -4)
    return {
        "positive": list(range(1, 10)),
        "wide": [limits.min, limits.min + 1, limits.max - 1, limits.max, *range(low, 5)],
    }.get(name, list(range(low, 6)))


GRIDS = ("quarters", "whole", "positive", "ordered", "special", "wide")


@dataclass(frozen=True)
class Input:
    """A tensor on a storage.

    Attributes:
        storage: the index of the storage.
        shape: the shape.
        stride: the strides, in elements.
        offset: the offset in the storage, in elements.
        role: one of ROLES.
        conj: True for a tensor with the conjugate bit.
        same_as: the number of an earlier input that is the same tensor object; None if there is none.
    """

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0
    role: str = "argument"
    conj: bool = False
    same_as: int | None = None

    @property
    def extent(self) -> int:
        """The number of elements that the storage must have."""
        if 0 in self.shape:
            return self.offset
        return self.offset + 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))


@dataclass(frozen=True)
class Step:
    """One operation.

    Attributes:
        op: the name, for statistics.
        code: an expression, or a statement if there are no results. $0, $1, ... are the operands.
        operands: numbers of values: first the inputs, then the results of earlier steps.
        results: the number of results; several results are unpacked.
        writes: True if the step changes operand 0 in place.
        random: True if the step draws random numbers.
        requires: an expression that must be true before the step; "" if there is none.
    """

    op: str
    code: str
    operands: tuple[int, ...]
    results: int = 1
    writes: bool = False
    random: bool = False
    requires: str = ""

    def text(self, names: Callable[[int], str]) -> str:
        return _substitute(self.code, [names(operand) for operand in self.operands])


def _substitute(code: str, names: Sequence[str]) -> str:
    return re.sub(r"\$(\d)", lambda match: names[int(match[1])], code)


_file_numbers = itertools.count()


@dataclass(frozen=True)
class Program:
    """A function or module.

    Attributes:
        storages: the storages of the inputs.
        inputs: the inputs.
        steps: the steps.
        outputs: the numbers of the returned values.
        container: the container of the outputs, one of CONTAINERS; "single" for a value without container.
        mode: "plain"; "no_grad"; "train" (with a backward pass).
        change: the change of parameters and buffers between calls: "none", "copy" (new values in place), "data" (p.data = other),
            "replace" (another Parameter object).
        resized: the inputs of a call with other sizes, or None.
        dynamic: True if sizes are symbolic from the first call.
    """

    storages: tuple[Storage, ...]
    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    container: str = "tuple"
    mode: str = "plain"
    change: str = "none"
    resized: tuple[Input, ...] | None = None
    dynamic: bool = False

    @property
    def is_module(self) -> bool:
        return any(item.role != "argument" for item in self.inputs)

    @property
    def leaves(self) -> list[int]:
        """The numbers of the inputs that are leaves and require grad, each tensor once."""
        return [
            number for number, item in enumerate(self.inputs) if item.same_as is None and self.storages[item.storage].gradient == "leaf"
        ]

    @property
    def is_random(self) -> bool:
        return any(step.random for step in self.steps)

    def name(self, value: int) -> str:
        """Returns a value's name in the source text."""
        if value >= len(self.inputs):
            return f"v{value - len(self.inputs)}"
        return f"x{value}" if self.inputs[value].role == "argument" else f"self.x{value}"

    def source(self) -> str:
        """Returns the source of a function `program`, or of a class `Program` if there are parameters or buffers, without their values."""
        arguments = [self.name(index) for index, item in enumerate(self.inputs) if item.role == "argument"]
        if self.is_module:
            lines = ["class Program(torch.nn.Module):", f"    def forward({', '.join(['self', *arguments])}):"]
        else:
            lines = [f"def program({', '.join(arguments)}):"]
        indent = "        " if self.is_module else "    "
        value = len(self.inputs)
        for step in self.steps:
            results = ", ".join(self.name(value + index) for index in range(step.results))
            lines.append(f"{indent}{results + ' = ' if results else ''}{step.text(self.name)}")
            value += step.results
        lines.append(f"{indent}return {self._returned()}")
        return "\n".join(lines) + "\n"

    def _returned(self) -> str:
        names = [self.name(output) for output in self.outputs]
        if self.container == "single":
            return names[0]
        if self.container == "dict":
            return "{" + ", ".join(f'"{index}": {name}' for index, name in enumerate(names)) + "}"
        inside = ", ".join(names)
        return f"[{inside}]" if self.container == "list" else f"({inside}{',' if len(names) == 1 else ''})"

    def pack(self, values: Sequence[Any]) -> Any:
        """Returns the program's result from its values."""
        chosen = [values[output] for output in self.outputs]
        if self.container == "single":
            return chosen[0]
        if self.container == "dict":
            return {str(index): value for index, value in enumerate(chosen)}
        return chosen if self.container == "list" else tuple(chosen)

    def callable(self) -> Any:
        """Executes the source. Returns the function, or a module without its parameters."""
        namespace: dict[str, Any] = {"torch": torch, "F": torch.nn.functional, "inf": float("inf")}
        # TorchDynamo remembers changed sizes by file and line, so each program needs a file name of its own.
        file = f"<random program {next(_file_numbers)}>"
        exec(compile(self.source(), file, "exec"), namespace)
        return namespace["Program"]() if self.is_module else namespace["program"]


class World:
    """The tensors of a program's calls. Each call has new arguments; parameters and buffers persist."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.function = program.callable()
        self.inputs = program.inputs
        self.storages: list[torch.Tensor] = []
        self.leaves: list[torch.Tensor] = []
        self.tensors: list[torch.Tensor] = []

    def prepare(self, call: int, inputs: Sequence[Input] | None = None) -> list[torch.Tensor]:
        """Makes the tensors of a call, and returns its arguments."""
        program = self.program
        self.inputs = program.inputs if inputs is None else tuple(inputs)
        persistent = {item.storage for item in self.inputs if item.role != "argument"} if call else set()
        change = program.change if call else "data"
        storages, self.leaves = [], []
        for number, storage in enumerate(program.storages):
            if number in persistent and change in ("none", "copy"):
                memory = self.storages[number]
                if change == "copy":
                    with torch.no_grad():
                        memory.copy_(torch.tensor(storage.values(call), dtype=storage.dtype))
            else:
                memory = torch.tensor(storage.values(call), dtype=storage.dtype)
                if storage.gradient == "computed":
                    self.leaves.append(memory.requires_grad_())
                    memory = memory * 1
            storages.append(memory)
        self.storages = storages
        tensors: list[torch.Tensor] = []
        for number, item in enumerate(self.inputs):
            tensors.append(tensors[item.same_as] if item.same_as is not None else self._tensor(number, item, call, change))
        self.tensors = tensors
        self.leaves += [tensors[number] for number in program.leaves]
        return [tensor for tensor, item in zip(tensors, self.inputs, strict=True) if item.role == "argument"]

    def _tensor(self, number: int, item: Input, call: int, change: str) -> torch.Tensor:
        storage = self.program.storages[item.storage]
        memory, is_leaf = self.storages[item.storage], storage.gradient == "leaf"
        if item.role != "argument" and call and change in ("none", "copy"):
            return self.tensors[number]
        tensor = torch.as_strided(memory, item.shape, item.stride, item.offset)
        tensor = tensor.conj() if item.conj else tensor
        if item.role == "argument":
            return tensor.requires_grad_() if is_leaf else tensor
        name = f"x{number}"
        if call and change == "data":
            getattr(self.function, name).data = tensor
        elif item.role == "parameter":
            setattr(self.function, name, torch.nn.Parameter(tensor, requires_grad=is_leaf))
        else:
            self.function.register_buffer(name, tensor)
        return getattr(self.function, name)


@functools.lru_cache(maxsize=100_000)
def _compiled(code: str, operands: int, is_expression: bool) -> Any:
    text = _substitute(code, [f"a{index}" for index in range(operands)])
    return compile(text, "<step>", "eval" if is_expression else "exec")


def evaluate(code: str, operands: Sequence[Any], is_expression: bool = True) -> Any:
    """Runs a step's code on operands."""
    names = {f"a{index}": operand for index, operand in enumerate(operands)}
    namespace = {"torch": torch, "F": torch.nn.functional, "inf": float("inf"), **names}
    return eval(_compiled(code, len(operands), is_expression), namespace)


def reproducer(program: Program) -> str:
    """Returns a script that runs the program in eager mode and compiled, as `observed.observe` does, and prints the results."""
    sizes = [(0, program.inputs), (1, program.inputs)] + ([(2, program.resized)] if program.resized is not None else [])
    lines = ["import torch", "from torch.nn import functional as F", "from torch.utils._pytree import tree_leaves", ""]
    lines += ["inf, nan = float('inf'), float('nan')", "", "", program.source(), ""]
    # The storages that persist between calls.
    persistent = {item.storage for item in program.inputs if item.role != "argument" and program.change in ("none", "copy")}
    lines += ["def tensors(call, memory):", "    leaves = []"]
    for number, storage in enumerate(program.storages):
        values = ", ".join(f"{call}: {storage.values(call)}" for call, _ in sizes)
        lines.append(f"    s{number} = torch.tensor({{{values}}}[call], dtype={storage.dtype})")
        if number in persistent:
            lines += [f"    s{number} = memory.setdefault({number}, s{number}){f'.copy_(s{number})' * (program.change == 'copy')}"]
        if storage.gradient == "computed":
            lines += [f"    leaves.append(s{number}.requires_grad_())", f"    s{number} = s{number} * 1"]
    for number, item in enumerate(program.inputs):
        views = {call: (inputs[number].shape, inputs[number].stride, inputs[number].offset) for call, inputs in sizes}
        lines.append(f"    x{number} = {_constructed(program, item, views)}")
    names = [f"x{number}" for number in range(len(program.inputs))]
    lines += [f"    return [{', '.join(names)}], leaves", "", "", "results = []", "for backend in ('eager', 'dynaxla'):"]
    lines += [f"    function = {'Program()' if program.is_module else 'program'}"]
    dynamic = ", dynamic=True" if program.dynamic else ""
    lines += ["    memory = {}", "    compiled = function", "    if backend != 'eager':"]
    lines += [f"        compiled = torch.compile(function, backend=backend, fullgraph=True{dynamic})"]
    again = ["(1, True)"] if program.mode != "train" else []
    calls = ["(0, False)", "(1, False)", *again, *["(2, False)"] * (program.resized is not None)]
    lines += [f"    for call, again in [{', '.join(calls)}]:"]
    return "\n".join(lines + ["        " + line for line in _call(program)] + ["print(*results, sep='\\n')"]) + "\n"


def _constructed(program: Program, item: Input, views: dict[int, tuple[Any, ...]]) -> str:
    if item.same_as is not None:
        return f"x{item.same_as}"
    texts = {call: ", ".join(map(str, view)) for call, view in views.items()}
    view = texts[0] if len(set(texts.values())) == 1 else f"*{{{', '.join(f'{call}: ({text})' for call, text in texts.items())}}}[call]"
    text = f"s{item.storage}.as_strided({view})" + (".conj()" if item.conj else "")
    is_leaf = program.storages[item.storage].gradient == "leaf"
    if item.role == "parameter":
        return f"torch.nn.Parameter({text}, requires_grad={is_leaf})"
    return text + (".requires_grad_()" if is_leaf and item.role == "argument" else "")


def _call(program: Program) -> list[str]:
    """Returns the source lines of one call."""
    lines = ["if not again:", "    t, leaves = tensors(call, memory)"]
    for number, item in enumerate(program.inputs):
        if item.role == "argument":
            continue
        name, new = f"function.x{number}", f"t[{number}]"
        make = f"{name} = {new}" if item.role == "parameter" else f"function.register_buffer('x{number}', {new})"
        later = {"none": "pass", "copy": "pass", "data": f"{name}.data = {new}.data"}.get(program.change, make)
        lines += ["    if call == 0:", f"        {make}", "    else:", f"        {later}", f"    t[{number}] = {name}"]
    lines += ["torch.manual_seed(0)"] * program.is_random
    arguments = [f"t[{number}]" for number, item in enumerate(program.inputs) if item.role == "argument"]
    call = f"result = compiled({', '.join(arguments)})"
    lines += ["with torch.no_grad():", f"    {call}"] if program.mode == "no_grad" else [call]
    lines += ["results.append([backend, call, result, [x.detach().clone() for x in t]])"]
    if program.mode == "train":
        lines += [f"leaves += [{', '.join(f't[{number}]' for number in program.leaves)}]"]
        lines += ["sources = [x for x in t + tree_leaves(result) if x.grad_fn is not None]"]
        lines += ["numbers = [torch.arange(x.numel(), dtype=torch.float64) % 5 * 0.5 - 1 for x in sources]"]
        lines += ["if sources:"]
        lines += ["    torch.autograd.backward(sources, [n.reshape(x.shape).to(x.dtype) for n, x in zip(numbers, sources)])"]
        lines += ["results[-1].append([leaf.grad for leaf in leaves])", "for leaf in leaves:", "    leaf.grad = None"]
    return lines
