"""The context that the interpreter passes to lowerings."""

from __future__ import annotations

import copy
from typing import Any

import torch
from jax import Array
from jax.sharding import NamedSharding
from torch.fx import Node

from ..runtime.collective_agreement import ProgramCollectives
from ..runtime.process_networks import Participants
from .checks import Checks
from .cpu.vectorized_reductions import max_and_min_functions, sum_function
from .eager import eager_behavior_on
from .epilogue import FusedResults
from .implementations import Chooser, choose_by_rules
from .metadata import SymbolValues
from .random_keys import RandomKeys
from .settings import EXACT, Settings


class Context:
    """The interpreter's state during one trace, passed to lowerings that have a `ctx` parameter.

    Attributes:
        platform: "cpu", "cuda", "rocm", "tpu", or PORTABLE (see eager.py).
        eager: The behaviour of eager mode on the platform.
        settings: The numerical settings of this trace.
        choose: Chooses the implementation of an op for a problem; see implementations.py.
        sum, max, min: Functions that reduce an array over some dimensions, and remove these dimensions.
        node: The FX node that is being lowered.
        values: The values of the nodes evaluated so far.
        checks: The conditions that the program verifies while it runs.
        fused_results: The results of nodes that were computed together with an earlier node.
        kernels: For each torch kernel that the program calls, the node's name and the arguments that are not tensors.
        collectives: The torch collectives that the program calls, in order. Before its first run, the processes compare their lists.
        participants: The processes over which XLA's own collectives run; None if torch's collectives are called.
        effect_token: uint8[1]; orders effects: the next kernel with a side effect, or the next collective, reads this token.
        replicated: On a mesh of devices, the sharding of a value that is replicated on all of them; otherwise None.
    """

    def __init__(
        self,
        platform: str,
        settings: Settings = EXACT,
        symbols: SymbolValues | None = None,
        key: Array | None = None,
        choose: Chooser = choose_by_rules,
        reorders: bool = False,
        key_offset: Array | int = 0,
        replicated: NamedSharding | None = None,
        participants: Participants | None = None,
    ) -> None:
        """Starts a context for one trace. The arguments without a description are attributes of the class.

        Args:
            symbols: The values of the graph's symbolic sizes.
            key: The JAX PRNG key from which the graph's random numbers are derived; None if it draws none.
            reorders: True if passes/jaxpr/transposes.py will process the traced program. That pass chooses memory orders.
            key_offset: The number of keys that other programs derive from `key` before this one.
        """
        self.platform = platform
        self.eager = eager_behavior_on(platform)
        self.settings = settings
        self.choose = choose
        self.sum = sum_function(reorders)
        self.max, self.min = max_and_min_functions(reorders)
        self.node: Node
        self.kernels: list[tuple[str, Any]] = []
        self.collectives = ProgramCollectives()
        self.replicated = replicated
        self.participants = participants
        self._symbols = symbols or SymbolValues()
        self._begin(key, key_offset)

    def _begin(self, key: Array | None, key_offset: Array | int = 0) -> None:
        self.values: dict[Node, Any] = {}
        self.checks = Checks()
        self.fused_results = FusedResults()
        self.effect_token: Array | None = None
        self._keys = None if key is None else RandomKeys(key, key_offset)

    def nested(self, key: Array | None) -> Context:
        """Returns a context for a graph that a control-flow op calls.

        The new context has its own values and checks, and derives its random numbers from `key`.
        """
        inner = copy.copy(self)
        inner.participants = None  # XLA's own collectives must run once each, but an inner graph may run any number of times, or never
        inner._begin(key)
        return inner

    def key(self) -> Array:
        """Returns a fresh JAX PRNG key, different for each random op of the graph and for each call of the program."""
        assert self._keys is not None, f"{self.node.target} draws random numbers but lacks torch.Tag.nondeterministic_seeded"
        return next(self._keys)

    @property
    def draws(self) -> int:
        """The number of keys that `key` has returned so far."""
        return 0 if self._keys is None else self._keys.count

    def require(self, condition: Array, error: type[Exception], message: str) -> None:
        """Makes the call of the program raise error(message), and mutate nothing, unless all elements of `condition` are true.

        On a GPU, the call does not read the condition, which would need a synchronization: a later call raises the error, as with CUDA's
        own assertions.
        """
        self.checks.require(condition, error, message)

    @property
    def output(self) -> Any:
        """Metadata of the current node's result: a TensorSpec, or a tuple with a TensorSpec or None for each of several results."""
        return self.spec(self.node)

    def input(self, index: int) -> Any:
        """Returns the metadata of a positional argument of the current node: a TensorSpec, a list of TensorSpecs, or None."""
        return torch.fx.node.map_arg(self.node.args[index], self.spec)

    def spec(self, node: Node) -> Any:
        """Returns the metadata of any node's result."""
        return self._symbols.concrete(node.meta["val"])

    def spec_of(self, argument: Any) -> Any:
        """Returns the metadata of an argument of the current node.

        Returns: a TensorSpec for a tensor, a number for a size, otherwise the argument itself.
        """
        return self._symbols.concrete(argument.meta.get("val")) if isinstance(argument, Node) else argument
