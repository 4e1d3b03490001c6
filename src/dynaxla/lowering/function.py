"""An ATen graph with concrete sizes as a pure function of JAX arrays, for `jax.jit`, `jax.grad`, `jax.vmap` and `jax.export`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding
from torch.fx import GraphModule, Node

from ..runtime.process_networks import Participants
from . import dtypes, xla_collectives
from .checks import Check
from .context import Context
from .eager import PORTABLE
from .graphs import is_tensor
from .implementations import Chooser, choose_generic
from .interpreter import Interpreter
from .metadata import SymbolValues, TensorSpec
from .settings import Settings


@partial(jax.tree_util.register_dataclass, data_fields=["outputs", "checks"], meta_fields=["numbers", "kernels", "draws"])
@dataclass(frozen=True)
class Results:
    """The results of a `Function`. A pytree, whose leaves are the outputs and the checks' conditions.

    Attributes:
        outputs: The output arrays, in logical shapes.
        checks: Conditions that must hold; otherwise the call fails.
        numbers: The outputs that are numbers, computed from sizes.
        kernels: The torch kernels that the function calls; see `Context`.
        draws: The number of PRNG keys that the function has derived from the key of the call.
    """

    outputs: tuple[jax.Array, ...]
    checks: tuple[Check, ...] = ()
    numbers: tuple[Any, ...] = ()
    kernels: tuple[Any, ...] = ()
    draws: int = 0


class Function:
    """A graph with concrete sizes, callable with arrays.

    Args:
        interpreter: The graph with its lowerings.
        symbols: The values of the graph's symbolic sizes.
        numbers: The values of the inputs that are not tensors, by position among all inputs.
        outputs: The nodes whose arrays the function returns; by default the graph's tensor outputs.
        number_outputs: The nodes whose values are numbers that the function returns.
        settings, choose, reorders, replicated, participants: See `Context`.

    Attributes:
        default_dtype: Torch's default dtype when the function was created.
        draws_random: True if the function needs a PRNG key.
        specs: The spec of each tensor input, by position among all inputs.
        used_inputs: The positions of the tensor inputs that have users.
        reorders: See `Context`.

    Without `choose` the function uses the generic implementations, so that JAX can batch the function. JAX's derivative of the function is
    not always torch's (examples: `detach`, ties in a maximum), because torch's backward pass is a graph of its own.
    """

    @staticmethod
    def portable(module: GraphModule) -> Function:
        """Returns a graph without symbolic sizes as a function for all platforms, without calls of torch's kernels, libraries or callbacks.

        Trace the function under `jax.enable_x64(True)`. The caller must pass a PRNG key if `draws_random` is true, and must test
        `Results.checks`.

        Raises:
            UnsupportedOp: Only torch's kernel can compute one of the ops.
        """
        return Function(Interpreter(module, PORTABLE, kernels=False))

    def __init__(
        self,
        interpreter: Interpreter,
        symbols: SymbolValues | None = None,
        numbers: dict[int, Any] | None = None,
        outputs: Sequence[Node] | None = None,
        number_outputs: Sequence[Node] = (),
        *,
        settings: Settings | None = None,
        choose: Chooser | None = None,
        reorders: bool = False,
        replicated: NamedSharding | None = None,
        participants: Participants | None = None,
    ) -> None:
        self._interpreter = interpreter
        self._symbols = symbols or SymbolValues()
        self._numbers = dict(numbers or {})
        if outputs is None:
            outputs = [node for node in interpreter.output_node.args[0] if is_tensor(node)]
        self._outputs, self._number_outputs = list(outputs), list(number_outputs)
        self._settings = settings or Settings.current(interpreter.platform)
        self.default_dtype = dtypes.default()
        self._choose, self.reorders, self._replicated, self._participants = choose or choose_generic, reorders, replicated, participants
        self.draws_random = interpreter.draws_random
        placeholders = interpreter.placeholders
        self.specs: dict[int, TensorSpec] = {
            position: self._symbols.spec(node.meta["val"]) for position, node in enumerate(placeholders) if is_tensor(node)
        }
        self.used_inputs = [position for position in self.specs if placeholders[position].users]

    def __call__(self, inputs: Sequence[jax.Array], key: jax.Array | None = None, key_offset: jax.Array | int = 0) -> Results:
        """Computes the outputs.

        Args:
            inputs: An array in logical shape for each tensor among the graph's inputs.
            key: A jax.random key, if the function draws random numbers.
            key_offset: The number of keys that other functions derive from `key` before this one.

        Raises:
            LoweringError: A lowering fails, or disagrees with PyTorch about a shape or dtype.
            UnsupportedOp: An op cannot be lowered for these inputs.
        """
        if self._participants is not None:
            self._participants.begin()
        ctx = Context(
            self._interpreter.platform,
            self._settings,
            self._symbols,
            key,
            self._choose,
            self.reorders,
            key_offset,
            self._replicated,
            self._participants,
        )
        values = {**self._numbers, **dict(zip(self.specs, inputs, strict=True))}
        with dtypes.defaulting_to(self.default_dtype):
            all_inputs = [values[position] for position in range(len(values))]
            results = self._interpreter.run(all_inputs, ctx, [*self._outputs, *self._number_outputs])
        if self._participants is not None and self._participants.keeps_collectives:
            xla_collectives.keep_collectives(ctx)
        count = len(self._outputs)
        return Results(tuple(results[:count]), tuple(ctx.checks), tuple(results[count:]), tuple(ctx.kernels), ctx.draws)
