"""Parses the HLO text of a compiled program into computations and instructions."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

# Opcodes of instructions without work.
NO_WORK = frozenset(["parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "replica-id"])
# Opcodes whose result has the operand's numbers, in another order or dtype.
_MOVES = frozenset(["copy", "transpose", "reshape", "convert", "copy-start"])

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_CALLED = re.compile(r"\b(?:calls|to_apply)=%?([\w.\-]+)")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')


@dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
        name: The instruction's name.
        opcode: The opcode, such as "fusion".
        called: The name of the computation that the instruction calls or applies, as a fusion, a call or a reduction does; otherwise "".
        target: The target of a custom call; otherwise "".
        line: The text of the line after the "=".
    """

    name: str
    opcode: str
    called: str
    target: str
    line: str


@dataclass(frozen=True)
class Module:
    """A program: its entry computation, and all computations by name."""

    entry: list[Instruction]
    computations: dict[str, list[Instruction]]

    @staticmethod
    def parse(text: str) -> Module:
        """Parses HLO text. Raises: ValueError for text without an entry computation."""
        computations: dict[str, list[Instruction]] = {}
        entry, current = None, None
        for line in text.splitlines():
            if start := _COMPUTATION.match(line):
                current = computations.setdefault(start[2], [])
                entry = current if start[1] else entry
            elif current is not None and (match := _INSTRUCTION.match(line)):
                current.append(_instruction(match[1], match[2]))
            elif line == "}":
                current = None
        if entry is None:
            raise ValueError("the text has no entry computation")
        return Module(entry, computations)

    @property
    def launched(self) -> list[Instruction]:
        """The instructions that a run launches: fusions, custom calls, copies, loops, and those of called computations."""
        return self._launched(self.entry)

    def _launched(self, computation: list[Instruction]) -> list[Instruction]:
        launched = []
        for instruction in computation:
            if instruction.opcode == "call":
                launched += self._launched(self.computations[instruction.called])
            elif instruction.opcode not in NO_WORK and not instruction.opcode.endswith("-done"):
                launched.append(instruction)
        return launched

    def moves(self, instruction: Instruction) -> bool:
        """True if an instruction only moves or casts numbers: a copy, transpose or cast, or a fusion of nothing else."""
        if instruction.opcode != "fusion":
            return instruction.opcode in _MOVES
        opcodes = {inner.opcode for inner in self.computations[instruction.called]} - NO_WORK
        return bool(opcodes) and opcodes <= _MOVES


@dataclass(frozen=True)
class Figures:
    """Numbers of launches of a program.

    Attributes:
        kernels: The number of all launches.
        moves: The number of launches that only copy, transpose or cast.
        calls: The number of custom calls, by target.
    """

    kernels: int
    moves: int
    calls: dict[str, int]

    @staticmethod
    def of(text: str) -> Figures:
        module = Module.parse(text)
        launched = module.launched
        calls = Counter(item.target for item in launched if item.opcode == "custom-call")
        return Figures(len(launched), sum(map(module.moves, launched)), dict(sorted(calls.items())))


def _instruction(name: str, rest: str) -> Instruction:
    opcode = _after_type(rest).partition("(")[0]
    called, target = _CALLED.search(rest), _TARGET.search(rest)
    return Instruction(name, opcode, called[1] if called else "", target[1] if target else "", rest)


def _after_type(text: str) -> str:
    """Returns the text after the result's type, which is a word or a tuple in parentheses."""
    if not text.startswith("("):
        return text.partition(" ")[2]
    depth = 0
    for index, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth == 0:
            return text[index + 1 :].lstrip()
    raise ValueError(f"the parentheses of a type are not closed: {text[:80]}")
