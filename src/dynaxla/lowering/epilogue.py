"""What follows a product of matrices and can be computed with it: an activation that is all that ever sees the product."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

aten = torch.ops.aten

# They only say that the same numbers have another shape.
_RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


@dataclass(frozen=True)
class Epilogue:
    """An activation.

    Attributes: name ("gelu", "gelu_tanh", "sigmoid", "tanh"); node (it); passed (the nodes on the way to it).
    """

    name: str
    node: Node
    passed: tuple[Node, ...]


def follow(node: Node) -> Epilogue | None:
    """The activation that is computed of a node's result, if nothing else uses the result."""
    passed = []
    while len(node.users) == 1:
        (user,) = node.users
        if not user.args or user.args[0] is not node:
            return None
        passed.append(node)
        if name := _activation(user):
            return Epilogue(name, user, tuple(passed[1:]))
        if user.target not in _RESHAPES:
            return None
        node = user
    return None


def _activation(node: Node) -> str:
    if node.target is aten.gelu.default:
        return "gelu_tanh" if node.kwargs.get("approximate") == "tanh" else "gelu"
    return {aten.sigmoid.default: "sigmoid", aten.tanh.default: "tanh"}.get(node.target, "")
