"""An ATen graph with concrete sizes as a pure function of JAX arrays: what `jax.jit`, `jax.grad`, `jax.vmap` and `jax.export` take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import torch
from jax.sharding import NamedSharding
from torch.fx import GraphModule, Node

from ..runtime.networks import Members
from . import by_xla, dtypes
from .checks import Check
from .context import Context
from .eager import PORTABLE
from .forms import Choice, generic
from .interpreter import Interpreter
from .metadata import SymbolValues, TensorSpec
from .settings import Settings


@partial(jax.tree_util.register_dataclass, data_fields=["outputs", "checks"], meta_fields=["numbers", "kernels", "draws"])
@dataclass(frozen=True)
class Results:
    """The values that a function gives. A pytree, whose arrays are the outputs and the checks' conditions.

    Attributes: outputs (arrays in logical shapes); checks (conditions that must hold, or the call fails); numbers (outputs that are no
    tensors, but follow from sizes); kernels (those of torch that it calls: the node, and the arguments that are no tensors); draws (how
    many keys it takes).
    """

    outputs: tuple[jax.Array, ...]
    checks: tuple[Check, ...] = ()
    numbers: tuple[Any, ...] = ()
    kernels: tuple[Any, ...] = ()
    draws: int = 0


class Function:
    """A graph with concrete sizes, callable with arrays.

    interpreter: the graph. symbols: its sizes. numbers: the inputs that are no tensors, by position. outputs: the nodes whose arrays it
    gives (else the graph's outputs); returned: those whose numbers it gives. settings, choose, reorders, where,
    members: as for `Context`.
    Attributes: default_dtype (torch's, as it was when this was made); draws_random (whether it needs a key); specs (what each tensor among
    the inputs is like, by position); read (those of these positions that something is computed from); reorders.

    Without `choose` the forms are generic ones, so that JAX can batch the function. The derivative that JAX makes of it is not always
    torch's (`detach`, maxima of equal numbers), which is a graph of its own.
    """

    @staticmethod
    def portable(module: GraphModule) -> Function:
        """A graph without symbols as a function for all platforms: no kernel of torch's, no call of a library, no callback.

        Trace it under `jax.enable_x64(True)`. What it draws and what it checks are the caller's (`draws_random`, `Results.checks`).
        Raises: UnsupportedOp for an op that only torch's kernel can compute.
        """
        return Function(Interpreter(module, PORTABLE, kernels=False))

    def __init__(
        self,
        interpreter: Interpreter,
        symbols: SymbolValues | None = None,
        numbers: dict[int, Any] | None = None,
        outputs: Sequence[Node] | None = None,
        returned: Sequence[Node] = (),
        *,
        settings: Settings | None = None,
        choose: Choice | None = None,
        reorders: bool = False,
        where: NamedSharding | None = None,
        members: Members | None = None,
    ) -> None:
        self._interpreter = interpreter
        self._symbols = symbols or SymbolValues()
        self._numbers = dict(numbers or {})
        if outputs is None:
            outputs = [node for node in interpreter.output_node.args[0] if _is_tensor(node)]
        self._outputs, self._returned = list(outputs), list(returned)
        self._settings = settings or Settings.current(interpreter.platform)
        self.default_dtype = dtypes.default()
        self._choose, self.reorders, self._where, self._members = choose or generic, reorders, where, members
        self.draws_random = interpreter.draws_random
        placeholders = interpreter.placeholders
        self.specs: dict[int, TensorSpec] = {
            position: self._symbols.spec(node.meta["val"]) for position, node in enumerate(placeholders) if _is_tensor(node)
        }
        self.read = [position for position in self.specs if placeholders[position].users]

    def __call__(self, inputs: Sequence[jax.Array], key: jax.Array | None = None, drawn: jax.Array | int = 0) -> Results:
        """inputs: an array for each tensor among the graph's inputs, in logical shape. key: of jax.random, if it draws random numbers.
        drawn: how many keys other functions take of that one before this function does.

        Raises: LoweringError if a lowering fails or disagrees with PyTorch about shape or dtype; UnsupportedOp.
        """
        if self._members is not None:
            self._members.begin()
        ctx = Context(
            self._interpreter.platform, self._settings, self._symbols, key, self._choose, self.reorders, drawn, self._where, self._members
        )
        values = {**self._numbers, **dict(zip(self.specs, inputs, strict=True))}
        with dtypes.defaulting_to(self.default_dtype):
            found = self._interpreter.run([values[position] for position in range(len(values))], ctx, [*self._outputs, *self._returned])
        if self._members is not None and self._members.holds:
            by_xla.hold(ctx)
        count = len(self._outputs)
        return Results(tuple(found[:count]), tuple(ctx.checks), tuple(found[count:]), tuple(ctx.kernels), ctx.draws)


def _is_tensor(node: Any) -> bool:
    return isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor)
