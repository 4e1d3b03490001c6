"""Lowers collectives over several processes to XLA's own collectives.

Each process compiles its own program, with its own shapes. XLA defines no order among collectives that do not depend on each other, and
the programs of the processes may differ. So the first element of each collective's operand is made to depend on the collective before, in a
way that XLA cannot simplify: the collectives then run in the order of the graph. The order in the compiled program is checked (`calls_in`),
because XLA assumes that all processes run the same program, and might optimize on that assumption.

The results are those of torch's collectives, up to the order of summation.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from ..runtime import private_processes as processes
from ..runtime.private_processes import Groups
from .context import Context
from .fallback import call_back

# The reductions of all_reduce and reduce_scatter. For other reductions and dtypes, torch's own collective is called.
_REDUCTIONS: dict[str, Callable[..., Any]] = {"sum": jnp.sum, "avg": jnp.sum, "product": jnp.prod, "max": jnp.max, "min": jnp.min}
_FLOAT_DTYPES = ("float16", "bfloat16", "float32", "float64")
_REDUCIBLE_DTYPES = (*_FLOAT_DTYPES, "int8", "uint8", "int32", "int64")


def lower(
    ctx: Context, op_name: str, arrays: Sequence[jax.Array], settings: Sequence[Any], group_name: str, on_use: Callable[[], object]
) -> Any:
    """Returns the results of the current node's collective, one for each array, or None if torch's own collective must be called.

    Args:
        op_name: The name of the collective's op, without namespace.
        arrays: The op's tensors.
        settings: The op's arguments other than its tensors and its group.
        group_name: The name of the process group.
        on_use: Called if XLA's own collective is used, and more than one process takes part.
    """
    participants = ctx.participants
    assert participants is not None
    collective = _COLLECTIVES.get(op_name)
    size = len(participants.cliques[group_name])
    if collective is None:
        return None
    groups = participants.replica_groups(group_name, evenly=collective not in (_all_reduce, _broadcast))
    if groups is None or not all(_is_supported(op_name, array, settings, size) for array in arrays):
        return None
    if size == 1:
        return [array[None] if collective is _all_gather and array.ndim == 0 else array for array in arrays]
    on_use()
    outputs = ctx.output if isinstance(ctx.output, (tuple, list)) else [ctx.output]
    results = []
    for array, output in zip(arrays, outputs, strict=True):
        if not array.size:
            results.append(jnp.zeros(output.shape, output.jax_dtype))
            continue
        participants.calls.append(_XLA_OPS.get(collective, "all-to-all"))
        results.append(_in_order(ctx, functools.partial(collective, groups=groups, settings=settings), array))
    return results


# Matches a collective in the text of a compiled program.
_CALL = re.compile(r"= \S+ (all-reduce|all-gather|all-to-all)(?:-start)?\(|= \([^=]*\) (all-reduce|all-gather|all-to-all)(?:-start)?\(")


def calls_in(text: str) -> list[str]:
    """Returns the names of the collectives in the text of a compiled program, in the order in which they run."""
    return [first or second for first, second in _CALL.findall(text)]


def keep_collectives(ctx: Context) -> None:
    """Makes the program run all its collectives, even if no result depends on them: an empty callback reads the last one's token."""
    call_back(ctx, lambda outputs, inputs: None, [], [], views=[], has_effect=True)


def _is_supported(op_name: str, array: jax.Array, settings: Sequence[Any], size: int) -> bool:
    if op_name.startswith(("all_reduce", "reduce_scatter")):
        return str(array.dtype) in (_FLOAT_DTYPES if settings[0] == "avg" else _REDUCIBLE_DTYPES) and settings[0] in _REDUCTIONS
    if op_name == "all_to_all_single":
        received, sent = map(list, settings)
        return received == sent and len(set(sent)) == 1
    return True


def _in_order(ctx: Context, collective: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Returns the result of a collective, which runs after the previous collective of the graph and before the next one."""
    opaque_false = processes.opaque_false()
    if ctx.effect_token is not None:
        opaque_false &= ctx.effect_token[0] != 0
    start, end = (0,) * x.ndim, (1,) * x.ndim  # the slice of the first element
    first = lax.slice(x, start, end)
    # The operands of the select differ, so that XLA cannot simplify the select to a constant. XLA assumes that a constant is equal in all
    # processes, and would compute the collective's result without communication.
    first = lax.select(opaque_false, (first == 0).astype(x.dtype), first)
    result = collective(lax.dynamic_update_slice(x, first, start) if x.ndim else first)
    ctx.effect_token = lax.slice(result, (0,) * result.ndim, (1,) * result.ndim).reshape(1).astype(bool).astype(jnp.uint8)
    return result


def _all_reduce(x: jax.Array, groups: Groups, settings: Sequence[Any]) -> jax.Array:
    (reduction,) = settings
    result = processes.all_reduce(x, groups, "sum" if reduction == "avg" else reduction)
    return result / np.array(len(groups[0]), x.dtype) if reduction == "avg" else result


def _all_gather(x: jax.Array, groups: Groups, settings: Sequence[Any]) -> jax.Array:
    return processes.all_gather(x[None] if x.ndim == 0 else x, groups)


def _reduce_scatter(x: jax.Array, groups: Groups, settings: Sequence[Any]) -> jax.Array:
    """Sends each process the parts of its result. The process then reduces the parts, in a fixed order.

    XLA's own reduce-scatter is not used, because it waits for the other processes for at most 30 s (jaxlib 0.10.2).
    """
    reduction, size = settings[0], len(groups[0])
    parts = processes.all_to_all(x, groups).reshape(size, x.shape[0] // size, *x.shape[1:])
    wide = parts.astype(jnp.float32) if x.dtype in (jnp.float16, jnp.bfloat16) else parts
    result: jax.Array = _REDUCTIONS[reduction](wide, axis=0)
    return (result / size if reduction == "avg" else result).astype(x.dtype)


def _all_to_all(x: jax.Array, groups: Groups, settings: Sequence[Any]) -> jax.Array:
    return processes.all_to_all(x, groups)


def _broadcast(x: jax.Array, groups: Groups, settings: Sequence[Any]) -> jax.Array:
    """Broadcasts by a sum, because XLA:CPU has no broadcast. All processes other than the source contribute zeros.

    The values are summed as integers of the same width, which preserves all bits.
    """
    (source,) = settings
    if jnp.iscomplexobj(x):
        real, imag = _broadcast(jnp.stack([x.real, x.imag]), groups, settings)
        return lax.complex(real, imag)
    bits_dtype = np.dtype(f"uint{8 * x.dtype.itemsize}")
    bits = x.astype(jnp.uint8) if x.dtype == bool else lax.bitcast_convert_type(x, bits_dtype)
    is_source = processes.process_index() == groups[0][source]
    result = processes.all_reduce(jnp.where(is_source, bits, jnp.zeros_like(bits)), groups, "sum")
    return result.astype(bool) if x.dtype == bool else lax.bitcast_convert_type(result, x.dtype)


def _shard_dim(x: jax.Array, groups: Groups, settings: Sequence[Any]) -> jax.Array:
    """Gathers one dimension, settings[0], and shards another one, settings[1]."""
    gather_dim, shard_dim = (dim % x.ndim for dim in settings[:2])
    size = len(groups[0])
    shards = jnp.moveaxis(x.reshape(*x.shape[:shard_dim], size, x.shape[shard_dim] // size, *x.shape[shard_dim + 1 :]), shard_dim, 0)
    parts = processes.all_to_all(shards, groups)
    gathered = jnp.moveaxis(parts, 0, gather_dim)
    shape = list(gathered.shape)
    return gathered.reshape(*shape[:gather_dim], size * shape[gather_dim + 1], *shape[gather_dim + 2 :])


_COLLECTIVES: dict[str, Callable[..., jax.Array]] = {
    "all_gather_into_tensor": _all_gather,
    "all_gather_into_tensor_coalesced": _all_gather,
    "all_reduce": _all_reduce,
    "all_reduce_coalesced": _all_reduce,
    "all_to_all_single": _all_to_all,
    "broadcast": _broadcast,
    "reduce_scatter_tensor": _reduce_scatter,
    "reduce_scatter_tensor_coalesced": _reduce_scatter,
    "shard_dim_alltoall": _shard_dim,
}
# The HLO op of each of these functions. All other functions use an all-to-all.
_XLA_OPS = {_all_gather: "all-gather", _all_reduce: "all-reduce", _broadcast: "all-reduce"}
