"""The context that the interpreter passes to lowerings. Most of its parts are defined in modules of their own."""

from __future__ import annotations

import copy
from typing import Any

import torch
from jax import Array
from jax.sharding import NamedSharding
from torch.fx import Node

from ..runtime.collective_agreement import ProgramCollectives
from ..runtime.process_networks import Members
from .checks import Checks
from .cpu.vectorized_reductions import extrema, summing
from .eager import eager_on
from .epilogue import Claims
from .implementations import Choice, expected
from .metadata import SymbolValues
from .random_keys import RandomKeys
from .settings import EXACT, Settings


class Context:
    """The interpreter's state, passed to lowerings that have a `ctx` parameter. One context lives as long as one trace.

    Attributes:
        platform: "cpu", "cuda", "rocm", "tpu", or PORTABLE (see eager.py).
        eager: The behaviour of eager mode on that platform.
        settings: The numerical settings of this trace.
        choose: Chooses the implementation for a problem; see implementations.py.
        sum, max, min: Reductions over dimensions, which disappear from the result.
        node: The FX node that is being lowered.
        values: The values of the nodes so far.
        checks: The conditions that the program verifies while it runs.
        claims: Later nodes whose values were computed together with an earlier node.
        kernels: The torch kernels that the program calls: each one's node, and its arguments that are no tensors.
        agreement: The record of torch's collectives in the program, on which the processes must agree.
        members: The processes over which XLA's own collectives run; None if torch's collectives are called.
        turn: The value on which the next kernel with a side effect, or the next collective, depends.
        where: On a mesh, the sharding of a value that is replicated on every device.
    """

    def __init__(
        self,
        platform: str,
        settings: Settings = EXACT,
        symbols: SymbolValues | None = None,
        key: Array | None = None,
        choose: Choice = expected,
        reorders: bool = False,
        drawn: Array | int = 0,
        where: NamedSharding | None = None,
        members: Members | None = None,
    ) -> None:
        """Starts a context for one trace.

        Args:
            key: The JAX PRNG key from which the graph's random numbers are derived.
            drawn: The number of keys that other programs derive from `key` before this one.
            reorders: True if passes/jaxpr/transposes.py will process the traced program.
        """
        self.platform = platform
        self.eager = eager_on(platform)
        self.settings = settings
        self.choose = choose
        self.sum = summing(reorders)
        self.max, self.min = extrema(reorders)
        self.node: Node
        self.kernels: list[tuple[str, Any]] = []
        self.agreement = ProgramCollectives()
        self.where = where
        self.members = members
        self._symbols = symbols or SymbolValues()
        self._begin(key, drawn)

    def _begin(self, key: Array | None, drawn: Array | int = 0) -> None:
        self.values: dict[Node, Any] = {}
        self.checks = Checks()
        self.claims = Claims()
        self.turn: Array | None = None
        self._keys = None if key is None else RandomKeys(key, drawn)

    def nested(self, key: Array | None) -> Context:
        """Returns a context for a graph that a control-flow op calls, with its own values and checks, and with `key` for its random
        numbers.
        """
        inner = copy.copy(self)
        inner.members = None  # XLA may run an inner graph any number of times, or never, so its collectives are torch's
        inner._begin(key)
        return inner

    def key(self) -> Array:
        """Returns a fresh JAX PRNG key, different for each random op of the graph and for each call of the program."""
        assert self._keys is not None, f"{self.node.target} draws random numbers but lacks torch.Tag.nondeterministic_seeded"
        return next(self._keys)

    @property
    def draws(self) -> int:
        """The number of keys that the graph has taken so far."""
        return 0 if self._keys is None else self._keys.count

    def require(self, condition: Array, error: type[Exception], message: str) -> None:
        """Makes the call of the program raise error(message) unless all of `condition` is true; in that case the call mutates nothing.

        On a GPU, where reading the condition would need a synchronization, a later call raises the error, as CUDA's own assertions do.
        """
        self.checks.require(condition, error, message)

    @property
    def output(self) -> Any:
        """Metadata of the current node's result: a TensorSpec, or a tuple of them (None where the op returns None)."""
        return self.spec(self.node)

    def input(self, index: int) -> Any:
        """Returns the metadata of a positional argument of the current node: a TensorSpec, a list of them, or None."""
        return torch.fx.node.map_arg(self.node.args[index], self.spec)

    def spec(self, node: Node) -> Any:
        """Returns the metadata of any node's result."""
        return self._symbols.concrete(node.meta["val"])

    def spec_of(self, argument: Any) -> Any:
        """Returns the metadata of an argument of the current node: a TensorSpec for a tensor, a number for a size, else the argument
        itself.
        """
        return self._symbols.concrete(argument.meta.get("val")) if isinstance(argument, Node) else argument
