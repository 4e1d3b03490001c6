"""Detects inference graphs for which AOTAutograd's runtime wrapper is not needed, and replaces the wrapper.

The wrapper writes mutated inputs, derives views of inputs and of other outputs, unwraps subclasses and disables gradient mode. Most
inference graphs need none of these, and the wrapper takes two to three microseconds at every call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._functorch._aot_autograd.descriptors import PlainAOTOutput
from torch._functorch._aot_autograd.schemas import MutationType, OutputType
from torch.fx import GraphModule
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .graph import written_inputs


def leading_writes(metadata: Any, module: GraphModule, captured: GraphModule, example_inputs: Sequence[Any]) -> tuple[int, ...] | None:
    """Returns the positions of the inputs to which the wrapper writes the first results, in order; None if the wrapper does more.

    If the wrapper writes no results, TorchDynamo can call the graph's program directly.

    Args:
        metadata: AOTAutograd's ViewAndMutationMeta. It describes the inner tensors of subclasses, not the subclasses.
        module: the inference graph.
        captured: TorchDynamo's graph, which has the subclasses.
        example_inputs: the inputs of TorchDynamo's graph.
    """
    placeholders = module.graph.find_nodes(op="placeholder")
    only_writes = (
        len(placeholders) == len(example_inputs)
        and all(isinstance(item, (torch.Tensor, int, torch.SymInt)) for item in example_inputs)
        and not any(map(is_traceable_wrapper_subclass, example_inputs))
        and _returns_plain_tensors(captured)
        and all(map(_needs_only_copies, metadata.input_info))
        and all(_is_plain(info) for info in metadata.output_info)
        and not metadata.num_intermediate_bases
        and not metadata.tokens
        and not metadata.is_rng_op_functionalized
    )
    written = tuple(position for position, info in enumerate(metadata.input_info) if info.mutates_data)
    # Result i is the new value of input written[i], and no other result is written.
    return written if only_writes and list(written_inputs(module.graph).items()) == list(enumerate(written)) else None


def with_leading_writes(program: Callable[[list[Any]], Sequence[Any]], written: Sequence[int]) -> Callable[..., Any]:
    """Returns a function for TorchDynamo that calls a program and writes the first results to inputs, as AOTAutograd's wrapper does.

    If a result is the input itself, the program has already written to the input.

    Args:
        program: takes a list of arguments, and may clear the list.
        written: the positions of the inputs to which the first results are written, from `leading_writes`.
    """
    if not written:
        return lambda *args: program(list(args))
    count = len(written)

    def call(*args: Any) -> Sequence[Any]:
        results = program(list(args))
        for position, value in zip(written, results, strict=False):  # the further results are the graph's own
            if value is not args[position]:
                args[position].copy_(value)
        return results[count:]

    return call


def rederived_outputs(metadata: Any, module: GraphModule) -> frozenset[int]:
    """Returns the indices of the outputs that the wrapper derives from an input: an input itself, or a view of an input.

    metadata: AOTAutograd's ViewAndMutationMeta, or None if it is not available.
    """
    descriptions = module.graph.output_node().meta.get("desc") or ()
    infos = metadata.output_info if metadata is not None else ()
    return frozenset(
        index
        for index, item in enumerate(descriptions)
        if isinstance(item, PlainAOTOutput)
        and item.idx < len(infos)
        and infos[item.idx].output_type in (OutputType.is_input, OutputType.alias_of_input)
    )


def _returns_plain_tensors(captured: GraphModule) -> bool:
    """True if all outputs of TorchDynamo's graph are tensors and not wrapper subclasses, according to the graph's metadata."""
    outputs = pytree.tree_leaves(captured.graph.output_node().args)
    values = [output.meta.get("example_value", output.meta.get("val")) for output in outputs if isinstance(output, torch.fx.Node)]
    return len(values) == len(outputs) and all(
        isinstance(value, torch.Tensor) and not is_traceable_wrapper_subclass(value) for value in values
    )


def _needs_only_copies(info: Any) -> bool:
    """True if the wrapper leaves an input unchanged, or only copies a result to an input that does not require grad."""
    untouched = not info.mutates_metadata and not info.mutates_storage_metadata and not info.mutation_inductor_storage_resize
    return untouched and (not info.mutates_data or (not info.requires_grad and info.mutation_type is MutationType.MUTATED_OUT_GRAPH))


def _is_plain(info: Any) -> bool:
    """True if an output is a tensor with memory of its own and a static shape, and does not require grad."""
    plain = info.output_type is OutputType.non_alias and issubclass(info.raw_type, torch.Tensor)
    return plain and not info.dynamic_dims and not info.requires_grad
