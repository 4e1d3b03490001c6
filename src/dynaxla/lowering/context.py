"""What a lowering may ask besides its arguments. Each of its parts is made in a module of its own."""

from __future__ import annotations

import copy
from typing import Any

import torch
from jax import Array
from jax.sharding import NamedSharding
from torch.fx import Node

from ..runtime.networks import Members
from ..runtime.same_collectives import Agreement
from .checks import Checks
from .cpu.folding import extrema, summing
from .eager import eager_on
from .epilogue import Claims
from .forms import Choice, expected
from .metadata import SymbolValues
from .random_keys import RandomKeys
from .settings import EXACT, Settings


class Context:
    """Passed to lowerings that have a `ctx` parameter. One lives as long as one trace.

    Attributes: platform ("cpu", "cuda", "rocm", "tpu", or PORTABLE: see eager.py); eager (what eager mode does there); settings; choose
    (the form for a problem: see forms.py); sum, max, min (over dimensions, which disappear); node (the FX node being lowered); values (of
    the nodes so far); checks (what the program verifies while it runs); claims (later nodes that are computed already); kernels (what it
    calls of torch's: node and arguments that are no tensors); agreement (on the collectives that it calls of torch's); members (the
    processes whose collectives are XLA's own, if they are to be); turn (what the next kernel with an effect, or collective, waits for);
    where (on a mesh: the sharding of what is whole on each device).
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
        """key: what random numbers come from. drawn: how many keys other programs take of it first.
        reorders: whether cpu/transposes.py will see the traced program."""
        self.platform = platform
        self.eager = eager_on(platform)
        self.settings = settings
        self.choose = choose
        self.sum = summing(reorders)
        self.max, self.min = extrema(reorders)
        self.node: Node
        self.kernels: list[tuple[str, Any]] = []
        self.agreement = Agreement()
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
        """For a graph that a control-flow op calls: with values and checks of its own, and this key for its random numbers."""
        inner = copy.copy(self)
        inner.members = None  # XLA may call such a graph as often as it likes, or not at all: there collectives are torch's
        inner._begin(key)
        return inner

    def key(self) -> Array:
        """A fresh JAX PRNG key, different for each random op of the graph and for each call of the program."""
        assert self._keys is not None, f"{self.node.target} draws random numbers but lacks torch.Tag.nondeterministic_seeded"
        return next(self._keys)

    @property
    def draws(self) -> int:
        """How many keys the graph has taken so far."""
        return 0 if self._keys is None else self._keys.count

    def require(self, condition: Array, error: type[Exception], message: str) -> None:
        """The call of the program raises error(message) unless all of `condition` is true, and nothing is mutated then.

        On a GPU, where looking would mean waiting, a later call raises it, as CUDA's own assertions do.
        """
        self.checks.require(condition, error, message)

    @property
    def output(self) -> Any:
        """Metadata of the current node's result: a TensorSpec, or a tuple of them (None where the op returns None)."""
        return self.spec(self.node)

    def input(self, index: int) -> Any:
        """Metadata of the current node's positional argument: a TensorSpec, a list of them, or None."""
        return torch.fx.node.map_arg(self.node.args[index], self.spec)

    def spec(self, node: Node) -> Any:
        """Metadata of any node's result."""
        return self._symbols.concrete(node.meta["val"])

    def spec_of(self, argument: Any) -> Any:
        """Metadata of an argument of the current node: a TensorSpec for a tensor, a number for a size, else the argument itself."""
        return self._symbols.concrete(argument.meta.get("val")) if isinstance(argument, Node) else argument
