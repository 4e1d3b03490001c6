"""What every part of the way of a graph needs to know of it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import torch
from torch.fx import GraphModule, Node

from ..runtime import devices
from .between import is_array
from .inputs import check_tensor

# Forward and backward graphs hand each other values that nobody else sees.
Phase = Literal["forward", "backward", "inference"]


@dataclass(frozen=True)
class AtenGraph:
    """A graph as AOTAutograd gives it.

    Attributes: name; module (functional ATen ops); static (the positions of parameters and buffers among its inputs); phase (what a forward
    program gives to a backward program alone may have other strides than in the graph).
    """

    name: str
    module: GraphModule
    static: tuple[int, ...] = ()
    phase: Phase = "inference"


def graph_device(module: GraphModule, between: Collection[Node] = ()) -> torch.device:
    """The device of a graph. Rank-0 CPU tensors may stand beside tensors of another device, as in eager mode.

    between: the nodes that run between programs; what only they read or give may be anything.
    Raises: DeviceMismatch; UnsupportedTensor.
    """
    found: set[torch.device] = set()
    scalars: set[torch.device] = set()
    for node in module.graph.nodes:
        value = node.meta.get("val")
        anything = node in between or (between and node.users and all(user in between or user.op == "output" for user in node.users))
        for tensor in value if isinstance(value, (tuple, list)) else [value]:
            if isinstance(tensor, torch.Tensor):
                if not anything or is_array(tensor):
                    check_tensor(tensor, "a tensor of the graph")
                (found if tensor.dim() or tensor.device.type != "cpu" else scalars).add(tensor.device)
    return devices.common_device(found or scalars)
