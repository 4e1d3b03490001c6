"""Random programs: a step that reads counters and other numbers from its state and its arguments, and the calls of this step."""

from __future__ import annotations

import linecache
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

import dynaxla

X = torch.linspace(-2, 3, 6)
_FUNCTIONS = [torch.sin, lambda y: y * 2, lambda y: -y]
_INTEGERS = ("state.i", "state.j", "n", "state.items[0]")
_FLOATS = ("state.f", "state.g", "t", "state.table['w']")
_FILE = "<step>"


class Program:
    """A random step.

    Attributes:
        source: the step's code. It reads and writes `state`.
        calls: the arguments (n, t) of each call.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        lines = [line for _ in range(self._random.randint(3, 7)) for line in self._statement(1)]
        if self._random.random() < 0.6:
            lines.insert(0, "    state.i += 1")
        result = self._choose("y", f"(y, {self._float(1)})", f"{{'y': y, 'i': {self._integer(1)}}}", "[y, state.i, state.f]")
        self.source = "\n".join(["def step(x, n, t):", "    y = x", *lines, f"    return {result}", ""])
        self.calls = self._make_calls()

    def make(self) -> tuple[Callable[..., Any], SimpleNamespace]:
        """Returns the step and its state."""
        state = SimpleNamespace(i=0, j=1, f=0.5, g=1.0, items=[2, 0], table={"w": 0.25}, buffer=torch.zeros(6), name="a")
        names: dict[str, Any] = {"state": state, "torch": torch, "functions": _FUNCTIONS}
        linecache.cache[_FILE] = len(self.source), None, self.source.splitlines(True), _FILE
        exec(compile(self.source, _FILE, "exec"), names)
        return names["step"], state

    def _make_calls(self) -> list[tuple[int, float]]:
        kind, n = self._random.random(), self._random.randint(0, 3)
        calls = []
        for _ in range(18):
            n = n + 1 if kind < 0.5 else n if kind < 0.65 else self._random.randint(0, 5)
            calls.append((n, round(self._random.uniform(-1, 2), 2) if self._random.random() < 0.6 else 0.5))
        if self._random.random() < 0.3:
            calls = [(calls[0][0], t) for _, t in calls]
        if self._random.random() < 0.3:
            calls = [(n, calls[0][1]) for n, _ in calls]
        return calls

    def _choose(self, *values: str) -> str:
        return self._random.choice(values)

    def _integer(self, depth: int = 0) -> str:
        kind = self._random.random()
        if depth > 2 or kind < 0.45:
            return self._choose(*_INTEGERS)
        if kind < 0.6:
            return self._choose("0", "1", "2", "3", "5")
        operator = self._choose("+", "-", "*", "//", "%")
        second = self._choose("2", "3", "4") if operator in ("//", "%") else self._integer(depth + 1)
        return f"({self._integer(depth + 1)} {operator} {second})"

    def _float(self, depth: int = 0) -> str:
        kind = self._random.random()
        if depth > 2 or kind < 0.4:
            return self._choose(*_FLOATS)
        if kind < 0.5:
            return self._choose("0.5", "1.0", "2.0", "0.1", "-1.5")
        if kind < 0.6:
            number, integer = self._float(depth + 1), self._integer(2)
            return self._choose(f"float({integer})", f"({integer} / 3)", f"abs({number})", f"min({number}, 1.5)", f"max({number}, -1)")
        if kind < 0.65:
            return f"(0.9 ** ({self._integer(2)} % 5))"
        return f"({self._float(depth + 1)} {self._choose('+', '-', '*')} {self._float(depth + 1)})"

    def _condition(self) -> str:
        integer, number = self._integer(1), self._float(1)
        return self._choose(
            *[f"{integer} % {self._choose('2', '3', '4')} == {self._choose('0', '1')}"] * 4,
            *[f"{integer} {self._choose('<', '>', '<=', '>=', '==', '!=')} {self._choose('1', '3', '5', '8')}"] * 3,
            *[f"{number} {self._choose('<', '>')} {self._choose('0.0', '0.5', '1.0', '2.0')}"] * 2,
            *(f"{self._choose(*_INTEGERS)} in (1, 4, 6)", "hasattr(state, 'm')", f"isinstance({self._choose(*_INTEGERS)}, int)", integer),
        )

    def _tensor(self) -> str:
        integer, number = self._integer(1), self._float()
        return self._choose(
            *[f"y * {number}"] * 5,
            *[f"y + {number}"] * 3,
            *[f"y * {integer}"] * 2,
            *(f"torch.tensor({number}) + y", f"torch.tensor({integer}) + y", f"torch.where(y > {number}, y, {self._float(1)})"),
            *(f"y.roll({integer}, 0)", f"y.clamp(max={number})", f"functions[{integer} % 3](y)", f"y[:({integer}) % 7 + 1].sum() + y"),
            *("y + state.buffer", f"y - torch.full_like(y, {number})"),
        )

    def _statement(self, indent: int, depth: int = 0) -> list[str]:
        kind, space = self._random.random(), "    " * indent
        simple = (
            (0.22, f"{self._choose(*_INTEGERS[:2], 'state.items[0]')} = {self._integer()} % 97"),
            (0.30, f"{self._choose(*_INTEGERS[:2])} += 1"),
            (0.42, f"{self._choose('state.f', 'state.g', _FLOATS[3])} = ({self._float()}) % 7"),
            (0.62, f"y = ({self._tensor()}).clamp(-50, 50)"),
            (0.67, f"state.buffer.mul_(0.5).add_(y.detach() if y.shape == state.buffer.shape else 0.1, alpha={self._float(1)})"),
            (0.70, f"state.name = {self._choose(repr('a'), repr('b'))}"),
            (0.73, f"state.m = {self._choose(self._integer(), self._float())}"),
        )
        for limit, line in simple:
            if kind < limit:
                return [space + line]
        if kind < 0.75:
            return [f"{space}if hasattr(state, 'm'):", f"{space}    del state.m"]
        if kind < 0.78:
            return [f"{space}for k in range({self._integer(1)} % 3):", f"{space}    y = y + k"]
        if depth == 2:
            return [f"{space}y = y + 1"]
        lines = [f"{space}if {self._condition()}:", *self._block(indent + 1, depth + 1)]
        return lines if self._random.random() < 0.5 else [*lines, f"{space}else:", *self._block(indent + 1, depth + 1)]

    def _block(self, indent: int, depth: int) -> list[str]:
        return [line for _ in range(self._random.randint(1, 2)) for line in self._statement(indent, depth)]


def difference(seed: int) -> str:
    """Reports the first call whose result, exception or state differs from eager mode; returns "" if there is none."""
    program = Program(seed)
    eager, expected_state = program.make()
    step, state = program.make()
    compiled = dynaxla.compile_step(step)
    for call, (n, t) in enumerate(program.calls):
        expected = _outcome(eager, n, t), _copied(vars(expected_state))
        found = _outcome(compiled, n, t), _copied(vars(state))
        if not _are_equal(found, expected):
            return f"seed {seed}, call {call} with {n}, {t}:\n{program.source}\nexpected {expected}\nfound {found}"
    return ""


def _outcome(step: Callable[..., Any], n: int, t: float) -> Any:
    try:
        return _copied(step(X, n, t))
    except Exception as error:
        return type(error).__name__, str(error)


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, (list, tuple)) else value


def _are_equal(one: Any, other: Any) -> bool:
    """True if types and values are equal, floats and tensors up to rounding."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_are_equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.allclose(one, other, rtol=1e-4, atol=1e-4, equal_nan=True)
    return one == other or (isinstance(one, float) and abs(one - other) <= 1e-6 * abs(other) + 1e-9)
