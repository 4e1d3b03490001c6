"""Turns a graph with DTensors into a function of whole tensors, for which XLA's partitioner chooses the collectives.

TorchDynamo's graph has the DTensors of the user's code. With whole tensors in place of the DTensors, the graph computes the same values. If
the graph takes the local tensor of a process (`to_local`), the local tensors of all processes become one tensor with an extra dimension.
Each further op is applied to each local tensor (`torch.vmap`), until the graph makes a DTensor of the local tensors again (`from_local`).
So ops on local tensors need no sharding rules, and the local tensors may differ between processes.

`NotPartitioned` is raised for a graph that cannot be expressed in this way with eager mode's results. Such a graph is compiled for the
local tensors of each process.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx.traceback
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...errors import DynaxlaError
from ...lowering.graphs import user_line
from ...lowering.ops import process_values
from ...runtime import private
from ...runtime.process_meshes import ProcessMesh

if torch.distributed.is_available():
    from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard


class NotPartitioned(DynaxlaError):
    """Raised for a graph whose collectives XLA's partitioner cannot choose. The message gives the reason."""


# For each dimension of a tensor, the names of the mesh axes that shard the dimension, joined by commas.
Spec = tuple[str, ...]


@dataclass(frozen=True)
class BoundaryTensor:
    """An input or output tensor of the graph.

    Attributes:
        spec: the sharding of the tensor in the program.
        placements: the placements of a DTensor; None for a local tensor, and for a tensor that is equal on all processes.
        is_local: True for a local tensor. In the program it has an extra first dimension, for the processes.
    """

    spec: Spec
    placements: tuple[Any, ...] | None = None
    is_local: bool = False


@dataclass(frozen=True)
class LocalTensors:
    """The local tensors of all processes as one tensor, with the processes along its first dimension."""

    tensor: torch.Tensor


def has_distributed(module: GraphModule) -> bool:
    """True if a TorchDynamo graph has DTensors."""
    return torch.distributed.is_available() and any(
        isinstance(value, DTensor) for node in module.graph.nodes for value in pytree.tree_leaves(node.meta.get("example_value"))
    )


class GlobalView:
    """TorchDynamo's graph as a function of whole tensors.

    Attributes:
        mesh: the mesh of all DTensors.
        inputs: the inputs that are tensors, by position in TorchDynamo's graph.
        outputs: the outputs, with None for an output that is not a tensor. Filled by each run of `module`.
        constants: the value of each output that is not a tensor, else None. Filled by each run of `module`.
        examples: a fake whole tensor for each input.
        module: the function from the inputs to the outputs that are tensors.

    Raises: NotPartitioned.
    """

    def __init__(self, captured: GraphModule, example_inputs: Sequence[Any]) -> None:
        self._captured = captured
        self.mesh = _mesh_of(captured)
        self.inputs: dict[int, BoundaryTensor] = {}
        self.outputs: list[BoundaryTensor | None] = []
        self.constants: list[Any] = []
        self.examples: list[torch.Tensor] = []
        for position, (node, example_input) in enumerate(zip(captured.graph.find_nodes(op="placeholder"), example_inputs, strict=True)):
            if isinstance(example_input, torch.Tensor):
                self.inputs[position] = self._input(node)
            elif isinstance(example_input, (torch.SymInt, torch.SymFloat, int, float)):
                raise NotPartitioned(
                    f"its input {node.name} is a dynamic size or a number",
                    where=user_line(node),
                    hint="use torch.compile(..., dynamic=False)",
                )
        _check_outputs(captured)
        self.module = _WholeTensorModule(self)

    def _input(self, node: Node) -> BoundaryTensor:
        value = node.meta["example_value"]
        if isinstance(value, DTensor):
            boundary = self.boundary(value, node)
            if any(placement.is_partial() for placement in value.placements):
                raise NotPartitioned(
                    f"an input has the placements {value.placements}", where=user_line(node), hint="redistribute it before"
                )
            shape = tuple(value.shape)
        elif is_traceable_wrapper_subclass(value):
            raise NotPartitioned(f"an input is a {type(value).__name__}, a tensor subclass", where=user_line(node))
        else:
            boundary, shape = self.local_boundary(value.ndim), (self.mesh.size, *value.shape)
        if any(not isinstance(size, int) for size in shape):
            raise NotPartitioned("it has dynamic sizes", where=user_line(node), hint="use torch.compile(..., dynamic=False)")
        local = private.local_tensor(value) if isinstance(value, DTensor) else value
        if local.device.type != "cpu" or local.layout != torch.strided or local.is_conj() or local.is_neg():
            raise NotPartitioned(f"an input on {local.device} is not a plain CPU tensor", where=user_line(node))
        with local.fake_mode:
            example = torch.empty(shape, dtype=value.dtype, device=local.device, requires_grad=value.requires_grad)
        self.examples.append(example)
        return boundary

    def local_boundary(self, ndim: int) -> BoundaryTensor:
        """Returns the boundary tensor for a local tensor with `ndim` dimensions."""
        return BoundaryTensor((",".join(self.mesh.axes), *[""] * ndim), is_local=True)

    def boundary(self, value: Any, node: Node) -> BoundaryTensor:
        """Returns the boundary tensor for a DTensor. Raises: NotPartitioned."""
        return BoundaryTensor(self.spec(value.placements, value.shape, node), tuple(value.placements))

    def spec(self, placements: Sequence[Any], shape: Sequence[int], node: Node) -> Spec:
        """Returns the spec of a whole tensor with these placements. Partial counts as replicated. Raises: NotPartitioned."""
        dims: list[list[str]] = [[] for _ in shape]
        local_shape = list(shape)
        for placement, axis, size in zip(placements, self.mesh.axes, self.mesh.sizes, strict=True):
            if isinstance(placement, Shard) and type(placement) is Shard:
                dim = placement.dim % len(shape)
                if local_shape[dim] % size:
                    parts = size * shape[dim] // local_shape[dim]
                    raise NotPartitioned(
                        f"dimension {dim} of a tensor of shape {list(shape)} cannot be divided into {parts} equal parts",
                        where=user_line(node),
                        hint=f"choose a size that is a multiple of {parts}",
                    )
                local_shape[dim] //= size
                dims[dim].append(axis)
            elif not placement.is_replicate() and not _is_plain_partial(placement):
                raise NotPartitioned(f"a tensor has the placement {placement}, which dynaxla does not support here", where=user_line(node))
        return tuple(",".join(axes) for axes in dims)

    # Between local tensors and whole tensors

    def local_tensors(self, whole: torch.Tensor, placements: Sequence[Any], grad_reductions: Sequence[str]) -> LocalTensors:
        """Returns the local tensors of a whole tensor.

        Args:
            whole: the whole tensor.
            placements: the placement of the DTensor for each mesh axis.
            grad_reductions: the argument `grad_reduction` of `replicated_to_local` for each mesh axis.
        """
        for index, (placement, size, axis, grad_reduction) in enumerate(
            zip(placements, self.mesh.sizes, self.mesh.axes, grad_reductions, strict=True)
        ):
            if placement.is_shard():
                dim = placement.dim % (whole.ndim - index) + index
                whole = whole.unflatten(dim, (size, -1)).movedim(dim, index)
            else:
                whole = process_values.REPLICATED_TO_LOCAL(whole, index, size, axis, grad_reduction)
        return LocalTensors(whole.flatten(0, len(self.mesh.sizes) - 1))

    def whole_tensor(self, local: LocalTensors, placements: Sequence[Any]) -> torch.Tensor:
        """Returns the whole tensor of a DTensor with these local tensors. placements: the placement for each mesh axis."""
        whole = local.tensor.unflatten(0, self.mesh.sizes)
        for index, (placement, axis) in reversed(list(enumerate(zip(placements, self.mesh.axes, strict=True)))):
            if placement.is_shard():
                dim = placement.dim % (whole.ndim - index - 1) + index
                whole = whole.movedim(index, dim).flatten(dim, dim + 1)
            elif placement.is_partial():
                whole = whole.sum(index)
            else:
                whole = process_values.LOCAL_TO_REPLICATED(whole, index, axis)
        return whole


class _WholeTensorModule(torch.nn.Module):
    """The module that runs the graph on whole tensors."""

    def __init__(self, view: GlobalView) -> None:
        super().__init__()
        self._view = view
        self._captured = [view._captured]  # in a list, so that the graph does not become a submodule

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        with torch.fx.traceback.preserve_node_meta(), private.without_vmap_loops():
            return _WholeTensorInterpreter(self._captured[0], self._view).run(*tensors)


class _WholeTensorInterpreter(torch.fx.Interpreter):
    """Runs TorchDynamo's graph with whole tensors in place of DTensors and `LocalTensors` in place of local tensors."""

    def __init__(self, captured: GraphModule, view: GlobalView) -> None:
        super().__init__(captured)
        self._view, self._placeholder = view, -1
        self._remaining_inputs: Iterator[torch.Tensor] = iter(())

    def run(self, *tensors: Any, **_: Any) -> Any:
        self._remaining_inputs = iter(tensors)
        self.env = {}
        for node in self.module.graph.nodes:
            if node.op == "output":
                return self._outputs(node)
            with torch.fx.traceback.set_current_meta(node):
                self.env[node] = self._value(node)
            for used in self.user_to_last_uses.get(node, ()):
                del self.env[used]
        raise AssertionError

    def _value(self, node: Node) -> Any:
        if node.op == "placeholder":
            self._placeholder += 1
            boundary = self._view.inputs.get(self._placeholder)
            if boundary is None:  # a mesh or group: its users have the necessary metadata
                return None
            tensor = next(self._remaining_inputs)
            return LocalTensors(tensor) if boundary.is_local else tensor
        if node.op == "get_attr":
            constant = self.fetch_attr(node.target)
            if isinstance(constant, torch.nn.Module):
                raise NotPartitioned(f"it contains a nested graph: {node.target}", where=user_line(node))
            return constant
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            raise NotPartitioned(f"it contains a nested graph: {node.target}", where=user_line(node))
        try:
            value = self._call_function(node)
        except DynaxlaError:
            raise
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            first_line = str(error).partition("\n")[0]
            raise NotPartitioned(
                f"{_function_name(node)} cannot run on the tensors of all processes at once: {first_line}", where=user_line(node)
            ) from error
        _check_against_eager(node, value)
        return value

    def _call_function(self, node: Node) -> Any:
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda item: self.env[item])
        first = node.args[0].meta.get("example_value") if node.args and isinstance(node.args[0], Node) else None
        if node.op == "call_function" and getattr(node.target, "__func__", node.target) in _FROM_LOCAL:
            return self._from_local(node, *args, **kwargs)
        if node.op == "call_method" and isinstance(first, DTensor) and node.target in ("redistribute", "to_local", "full_tensor"):
            return getattr(self, f"_{node.target}")(node, first, *args, **kwargs)
        function: Callable[..., Any] = self._method(node.target) if node.op == "call_method" else node.target
        if node.op == "call_module":
            raise NotPartitioned(f"it calls the module {node.target}", where=user_line(node))
        if _has_distributed(node) or any(_has_distributed(item) for item in node.all_input_nodes):
            return function(*self._as_whole_tensors(args, node), **self._as_whole_tensors(kwargs, node))
        if node.target is operator.getitem and isinstance(args[0], (tuple, list)):
            return args[0][args[1]]
        return _for_each_process(function, args, kwargs)

    @staticmethod
    def _method(name: Any) -> Callable[..., Any]:
        return lambda self, *args, **kwargs: getattr(self, name)(*args, **kwargs)

    def _as_whole_tensors(self, args: Any, node: Node) -> Any:
        """Returns the arguments of an op on DTensors as whole tensors.

        A local tensor among the arguments must have one element, since eager mode assumes that its value is equal on all processes.
        """

        def whole(value: Any) -> Any:
            if not isinstance(value, LocalTensors):
                return value
            if value.tensor.numel() != self._view.mesh.size:
                raise NotPartitioned(f"{_function_name(node)} takes DTensors together with other tensors", where=user_line(node))
            return self._view.whole_tensor(value, [Replicate()] * len(self._view.mesh.sizes))

        return pytree.tree_map(whole, args, is_leaf=lambda value: isinstance(value, LocalTensors))

    # Conversions between DTensors and local tensors

    def _from_local(
        self,
        node: Node,
        local: Any,
        device_mesh: Any = None,
        placements: Any = None,
        *,
        run_check: bool = False,
        shape: Any = None,
        stride: Any = None,
        grad_placements: Any = None,
    ) -> torch.Tensor:
        value = node.meta["example_value"]
        if run_check or not (
            grad_placements is None or _are_equal_placements(grad_placements, _gradient_placements(value.placements), value.ndim)
        ):
            raise NotPartitioned("from_local has run_check=True, or grad_placements that differ from the default", where=user_line(node))
        if any(isinstance(item, Partial) and item.reduce_op != "sum" for item in value.placements):
            raise NotPartitioned(f"from_local makes a tensor with the placements {value.placements}", where=user_line(node))
        self._view.spec(value.placements, value.shape, node)
        return self._view.whole_tensor(self._as_local_tensors(local), value.placements)

    def _as_local_tensors(self, value: Any) -> LocalTensors:
        if isinstance(value, LocalTensors):
            return value
        mesh = self._view.mesh
        return LocalTensors(value.expand(mesh.size, *value.shape))  # no local tensor was read to compute the value, so gradients end here

    def _to_local(self, node: Node, value: Any, whole: torch.Tensor, *, grad_placements: Any = None) -> LocalTensors:
        if any(placement.is_partial() for placement in value.placements):
            raise NotPartitioned(
                f"the graph calls to_local on a partial tensor (placements {value.placements})",
                where=user_line(node),
                hint="redistribute the tensor to Replicate() or Shard(dim) before to_local",
            )
        self._view.spec(value.placements, value.shape, node)
        grad_reductions = []
        for placement, grad_placement in zip(value.placements, grad_placements or value.placements, strict=True):
            if placement.is_shard() and not _are_equal_placements([placement], [grad_placement], value.ndim):
                raise NotPartitioned(
                    f"to_local has grad_placements {grad_placement} for a tensor with the placement {placement}", where=user_line(node)
                )
            if isinstance(grad_placement, Partial) and grad_placement.reduce_op in ("sum", "avg"):
                grad_reductions.append(grad_placement.reduce_op)
            elif placement.is_shard() or grad_placement.is_replicate():
                grad_reductions.append("same")
            else:
                raise NotPartitioned(
                    f"to_local has grad_placements {grad_placement} for a tensor with the placement {placement}", where=user_line(node)
                )
        return self._view.local_tensors(whole, value.placements, grad_reductions)

    def _redistribute(
        self,
        node: Node,
        value: Any,
        whole: torch.Tensor,
        device_mesh: Any = None,
        placements: Any = None,
        *,
        async_op: bool = False,
        forward_dtype: Any = None,
        backward_dtype: Any = None,
    ) -> torch.Tensor:
        if forward_dtype is not None or backward_dtype is not None:
            raise NotPartitioned("redistribute changes the dtype of a tensor", where=user_line(node))
        return self._redistributed(node, value, whole, node.meta["example_value"].placements)

    def _full_tensor(self, node: Node, value: Any, whole: torch.Tensor, *, grad_placements: Any = None) -> LocalTensors:
        if grad_placements is not None:
            raise NotPartitioned("full_tensor has grad_placements", where=user_line(node))
        replicated = (Replicate(),) * len(value.placements)
        whole = self._redistributed(node, value, whole, replicated)
        return self._view.local_tensors(whole, replicated, ["same"] * len(replicated))

    def _redistributed(self, node: Node, value: Any, whole: torch.Tensor, placements: Sequence[Any]) -> torch.Tensor:
        if tuple(placements) == tuple(value.placements):
            return whole
        if any(placement.is_partial() for placement in placements):
            raise NotPartitioned(f"a tensor is redistributed to {placements}", where=user_line(node))
        spec, before = (self._view.spec(item, value.shape, node) for item in (placements, value.placements))
        return process_values.RESHARD(whole, spec, before)

    # Outputs

    def _outputs(self, node: Node) -> list[torch.Tensor]:
        view = self._view
        view.outputs.clear()
        view.constants.clear()
        tensors = []
        for item in node.args[0]:
            value = self.env[item] if isinstance(item, Node) else item
            example = item.meta.get("example_value") if isinstance(item, Node) else None
            tensor = value.tensor if isinstance(value, LocalTensors) else value
            if not isinstance(tensor, torch.Tensor):
                view.outputs.append(None)
                view.constants.append(value)
                continue
            if isinstance(example, DTensor):
                boundary = view.boundary(example, node)
            elif isinstance(value, LocalTensors):
                boundary = view.local_boundary(value.tensor.ndim - 1)
            else:
                boundary = BoundaryTensor(("",) * tensor.ndim)
            view.outputs.append(boundary)
            view.constants.append(None)
            tensors.append(process_values.RESHARD(tensor, boundary.spec, boundary.spec))
        return tensors


_FROM_LOCAL = {DTensor.from_local} if torch.distributed.is_available() else set()


def _for_each_process(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls a function on the local tensors of each process, with vmap. Without local tensors, calls the function once."""
    leaves, tree = pytree.tree_flatten((args, kwargs), is_leaf=lambda value: isinstance(value, LocalTensors))
    local_indices = [index for index, leaf in enumerate(leaves) if isinstance(leaf, LocalTensors)]
    if not local_indices:
        return function(*args, **kwargs)

    function = _VMAP_REPLACEMENTS.get(function, function)

    def call_in_process(*tensors: torch.Tensor) -> Any:
        local_leaves = list(leaves)
        for index, tensor in zip(local_indices, tensors, strict=True):
            local_leaves[index] = tensor
        local_args, local_kwargs = pytree.tree_unflatten(local_leaves, tree)
        return function(*local_args, **local_kwargs)

    results = torch.vmap(call_in_process, randomness="error")(*(leaves[index].tensor for index in local_indices))
    return pytree.tree_map(LocalTensors, results)


def _attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    output: torch.Tensor = torch.ops.aten._scaled_dot_product_attention_math(*args, **kwargs)[0]
    return output


def _set_item(target: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    target[index] = value
    return target


# Replacements of functions that torch.vmap does not accept: a CPU kernel without a batching rule, and a function that returns None.
_VMAP_REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.scaled_dot_product_attention: _attention,
    operator.setitem: _set_item,
}


def _check_against_eager(node: Node, value: Any) -> None:
    """Raises NotPartitioned if a node's value differs from eager mode's value in shape or dtype, or is local in place of a DTensor."""
    examples = pytree.tree_leaves(node.meta.get("example_value"))
    values = pytree.tree_leaves(value, is_leaf=lambda item: isinstance(item, LocalTensors))
    for found, example in zip(values, examples, strict=False):
        if not isinstance(example, torch.Tensor):
            continue
        tensor = found.tensor[0] if isinstance(found, LocalTensors) else found
        is_mixed = isinstance(example, DTensor) and isinstance(found, LocalTensors)
        if is_mixed or tensor.shape != example.shape or tensor.dtype != example.dtype:
            raise NotPartitioned(
                f"{_function_name(node)} gives {tensor.dtype} of shape {list(tensor.shape)}, and eager mode gives {example.dtype} of "
                f"{list(example.shape)}",
                where=user_line(node),
            )


def _mesh_of(captured: GraphModule) -> ProcessMesh:
    """Returns the mesh of all DTensors. Raises: NotPartitioned if there are several meshes, or if the mesh is not supported."""
    meshes = []
    for node in captured.graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("example_value")):
            if isinstance(value, DTensor) and value.device_mesh not in meshes:
                meshes.append(value.device_mesh)
    if len(meshes) > 1:
        raise NotPartitioned(f"its tensors are on {len(meshes)} device meshes: {meshes}", hint="use one mesh for all tensors")
    try:
        return ProcessMesh.of(meshes[0])
    except ValueError as error:
        raise NotPartitioned(str(error)) from error


def _check_outputs(captured: GraphModule) -> None:
    """Raises NotPartitioned if outputs share memory with inputs or with each other, or are not contiguous."""
    seen = {_storage(node) for node in captured.graph.find_nodes(op="placeholder")} - {None}
    output = captured.graph.output_node()
    for node in output.args[0]:
        storage = _storage(node)
        if storage in seen and storage is not None:
            raise NotPartitioned("it returns an input, or two outputs share memory", where=user_line(output))
        seen.add(storage)
        local = _local_tensor(node)
        if local is not None and not local.is_contiguous():
            raise NotPartitioned("it returns a tensor that is not contiguous", hint="return x.contiguous()")


def _local_tensor(node: Any) -> torch.Tensor | None:
    """Returns the fake tensor of a node, the local tensor for a DTensor; None for any other value."""
    value = node.meta.get("example_value") if isinstance(node, Node) else None
    value = private.local_tensor(value) if isinstance(value, DTensor) else value
    return value if isinstance(value, torch.Tensor) else None


def _storage(node: Any) -> Any:
    local = _local_tensor(node)
    return None if local is None or local.layout != torch.strided else private.id_of_storage(local.untyped_storage())


def _has_distributed(node: Node) -> bool:
    return any(isinstance(value, DTensor) for value in pytree.tree_leaves(node.meta.get("example_value")))


def _is_plain_partial(placement: Any) -> bool:
    return type(placement) is Partial and placement.reduce_op in ("sum", "avg", "max", "min")


def _gradient_placements(placements: Sequence[Any]) -> list[Any]:
    return [Replicate() if placement.is_partial() else placement for placement in placements]


def _are_equal_placements(first: Sequence[Any], second: Sequence[Any], ndim: int) -> bool:
    return [_normalized(item, ndim) for item in first] == [_normalized(item, ndim) for item in second]


def _normalized(placement: Placement, ndim: int) -> Placement:
    return Shard(placement.dim % ndim) if type(placement) is Shard else placement


def _function_name(node: Node) -> str:
    return str(node.target) if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
