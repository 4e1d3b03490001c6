"""Random draws that a step makes again: `torch.utils.checkpoint` restores the generator's state before it computes a region again.

While a step is recorded nothing is drawn, so torch's generators are moved on by hand, by one number for each draw. A draw that finds a
generator in a state in which an earlier one found it is that draw once more, and has its numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten

from ..runtime import devices
from ..torch_ops import aten

# What these draw depends on shapes alone; `x` of an op in place is not read.
_IN_PLACE = ("bernoulli_.float", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_")
_OF_SHAPES = frozenset(
    [*_IN_PLACE, "bernoulli.p", "normal.float_float", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm"]
)


class Draws:
    """The draws of one recording, by the generator's state before each."""

    def __init__(self) -> None:
        self._first: dict[tuple[Any, ...], tuple[Node, Any]] = {}

    def place(self, op: Any, args: Any, kwargs: Any, device: torch.device) -> tuple[Any, ...]:
        """What a draw is known by. The generator goes on by one number."""
        tensors = [item for item in tree_flatten((args, kwargs))[0] if isinstance(item, torch.Tensor)]
        others = [str(item) for item in tree_flatten((args, kwargs))[0] if not isinstance(item, torch.Tensor)]
        with _disable_current_modes():
            generator = _generator(device)
            state = generator.get_state().numpy().tobytes()
            torch.empty(1, device=device).uniform_(generator=generator)
        return (op, device, state, *((tensor.shape, tensor.dtype) for tensor in tensors), *others)

    def first(self, place: tuple[Any, ...]) -> tuple[Node, Any] | None:
        """The earlier draw at this place: its node, and what it gave."""
        return self._first.get(place)

    def keep(self, place: tuple[Any, ...], node: Node, result: Any) -> None:
        """Note the node and the result of a draw that was made at a place."""
        self._first[place] = node, result


def draws(op: Any, args: Sequence[Any], kwargs: Any) -> bool:
    """Whether a call of an op takes numbers from torch's generator."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    for index, argument in enumerate(op._schema.arguments):
        if argument.name == "dropout_p":
            return (args[index] if index < len(args) else kwargs.get(argument.name, argument.default_value)) != 0
    return True


def depends_on_values(op: Any) -> bool:
    """Whether the results depend on more than the numbers drawn, and on shapes."""
    name = op._schema.name.removeprefix("aten::")
    return name not in _OF_SHAPES and f"{name}.{op._schema.overload_name}" not in _OF_SHAPES


def is_same(one: Any, other: Any, aliases: dict[Node, Node]) -> bool:
    """Whether two nodes are computed in the same way from the same inputs. aliases: for draws made again, the first."""
    if isinstance(one, Node) and isinstance(other, Node):
        one, other = _origin(one, aliases), _origin(other, aliases)
        if one is other:
            return True
        if one.op != "call_function" or one.target is not other.target or one.kwargs.keys() != other.kwargs.keys():
            return False
        return is_same((*one.args, *one.kwargs.values()), (*other.args, *other.kwargs.values()), aliases)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(is_same(mine, theirs, aliases) for mine, theirs in zip(one, other, strict=True))
    return type(one) is type(other) and bool(one == other)


def _origin(node: Node, aliases: dict[Node, Node]) -> Node:
    """The node whose value this one gives as it is."""
    while node in aliases or node.target in (aten.alias.default, aten.detach.default):
        node = aliases[node] if node in aliases else node.args[0]
    return node


@contextlib.contextmanager
def kept_generators() -> Iterator[None]:
    """Inside, torch's default generators may be moved on: afterwards they are as before."""
    found = [torch.default_generator]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found += torch.cuda.default_generators
    states = [generator.get_state() for generator in found]
    try:
        yield
    finally:
        for generator, state in zip(found, states, strict=True):
            generator.set_state(state)


def _generator(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[devices.with_index(device).index] if device.type == "cuda" else torch.default_generator
