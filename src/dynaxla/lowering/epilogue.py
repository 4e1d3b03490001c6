"""Epilogues: activations that a library computes together with a matrix product. No other node reads the product."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jax import Array, lax
from torch.fx import Node

from ..torch_ops import aten

if TYPE_CHECKING:
    from .context import Context


# Ops that change only the shape.
_RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


@dataclass(frozen=True)
class Epilogue:
    """An activation that is computed together with a matrix product.

    Attributes:
        name: "gelu", "gelu_tanh", "sigmoid" or "tanh".
        node: The node of the activation.
        reshapes: The nodes between the product and the activation. They only change the shape.
    """

    name: str
    node: Node
    reshapes: tuple[Node, ...]


def following_activation(node: Node) -> Epilogue | None:
    """Returns the activation that is applied to a node's result; None if no activation follows, or if another node uses the result."""
    path = []  # the product and the reshapes
    while len(node.users) == 1:
        (user,) = node.users
        if not user.args or user.args[0] is not node:
            return None
        path.append(node)
        if name := _activation(user):
            return Epilogue(name, user, tuple(path[1:]))
        if user.target not in _RESHAPES:
            return None
        node = user
    return None


class FusedResults:
    """The values of nodes that were computed together with an earlier node."""

    def __init__(self) -> None:
        self._values: dict[Node, Array | None] = {}

    def add(self, epilogue: Epilogue, value: Array) -> None:
        """Adds the activation's value. The reshapes between the product and the activation need no value."""
        self._values[epilogue.node] = value
        self._values.update(dict.fromkeys(epilogue.reshapes))

    def __contains__(self, node: Node) -> bool:
        return node in self._values

    def __getitem__(self, node: Node) -> Array | None:
        """Returns a node's value; None for a reshape of an epilogue, whose value is not needed."""
        return self._values[node]


def with_activation(ctx: Context, supported: Collection[str], compute: Callable[[str], Array]) -> Array:
    """Computes the current node together with the activation that follows the node.

    Both nodes get the value after the activation, because no other node reads the value before the activation.

    Args:
        supported: The names of the activations that `compute` supports.
        compute: Takes the name of the activation, or "" if no supported activation follows, and returns the value.
    """
    following = following_activation(ctx.node)
    if following is None or following.name not in supported:
        return compute("")
    out = compute(following.name)
    ctx.fused_results.add(following, lax.reshape(out, ctx.spec(following.node).shape))
    return out


def _activation(node: Node) -> str:
    """Returns the name of a node's activation as in `Epilogue`; "" if the node is no activation."""
    if node.target is aten.gelu.default:
        return "gelu_tanh" if node.kwargs.get("approximate") == "tanh" else "gelu"
    return {aten.sigmoid.default: "sigmoid", aten.tanh.default: "tanh"}.get(node.target, "")
