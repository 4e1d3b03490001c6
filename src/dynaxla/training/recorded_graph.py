"""A recorded graph as an executable: an XLA program, and in-place updates that torch does after the program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..backend import compile_graph
from ..config import Options
from ..guards.object_graph import metadata_of, storage_of
from ..runtime import late_checks
from .traced_numbers import is_number
from .updates import take_updates


class RecordedGraph:
    """A graph of ATen ops that may write to its inputs.

    Args:
        graph: the graph, without an output node. The constructor changes the graph.
        placeholders: the graph's inputs: tensors, and Python numbers that `traced_numbers.mark_number` has marked.
        outputs: the nodes whose values a run returns.
        constants: the tensors that the graph refers to by name.
    """

    def __init__(self, graph: Graph, placeholders: Sequence[Node], outputs: Sequence[Node], constants: Mapping[str, torch.Tensor]) -> None:
        self._outputs = list(outputs)
        self._updates = take_updates(graph, self._outputs)
        update_nodes = {update.node for update in self._updates}
        update_reads = dict.fromkeys(node for update in self._updates for node in update.nodes() if node not in update_nodes)
        self._program_outputs = list(
            dict.fromkeys(
                [node for node in self._outputs if node not in update_nodes] + [node for node in update_reads if node.op != "placeholder"]
            )
        )
        positions = {node: index for index, node in enumerate(placeholders)}
        self._update_inputs = [(node, positions[node]) for node in update_reads if node.op == "placeholder"]
        program_inputs = [node for node in placeholders if node.users or node in self._program_outputs]
        for node in placeholders:
            if node not in program_inputs:
                graph.erase_node(node)
        self._program_inputs = [(positions[node], is_number(node)) for node in program_inputs]
        # Positions of the placeholders that the program or the updates read.
        self.used_positions = sorted({position for position, _ in self._program_inputs} | {position for _, position in self._update_inputs})
        graph.output(self._program_outputs)
        graph.lint()
        self._module = GraphModule(dict(constants), graph)
        self._input_layouts: list[Any] = []
        self._compiled: Callable[..., Sequence[torch.Tensor]] | None = None

    def compile(self, options: Options, values: Sequence[Any]) -> None:
        """Compiles the program. `values` are tensors and floats for the placeholders, as for `run`."""
        examples = self._tensors(values)
        self.store_input_layouts(values)
        with torch.no_grad():
            self._compiled = compile_graph(self._module, examples, options)

    def store_input_layouts(self, values: Sequence[Any]) -> None:
        """Stores metadata and aliasing of the program's inputs, for `reuse_executable`."""
        examples = self._tensors(values)
        storages = {storage_of(tensor): index for index, tensor in reversed(list(enumerate(examples)))}
        self._input_layouts = [(metadata_of(tensor), storages[storage_of(tensor)], tensor.storage_offset()) for tensor in examples]

    def reuse_executable(self, other: RecordedGraph) -> bool:
        """Uses the other graph's executable if the XLA programs are equal; the updates may differ.

        Returns: True if the programs are equal.
        """
        constants, other_constants = dict(self._module.named_buffers()), dict(other._module.named_buffers())
        same = (
            self._module.code == other._module.code
            and self._input_layouts == other._input_layouts
            and constants.keys() == other_constants.keys()
            and all(
                tensor.dtype == other_constants[name].dtype and torch.equal(tensor, other_constants[name])
                for name, tensor in constants.items()
            )
        )
        if same:
            self._compiled = other._compiled
        return same

    def _tensors(self, values: Sequence[Any]) -> list[torch.Tensor]:
        return [
            torch.tensor(values[position], dtype=torch.float64) if is_traced else values[position]
            for position, is_traced in self._program_inputs
        ]

    def run(self, values: Sequence[Any]) -> list[torch.Tensor]:
        """Runs the program, then the updates, and returns the outputs.

        The graph's inputs are written only if the program succeeds. On a GPU the host does not wait for the program, so the updates check
        on the device whether it has succeeded.

        Args:
            values: tensors and floats for the placeholders; None for placeholders that are not in `used_positions`.
        """
        assert self._compiled is not None
        with torch.no_grad():
            with late_checks.collected() as codes:
                results = self._compiled(*self._tensors(values))
            values_by_node: dict[Node, Any] = dict(zip(self._program_outputs, results, strict=True))
            for node, position in self._update_inputs:
                values_by_node.setdefault(node, values[position])
            failed = late_checks.any_failed(codes) if self._updates else None
            for update in self._updates:
                values_by_node[update.node] = update.run(values_by_node.__getitem__, failed)
        return [values_by_node[node] for node in self._outputs]
