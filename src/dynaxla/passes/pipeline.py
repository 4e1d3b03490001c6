"""The list of rewrites between TorchDynamo's graph and StableHLO, in the order in which they run.

Each rewrite is a `Pass`: a function of a graph, with an invariant that holds for the rewritten graph. Code that rewrites a graph calls one
of these passes. `dynaxla.explain` and the option `dump` show the number of nodes before and after each pass.

Passes of level "dynamo" run when the backend receives a graph, "joint" passes when AOTAutograd splits the joint graph into a forward
and a backward graph, "aten" passes before a graph is compiled, and "jaxpr" passes for each program, that is for each combination of sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

import jax
from functorch.compile import min_cut_rematerialization_partition
from torch.fx import Graph, GraphModule

from ..capture.graph import AtenGraph
from ..observe import rewrites
from .aten.device_transfers import assign_devices, remove_detours
from .aten.freeze import freeze
from .aten.late_writes import split_late_writes
from .aten.python_counters import split_counters
from .aten.random_hoisting import hoist
from .aten.split import split
from .dynamo.composites import keep_composites
from .dynamo.nested_regions import inline_writing_regions
from .jaxpr import prechecks
from .jaxpr.bfloat16_rounding import round_rarely
from .jaxpr.open_layouts import sharded_as, with_open_layouts
from .jaxpr.partitionable import partitionable
from .jaxpr.transposes import defer_transposes
from .joint.checkpointing import finish_partitioned, key_recomputed_ops
from .joint.regather import regather_parameters
from .joint.saved_clones import save_clones
from .joint.saved_views import choose_saved_views
from .padding.padded_graph import pad

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Pass(Generic[Parameters, Result]):
    """A rewrite of graphs.

    Attributes:
        name: the name that reports show.
        level: the kind of graph: "dynamo", "joint", "aten" or "jaxpr". A pass that runs at two levels has both, separated by a comma.
        function: takes the graph as its first argument. A function that rewrites this graph in place returns None. Any other function
            returns a result with the rewritten graph, or None for a graph that needs no change.
        invariant: a statement that holds after the pass.
        graphs: takes the function's result, and returns the graphs whose sizes are reported.
    """

    name: str
    level: str
    function: Callable[Parameters, Result]
    invariant: str
    graphs: Callable[[Any], Any] = lambda result: result

    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        """Calls the function. Reports the number of nodes before and after to the listeners and the dump, if there are any."""
        before = sizes(args[0]) if rewrites.are_reported() else []
        result = self.function(*args, **kwargs)
        if before:
            rewrites.report(self.name, self.level, sum(before), (result is not None and sizes(self.graphs(result))) or sizes(args[0]))
        return result


def sizes(value: Any) -> list[int]:
    """Returns the number of nodes of each graph in a value: a graph, or a dataclass or sequence with graphs.

    For a traced program, returns the number of equations. A function has no size: for passes that take and return functions,
    `rewrites.tracing` reports the sizes.
    """
    if isinstance(value, (Graph, GraphModule)):
        return [len((value if isinstance(value, Graph) else value.graph).nodes)]
    if isinstance(value, jax.stages.Traced):
        return [len(value.jaxpr.jaxpr.eqns)]
    if isinstance(value, (tuple, list)):
        return [size for item in value for size in sizes(item)]
    if isinstance(value, AtenGraph):
        return sizes(value.module)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [size for item in dataclasses.fields(value) for size in sizes(getattr(value, item.name))]
    return []


NESTED_REGIONS = Pass("nested_regions", "dynamo", inline_writing_regions, "No call of a nested region writes to an operand.")
COMPOSITES = Pass(
    "composites",
    "dynamo",
    keep_composites,
    "AOTAutograd traces resampling, shrinking functions and circular padding as ops with a lowering.",
)

DETOURS = Pass("detours", "joint, aten", remove_detours, "Each op except copies has its operands on one device, where this is possible.")
SAVED_CLONES = Pass("saved_clones", "joint", save_clones, "The forward graph saves a clone of each input that the user's code mutates.")
REGATHER = Pass(
    "regather", "joint", regather_parameters, "The backward graph all-gathers parameters again, unless the user's policy saves them."
)
KEYED_DRAWS = Pass(
    "keyed_draws", "joint", key_recomputed_ops, "A random op that is recomputed draws from a saved key or a saved generator state."
)
MIN_CUT = Pass(
    "min_cut", "joint", min_cut_rematerialization_partition, "The forward graph returns the values that the backward graph reads."
)
SAVED_VIEWS = Pass(
    "saved_views", "joint", choose_saved_views, 'No saved value on the device "jax" is a view of a part of a computed value.'
)
RESTORED_DRAWS = Pass("restored_draws", "joint", finish_partitioned, "Every node has a fake value, and every keyed op has a key.")

LATE_WRITES = Pass(
    "late_writes",
    "aten",
    split_late_writes,
    "Nothing can fail after the first late write, and no written value depends on an earlier late write.",
)
PYTHON_COUNTERS = Pass("python_counters", "aten", split_counters, "No input is a number on which only other numbers depend.")
FREEZE = Pass(
    "freeze",
    "aten",
    freeze,
    "The prepared graph computes values that depend only on parameters and buffers, and the rest computes only views and outputs of these.",
    lambda frozen: (frozen.prepared, frozen.rest),
)
RANDOM_HOISTING = Pass(
    "random_hoisting", "aten", hoist, "With exact_rng, torch runs the random ops before all other ops, in the user's order."
)
DEVICE_ORDER = Pass("device_order", "aten", assign_devices, "Each node has one device, or a reason to run between programs.")
SPLIT = Pass("split", "aten", split, "A compiled part has one device, and no node that a program cannot contain.")
PADDING = Pass("padding", "aten", pad, "With rounded sizes, no valid element of a result depends on padding.")

TRANSPOSES = Pass("transposes", "jaxpr", defer_transposes, "Transposes are only before ops and results that need them.")
BFLOAT16_ROUNDING = Pass("bfloat16_rounding", "jaxpr", round_rarely, "All values stay the same to the last bit, with fewer roundings.")
PARTITIONABLE = Pass(
    "partitionable", "jaxpr", partitionable, "No branch depends on the platform, and dimensions are merged only where an op needs it."
)
PRECHECKS = Pass("prechecks", "jaxpr", prechecks.split, "The checks are a separate program, which runs before any write.")
SHARDED = Pass("sharded", "jaxpr", sharded_as, "Each result has the sharding that the caller requests, if any.")
OPEN_LAYOUTS = Pass("open_layouts", "jaxpr", with_open_layouts, "XLA chooses the layouts of open arrays; others are row-major.")

# All passes, in the order in which they run.
PASSES: Sequence[Pass[Any, Any]] = (
    NESTED_REGIONS, COMPOSITES,
    DETOURS, SAVED_CLONES, REGATHER, KEYED_DRAWS, MIN_CUT, SAVED_VIEWS, RESTORED_DRAWS,
    LATE_WRITES, PYTHON_COUNTERS, FREEZE, RANDOM_HOISTING, DEVICE_ORDER, SPLIT, PADDING,
    TRANSPOSES, BFLOAT16_ROUNDING, PARTITIONABLE, PRECHECKS, SHARDED, OPEN_LAYOUTS,
)  # fmt: skip
