"""Finds random draws that a step repeats. `torch.utils.checkpoint` restores the generator's state before it recomputes a region.

A *draw* is a call of a random op. Random ops on fake tensors do not advance torch's generator. So the recording itself draws one number
from the generator at each draw. If two draws of an op begin with the generator in the same state, the later draw repeats the earlier draw,
and must give the same numbers.
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

# Random ops whose results depend on no tensor's values. The in-place ops do not read their `self`.
_IN_PLACE = ("bernoulli_.float", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_")
_VALUE_INDEPENDENT = frozenset(
    [*_IN_PLACE, "bernoulli.p", "normal.float_float", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm"]
)


class Draws:
    """The first draw with each key in one recording. `next_key` returns the key of a draw."""

    def __init__(self) -> None:
        self._first: dict[tuple[Any, ...], tuple[Node, Any]] = {}

    def next_key(self, op: Any, args: Any, kwargs: Any, device: torch.device) -> tuple[Any, ...]:
        """Returns the key of a draw, and advances the generator by one number.

        The key has the op, the device, the generator's state before the draw, the shapes and dtypes of tensors, and the other arguments.
        Draws with equal keys give the same numbers, unless the op depends on tensors' values (see `depends_on_values`).
        """
        tensors = [item for item in tree_flatten((args, kwargs))[0] if isinstance(item, torch.Tensor)]
        others = [str(item) for item in tree_flatten((args, kwargs))[0] if not isinstance(item, torch.Tensor)]
        with _disable_current_modes():
            generator = _generator(device)
            state = generator.get_state().numpy().tobytes()
            torch.empty(1, device=device).uniform_(generator=generator)
        return (op, device, state, *((tensor.shape, tensor.dtype) for tensor in tensors), *others)

    def first(self, key: tuple[Any, ...]) -> tuple[Node, Any] | None:
        """Returns the node and the result of the first draw with this key; None if no earlier draw has the key."""
        return self._first.get(key)

    def add(self, key: tuple[Any, ...], node: Node, result: Any) -> None:
        """Stores the node and the result of the first draw with this key."""
        self._first[key] = node, result


def is_random_draw(op: Any, args: Sequence[Any], kwargs: Any) -> bool:
    """True if a call of an op draws numbers from torch's generator. A call with `dropout_p` 0 does not."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    for index, argument in enumerate(op._schema.arguments):
        if argument.name == "dropout_p":
            return (args[index] if index < len(args) else kwargs.get(argument.name, argument.default_value)) != 0
    return True


def depends_on_values(op: Any) -> bool:
    """True if the results of a random op depend on the values of its operands, not only on their shapes."""
    name = op._schema.name.removeprefix("aten::")
    return name not in _VALUE_INDEPENDENT and f"{name}.{op._schema.overload_name}" not in _VALUE_INDEPENDENT


def have_equal_values(first: Any, second: Any, first_draws: dict[Node, Node], shared: list[Node]) -> bool:
    """True if two arguments of nodes have the same value: equal constants, or nodes that the same ops compute from the same nodes.

    Args:
        first: a node, a constant, or a sequence of nodes and constants.
        second: likewise.
        first_draws: maps the node of each repeated draw to the node of the first draw.
        shared: the function appends the nodes on which both arguments depend. The values are equal only if nothing has written to the
            tensors of these nodes in the meantime.
    """
    if isinstance(first, Node) and isinstance(second, Node):
        first, second = _origin(first, first_draws), _origin(second, first_draws)
        if first is second:
            shared.append(first)
            return True
        if first.op != "call_function" or first.target is not second.target or first.kwargs.keys() != second.kwargs.keys():
            return False
        return have_equal_values((*first.args, *first.kwargs.values()), (*second.args, *second.kwargs.values()), first_draws, shared)
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(
            have_equal_values(*items, first_draws, shared) for items in zip(first, second, strict=True)
        )
    return type(first) is type(second) and bool(first == second)


def _origin(node: Node, first_draws: dict[Node, Node]) -> Node:
    """Returns the node that computes the value of `node`: skips aten.alias, aten.detach and repeated draws."""
    while node in first_draws or node.target in (aten.alias.default, aten.detach.default):
        node = first_draws[node] if node in first_draws else node.args[0]
    return node


@contextlib.contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Restores the state of torch's default generators on exit."""
    generators = [torch.default_generator]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        generators += torch.cuda.default_generators
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _generator(device: torch.device) -> torch.Generator:
    """Returns torch's default generator for a device."""
    return torch.cuda.default_generators[devices.with_index(device).index] if device.type == "cuda" else torch.default_generator
