"""The private entry points for XLA's own collectives among processes. (`private.py` defines the term *private entry point*.)

An XLA client that spans processes needs jaxlib's coordination service only until the processes have found each other. Afterwards the client
communicates by gloo. jaxlib ends a process that loses its connection to the service before it has left the service.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo as hlo
from jax.interpreters import mlir
from jax.sharding import NamedSharding

from . import private
from .private import Fast

_make_service: Callable[..., Any] = private._require("jaxlib._jax.get_distributed_runtime_service")
_make_agent: Callable[..., Any] = private._require("jaxlib._jax.get_distributed_runtime_client")
_make_gloo: Callable[..., Any] = private._require("jaxlib._jax.make_gloo_tcp_collectives")
_assignment: Any = private._find("jaxlib._jax.DeviceAssignment")
_parse_sharding: Callable[..., Any] | None = private._find("jax._src.sharding_impls.parse_flatten_op_sharding")

# A heartbeat timeout in seconds that is never reached. jaxlib ends a process that has sent no heartbeat for as long as the timeout.
_NEVER = 10**8


def make_service(address: str, count: int) -> Any:
    """Starts a coordination service for `count` processes. Raises: jax.errors.JaxRuntimeError if the address is taken."""
    return _make_service(address, count, heartbeat_timeout=_NEVER)


def make_agent(address: str, index: int, seconds: float) -> Any:
    """Returns a client of a coordination service.

    Args:
        address: The service's address.
        index: This process's index among the processes.
        seconds: The timeout for reaching the service.
    """
    return _make_agent(
        address, index, init_timeout=max(1, int(seconds)), heartbeat_timeout=_NEVER, shutdown_on_destruction=False, use_compression=True
    )


def make_client(agent: Any, index: int, count: int, host: str) -> Any:
    """Returns a PJRT client over one CPU device of each process. Its programs run in the calling thread.

    Args:
        agent: This process's client of the coordination service.
        index: This process's index among the processes.
        count: The number of processes.
        host: The address at which the other processes reach this one.

    Raises: UnsupportedVersion.
    """
    if Fast.make_cpu_client is None:
        raise private._lacks("jaxlib.xla_client.make_cpu_client")
    if _assignment is None:
        raise private._lacks("jaxlib._jax.DeviceAssignment")
    gloo = _make_gloo(agent, hostname=host)
    return Fast.make_cpu_client(
        asynchronous=False, distributed_client=agent, node_id=index, num_nodes=count, collectives=gloo, num_devices=1
    )


def as_replicas(compile_options: Any, devices: Sequence[jax.Device]) -> Any:
    """Sets compile options for a program that each process runs as one replica, with its own local shapes. Returns the options.

    Args:
        compile_options: The compile options, which are changed.
        devices: One device of each process.
    """
    compile_options.num_replicas = compile_options.executable_build_options.num_replicas = len(devices)
    compile_options.device_assignment = _assignment.create(np.array([[device.id] for device in devices], np.int32))
    return compile_options


def as_partitions(compile_options: Any, devices: Sequence[jax.Device]) -> Any:
    """Sets compile options for a program that XLA's SPMD partitioner (Shardy) splits over these devices. Returns the options.

    The partitioner chooses the shardings of results that have none.

    Args:
        compile_options: The compile options, which are changed.
        devices: One device of each process.
    """
    build = compile_options.executable_build_options
    compile_options.num_partitions = build.num_partitions = len(devices)
    build.use_spmd_partitioning = build.use_shardy_partitioner = True
    build.allow_spmd_sharding_propagation_to_output = [True]
    compile_options.device_assignment = _assignment.create(np.array([[device.id for device in devices]], np.int32))
    return compile_options


def shardings_of(executable: Any, mesh: jax.sharding.Mesh) -> list[tuple[tuple[int, ...], NamedSharding]]:
    """Returns a shape and a sharding for each result of a program compiled with `as_partitions`. The shapes are unknown: each is ().

    Args:
        executable: The compiled program.
        mesh: The mesh of the program's devices, in their order.
    """
    if _parse_sharding is None:
        raise private._lacks("jax._src.sharding_impls.parse_flatten_op_sharding")
    return [((), NamedSharding(mesh, _parse_sharding(sharding, mesh)[0])) for sharding in executable.get_output_shardings() or ()]


def device_list(devices: Sequence[jax.Device]) -> Any:
    """Returns jaxlib's device list for compiling a program over several processes."""
    return private._DeviceList(tuple(devices))


def named_groups() -> dict[str, Any]:
    """Returns the process groups that contain this process, by name, in the order of their creation."""
    if not torch.distributed.is_initialized():
        return {}
    world = torch.distributed.distributed_c10d._world
    return {name: group for group, name in world.pg_names.items() if group in world.pg_map}


# XLA's collectives among replicas. Each replica is a process.

# Groups of processes, by their indices.
Groups = tuple[tuple[int, ...], ...]
_REDUCTIONS = {"sum": "AddOp", "product": "MulOp", "max": "MaxOp", "min": "MinOp"}


def _replica_groups(groups: Groups) -> Any:
    """Returns the attribute `replica_groups` of a StableHLO op. Groups that are shorter than the longest are padded with -1."""
    width = max(map(len, groups))
    return ir.DenseIntElementsAttr.get(np.array([[*group, *[-1] * (width - len(group))] for group in groups], np.int64))


def _lower_all_reduce(ctx: Any, x: Any, *, groups: Groups, reduction: str) -> Any:
    op = hlo.AllReduceOp([x.type], [x], replica_groups=_replica_groups(groups))
    scalar = ir.RankedTensorType.get([], ir.RankedTensorType(x.type).element_type)
    block = op.regions[0].blocks.append(scalar, scalar)
    with ir.InsertionPoint(block):
        hlo.return_([getattr(hlo, _REDUCTIONS[reduction])(*block.arguments).result])
    return op.results


def _lower_all_gather(ctx: Any, x: Any, *, groups: Groups) -> Any:
    operand = ir.RankedTensorType(x.type)
    gathered = ir.RankedTensorType.get(ctx.avals_out[0].shape, operand.element_type)
    return hlo.AllGatherOp([gathered], [x], all_gather_dim=0, replica_groups=_replica_groups(groups)).results


def _lower_all_to_all(ctx: Any, x: Any, *, groups: Groups) -> Any:
    op = hlo.AllToAllOp([x], split_dimension=0, concat_dimension=0, split_count=len(groups[0]), replica_groups=_replica_groups(groups))
    return op.results


def _lower_replica(ctx: Any) -> Any:
    return hlo.ReplicaIdOp().results


def _primitive(name: str, shape: Callable[..., Any], lowering: Callable[..., Any]) -> Primitive:
    primitive = Primitive(f"dynaxla_{name}")
    primitive.def_abstract_eval(shape)
    mlir.register_lowering(primitive, lowering)
    return primitive


def _gathered_aval(aval: Any, *, groups: Groups) -> Any:
    return aval.update(shape=(aval.shape[0] * len(groups[0]), *aval.shape[1:]))


_all_reduce = _primitive("all_reduce", lambda aval, **_: aval, _lower_all_reduce)
_all_gather = _primitive("all_gather", _gathered_aval, _lower_all_gather)
_all_to_all = _primitive("all_to_all", lambda aval, **_: aval, _lower_all_to_all)
_replica = _primitive("replica", lambda: jax.core.ShapedArray((), np.uint32), _lower_replica)


def all_reduce(x: jax.Array, groups: Groups, reduction: str) -> jax.Array:
    """Under jit: returns the sum, product, max or min of x over the processes of this process's group."""
    return _all_reduce.bind(x, groups=groups, reduction=reduction)


def all_gather(x: jax.Array, groups: Groups) -> jax.Array:
    """Under jit: concatenates x of all processes of this process's group along the first dimension. All groups must have the same size."""
    return _all_gather.bind(x, groups=groups)


def all_to_all(x: jax.Array, groups: Groups) -> jax.Array:
    """Under jit: splits x along the first dimension into equal parts, sends one part to each process of this process's group, and
    concatenates the received parts. All groups must have the same size."""
    return _all_to_all.bind(x, groups=groups)


def process_index() -> jax.Array:
    """Under jit: returns this process's index among all processes of the program, uint32[]."""
    return _replica.bind()


def opaque_false() -> jax.Array:
    """Under jit: returns false in a form that XLA cannot constant-fold."""
    return jax.lax.eq(_replica.bind(), np.uint32(2**32 - 1))
