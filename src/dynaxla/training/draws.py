"""Random draws that a step repeats: `torch.utils.checkpoint` restores the generator's state before it recomputes a region.

Fake tensors draw nothing, so a recording advances torch's generators explicitly, by one number for each draw. A draw that finds a generator
in the same state as an earlier draw repeats that draw, and gets the same numbers.
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

# Ops whose draws depend on shapes alone; an in-place op does not read its `self`.
_IN_PLACE = ("bernoulli_.float", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_")
_OF_SHAPES = frozenset(
    [*_IN_PLACE, "bernoulli.p", "normal.float_float", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm"]
)


class Draws:
    """The draws of one recording, keyed by the generator's state before each."""

    def __init__(self) -> None:
        self._first: dict[tuple[Any, ...], tuple[Node, Any]] = {}

    def place(self, op: Any, args: Any, kwargs: Any, device: torch.device) -> tuple[Any, ...]:
        """Returns the key of a draw, which includes the generator's state, and advances the generator by one number."""
        tensors = [item for item in tree_flatten((args, kwargs))[0] if isinstance(item, torch.Tensor)]
        others = [str(item) for item in tree_flatten((args, kwargs))[0] if not isinstance(item, torch.Tensor)]
        with _disable_current_modes():
            generator = _generator(device)
            state = generator.get_state().numpy().tobytes()
            torch.empty(1, device=device).uniform_(generator=generator)
        return (op, device, state, *((tensor.shape, tensor.dtype) for tensor in tensors), *others)

    def first(self, place: tuple[Any, ...]) -> tuple[Node, Any] | None:
        """Returns the node and the result of the earlier draw with this key; None if there was none."""
        return self._first.get(place)

    def keep(self, place: tuple[Any, ...], node: Node, result: Any) -> None:
        """Notes the node and the result of the first draw with this key."""
        self._first[place] = node, result


def draws(op: Any, args: Sequence[Any], kwargs: Any) -> bool:
    """True if a call of an op draws numbers from torch's generator."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    for index, argument in enumerate(op._schema.arguments):
        if argument.name == "dropout_p":
            return (args[index] if index < len(args) else kwargs.get(argument.name, argument.default_value)) != 0
    return True


def depends_on_values(op: Any) -> bool:
    """True if an op's results depend on its operands' values, besides their shapes and the numbers drawn."""
    name = op._schema.name.removeprefix("aten::")
    return name not in _OF_SHAPES and f"{name}.{op._schema.overload_name}" not in _OF_SHAPES


def is_same(one: Any, other: Any, aliases: dict[Node, Node]) -> bool:
    """True if two nodes are computed in the same way from the same inputs. `aliases` maps each repeated draw to the first one."""
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
    """Returns the node whose value this one passes on unchanged."""
    while node in aliases or node.target in (aten.alias.default, aten.detach.default):
        node = aliases[node] if node in aliases else node.args[0]
    return node


@contextlib.contextmanager
def kept_generators() -> Iterator[None]:
    """Restores the state of torch's default generators on exit."""
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
