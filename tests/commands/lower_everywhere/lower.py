"""A graph that was captured on the CPU, lowered to StableHLO for another platform."""

from __future__ import annotations

import re
from typing import Any

import jax
import torch
from jax.sharding import SingleDeviceSharding
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from dynaxla.lowering import Interpreter, Settings
from dynaxla.lowering.function import Function, Results

# The torch device of each platform.
DEVICES = {"cuda": torch.device("cuda", 0), "tpu": torch.device("xla", 0)}

_CALL = re.compile(r'custom_call @(?:"([^"]+)"|([\w$.]+))')


def moved(module: GraphModule, device: torch.device) -> GraphModule:
    """Changes a graph's metadata and arguments as if it had been captured on another device, and returns the graph."""
    for node in module.graph.nodes:
        node.meta = {**node.meta, "val": pytree.tree_map_only(FakeTensor, lambda value: _moved(value, device), node.meta.get("val"))}
        node.args = torch.fx.node.map_aggregate(node.args, lambda value: _device(value, device))
        node.kwargs = torch.fx.node.map_aggregate(node.kwargs, lambda value: _device(value, device))
    return module


def _moved(value: FakeTensor, device: torch.device) -> torch.Tensor:
    if value.layout != torch.strided:
        return value
    with value.fake_mode:
        moved_value = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        return moved_value if not value.storage_offset() else moved_value.as_strided(value.shape, value.stride(), value.storage_offset())


def _device(value: Any, device: torch.device) -> Any:
    return device if isinstance(value, torch.device) and value.type == "cpu" else value


def lowered(module: GraphModule, platform: str, device: jax.Device | None = None) -> jax.stages.Lowered:
    """Returns the lowered program.

    Args:
        device: The device for which the program can be compiled. None if the program will not be compiled.

    Raises: UnsupportedOp or LoweringError, or JAX's error if JAX cannot lower the program for the platform.
    """
    interpreter = Interpreter(moved(module, DEVICES[platform]), platform, kernels=False)
    function = Function(
        interpreter, settings=Settings.current(platform), choose=lambda implementations, problem: implementations.choose(problem, {})
    )
    sharding = None if device is None else SingleDeviceSharding(device)

    def program(key: jax.Array, arrays: list[jax.Array]) -> Results:
        return function(arrays, jax.random.wrap_key_data(key, impl="threefry2x32"))

    with jax.enable_x64(True):
        key = jax.ShapeDtypeStruct((2,), "uint32", sharding=sharding)
        arrays = [jax.ShapeDtypeStruct(spec.shape, spec.jax_dtype, sharding=sharding) for spec in function.specs.values()]
        return jax.jit(program, keep_unused=True).trace(key, arrays).lower(lowering_platforms=(platform,))


def stablehlo(module: GraphModule, platform: str) -> str:
    """Returns the program's text. Raises: see `lowered`."""
    return lowered(module, platform).as_text()


def calls(text: str) -> set[str]:
    """Returns the functions that a program calls."""
    return {quoted or plain for quoted, plain in _CALL.findall(text)}
