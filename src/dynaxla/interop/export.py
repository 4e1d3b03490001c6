"""Exports a PyTorch model as StableHLO: torch.export captures the model, and jax.export lowers its graph, also for absent platforms."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import warnings
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any, Literal

import jax
import numpy as np
import torch
from jax import export as jax_export
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind
from torch.fx import Node
from torch.utils import _pytree as pytree

from ..artifact.manifest import DTYPES, ArraySpec, CheckSpec, Manifest
from ..artifact.model import ExportedModel
from ..artifact.stablehlo import called_functions, is_allowed
from ..artifact.structures import ARRAY, CONSTANTS, Structure, constant, mapping, sequence
from ..buffers.lost_writes import LostWrite, LostWrites
from ..capture.decompositions import decompositions
from ..errors import CaptureError, LoweringError, OptionError, UnsupportedOp, UnsupportedTensor
from ..lowering import dtypes
from ..lowering.checks import Checks
from ..lowering.eager import PORTABLE
from ..lowering.function import Function
from ..lowering.graphs import user_line
from ..lowering.interpreter import Interpreter, inner_graphs, to_numpy, with_effects
from ..lowering.registry import registry
from ..lowering.tpu.uncompilable_ops import is_uncompilable, uncompilable
from ..torch_ops import aten
from .dynamic_sizes import symbolic_sizes
from .effect_tokens import remove_tokens_of_checks

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
# Writes that an exported model cannot do: the noun for the written tensor, by the name of torch's `OutputKind`.
_MUTATIONS = {"PARAMETER_MUTATION": "parameter", "USER_INPUT_MUTATION": "user input"}
_WEIGHTS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def export(
    model: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    platforms: Sequence[str] = ("cpu", "cuda", "tpu"),
    weights: Literal["arguments", "constants"] = "arguments",
) -> ExportedModel:
    """Exports a module, a function or an ExportedProgram as a program that runs without torch.

    If the model writes to buffers (a batch norm in training mode), the new values are named results of the program: see
    `ExportedModel.call`. Random numbers are derived from a key, which the caller passes. A call raises eager mode's error for values that
    eager mode rejects, such as indices out of range.

    Args:
        model: The module, function or ExportedProgram.
        args: As for `torch.export.export`; none for an ExportedProgram. The model is captured in its current mode, training or evaluation.
            Numbers, strings and None among the arguments become constants of the program.
        kwargs: As for `torch.export.export`.
        dynamic_shapes: As for `torch.export.export`. Dynamic dimensions stay dynamic in the program.
        platforms: The platforms on which the program can run, out of "cpu", "cuda", "rocm" and "tpu". This machine need not have them. A
            program for several platforms selects its code by the platform at run time.
        weights: "arguments": the program takes the weights as arguments, and they are stored next to it. "constants": the weights are part
            of the program.

    Raises:
        CaptureError: torch.export cannot capture the model, or an op needs the size of a dynamic dimension as a number.
        UnsupportedOp: An op has no lowering, or none for these platforms.
        UnsupportedTensor: JAX cannot hold a tensor.
        OptionError: An invalid option.

    Source: torch.export (graph signatures), jax.export (calling convention, symbolic dimensions)
    """
    platforms = _checked_platforms(platforms)
    if not isinstance(kwargs, (Mapping, type(None))):
        hint = "dynaxla.export(model, args).save(directory) writes the model" if isinstance(kwargs, (str, os.PathLike)) else None
        raise OptionError(f"kwargs={kwargs!r} is not a dict of arguments", hint=hint)
    if weights not in ("arguments", "constants"):
        raise OptionError(f"weights={weights!r} is not supported", hint='give "arguments" or "constants"')
    program = _functionalize(_capture(model, tuple(args), dict(kwargs or {}), dynamic_shapes))
    return _Exporter(program, _name(model), dynamic_shapes).to_model(platforms, constants=weights == "constants")


def _checked_platforms(platforms: Sequence[str]) -> tuple[str, ...]:
    if isinstance(platforms, str) or not platforms or len(set(platforms)) < len(platforms) or set(platforms) - set(PLATFORMS):
        raise OptionError(f"platforms={platforms!r} is not supported", hint=f"give a sequence of different names of {', '.join(PLATFORMS)}")
    return tuple(platforms)


def _name(model: Any) -> str:
    return getattr(model, "__name__", None) or type(model).__name__


class _FunctionModule(torch.nn.Module):
    """A plain function as a module for torch.export, with the function's own signature.

    The function's code object is renamed to `forward`, because torch records source lines only for functions of this name.
    """

    def __init__(self, function: Any) -> None:
        super().__init__()
        if isinstance(function, FunctionType):
            code = function.__code__.replace(co_name="forward")
            renamed = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
            renamed.__kwdefaults__ = function.__kwdefaults__
            renamed.__dict__.update(function.__dict__)
            function = renamed
        self.forward = function


def _capture(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any) -> ExportedProgram:
    """Captures a model by torch.export. Takes the arguments of `export`, and raises its OptionError and CaptureError."""
    if isinstance(model, ExportedProgram):
        if args or kwargs or dynamic_shapes is not None:
            raise OptionError(
                "arguments were given together with an ExportedProgram",
                hint="leave them out: torch.export has captured it with its arguments",
            )
        return model
    if not callable(model):
        raise OptionError(f"a {type(model).__name__} cannot be exported", hint="give a module, a function or an ExportedProgram")
    module = model if isinstance(model, torch.nn.Module) else _FunctionModule(model)
    try:
        args, kwargs = _clone_repeated((args, kwargs))
        return torch.export.export(module, args, kwargs, dynamic_shapes=dynamic_shapes)
    except Exception as error:
        raise CaptureError(
            f"torch.export cannot capture {_name(model)}: {type(error).__name__}: {error}",
            hint="fix the error that torch reports; leave a dimension out of dynamic_shapes if the model needs its size as a number",
        ) from error


def _clone_repeated(arguments: Any) -> Any:
    """Clones further occurrences of a tensor among the arguments. torch.export would make them one input, for all later calls, too."""
    seen: set[int] = set()

    def copied(value: torch.Tensor) -> torch.Tensor:
        if id(value) in seen:
            return value.clone()
        seen.add(id(value))
        return value

    return pytree.tree_map_only(torch.Tensor, copied, arguments)


def _functionalize(program: ExportedProgram) -> ExportedProgram:
    """Functionalizes a program, and decomposes ops that have no lowering.

    Raises:
        CaptureError: Functionalization would lose a write.
    """
    try:
        with LostWrites(), warnings.catch_warnings():
            # torch 2.13 itself uses LeafSpec, which it has deprecated.
            warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)
            return program.run_decompositions(_decompositions())
    except LostWrite as lost:
        raise CaptureError(f"the model cannot be exported: {lost.reason}", hint=lost.hint) from None


def _decompositions() -> dict[Any, Any]:
    """Returns torch's decompositions of composite ops, except of ops that have a lowering, and dynaxla's own decompositions."""
    table = dict(torch.export.default_decompositions().items())
    for op in list(table):
        if isinstance(op, torch._ops.OpOverload) and registry.find(op, PORTABLE) is not None:
            del table[op]
    return table | decompositions(PORTABLE)


class _Exporter:
    """Lowers a captured program, with the information from its signature.

    Args:
        program: The functionalized program.
        name: The model's name.
        dynamic_shapes: As for `export`.

    Attributes:
        weights: The name of each parameter, buffer and constant that the program reads, by its position among the program's inputs.
        inputs: The name of each user input that is a tensor, by its position among the program's inputs.
        values: The parameters, buffers and constants, by name.
        arguments: The nested structure of the user's arguments.
        results: The nested structure of the results.
        sizes: The dynamic dimensions.
        updates: The names of the buffers that the program writes to.
        output_nodes: The nodes of the results, then the nodes of the buffers' new values.
        result_nodes: The nodes of the results.
        function: The lowered graph as a function.
        checks: Eager mode's checks of values (such as index ranges) that the program performs; known once the program is lowered.
    """

    def __init__(self, program: ExportedProgram, name: str, dynamic_shapes: Any) -> None:
        """Reads the signature and looks up the lowerings.

        Raises:
            CaptureError: The program has an input or an output that an exported program cannot have.
            UnsupportedOp: An op has no lowering.
            UnsupportedTensor: JAX cannot hold a tensor.
        """
        self.program, self.name = program, name
        remove_tokens_of_checks(program.graph)
        placeholders = program.graph.find_nodes(op="placeholder")
        names = {node.name for node in placeholders}
        input_specs = [spec for spec in program.graph_signature.input_specs if spec.arg.name in names]
        self.weights: dict[int, str] = {}
        self.inputs: dict[int, str] = {}
        numbers: dict[int, Any] = {}
        self.values: dict[str, torch.Tensor] = {}
        first_name: dict[int, str] = {}
        leaves: list[Structure] = []
        for position, (spec, node) in enumerate(zip(input_specs, placeholders, strict=True)):
            if spec.kind in _WEIGHTS:
                value = program.state_dict.get(spec.target, program.constants.get(spec.target))
                # A tensor with two names (tied weights) is one weight, under its first name.
                self.weights[position] = first_name.setdefault(id(value), spec.target)
                self.values[self.weights[position]] = _checked(value, spec.target)
            elif spec.kind != InputKind.USER_INPUT:
                raise _unsupported_input_error(program, name, spec)
            elif isinstance(node.meta.get("val"), torch.Tensor):
                self.inputs[position] = node.name
                _checked(node.meta["val"], node.name)
                leaves.append(ARRAY)
            else:
                numbers[position] = getattr(spec.arg, "value", node.meta.get("val"))
                if not isinstance(numbers[position], CONSTANTS):
                    raise CaptureError(
                        f"{name}: the argument {node.name} is a dynamic number", hint="pass a tensor, or leave it out of dynamic_shapes"
                    )
                leaves.append(constant(numbers[position]))
        self.arguments = _structure(program.call_spec.in_spec, leaves, "the arguments")
        self.sizes = symbolic_sizes(
            program, dynamic_shapes, [(item, placeholders[position].meta["val"]) for position, item in self.inputs.items()]
        )
        self._read_outputs()
        _remove_assertions_of_sizes(program.graph_module)
        try:
            self._interpreter = Interpreter(program.graph_module, PORTABLE, kernels=False)
        except UnsupportedOp as error:
            raise _with_export_hint(error) from None
        self._numbers = numbers
        self.function = Function(self._interpreter, self.sizes, numbers, self.output_nodes)
        self.checks: tuple[CheckSpec, ...] = ()
        self.weights = {
            position: item
            for position, item in self.weights.items()
            if position in self.function.used_inputs or placeholders[position] in self.output_nodes
        }

    def _read_outputs(self) -> None:
        """Divides the output nodes into results and new values of buffers. Raises CaptureError for any other output."""
        outputs = self.program.graph.output_node().args[0]
        results: list[Node] = []
        updated: list[Node] = []
        self.updates: list[str] = []
        leaves: list[Structure] = []
        # Tokens of checks are no outputs any more. For other tokens, the inputs have raised an error.
        output_specs = [spec for spec in self.program.graph_signature.output_specs if spec.kind != OutputKind.TOKEN]
        for spec, output in zip(output_specs, outputs, strict=True):
            if spec.kind == OutputKind.BUFFER_MUTATION:
                self.updates.append(spec.target)
                updated.append(output)
            elif spec.kind.name in _MUTATIONS:
                raise CaptureError(
                    f"{self.name} writes to its {_MUTATIONS[spec.kind.name]} {spec.target}",
                    hint="return the new value instead: JAX's arrays are immutable",
                )
            elif spec.kind != OutputKind.USER_OUTPUT:
                raise CaptureError(
                    f"{self.name} has an output of the kind {spec.kind.name}, which an exported model cannot have",
                    hint="export a forward pass without side effects",
                )
            elif isinstance(output, Node) and isinstance(output.meta.get("val"), torch.Tensor):
                results.append(output)
                leaves.append(ARRAY)
            elif isinstance(output, CONSTANTS):
                leaves.append(constant(output))
            else:
                raise CaptureError(
                    f"{self.name} returns a number that depends on sizes", hint="return tensors, and read the number from their shapes"
                )
        self.output_nodes = results + updated
        self.result_nodes = results
        self.results = _structure(self.program.call_spec.out_spec, leaves, "the results")

    def to_model(self, platforms: tuple[str, ...], *, constants: bool) -> ExportedModel:
        """Returns the exported model. Raises the exceptions of `export`."""
        if constants and self.updates:
            raise OptionError(
                f'weights="constants" for {self.name}, which writes to its buffers {", ".join(self.updates)}',
                hint='call model.eval(), or give weights="arguments": constants cannot change',
            )
        self._refuse_uncompilable(platforms)
        names = list(dict.fromkeys([*self.weights.values(), *self.updates]))
        values = {name: to_numpy(self.values[name]) for name in names}
        weights = () if constants else tuple(ArraySpec(name, value.shape, value.dtype.name) for name, value in values.items())
        inputs = tuple(self._input_spec(position, name) for position, name in self.inputs.items())
        with jax.enable_x64(True):
            program = self._program(values if constants else {}, [spec.name for spec in weights])
            avals = [jax.ShapeDtypeStruct(spec.shape, DTYPES[spec.dtype]) for spec in weights]
            avals += [jax.ShapeDtypeStruct((2,), np.uint32)] if self.function.draws_random else []
            avals += [
                jax.ShapeDtypeStruct(spec.shape, spec.jax_dtype) for spec in (self.function.specs[position] for position in self.inputs)
            ]
            exported = self._lower(program, avals, platforms)
        outputs = [
            ArraySpec(node.name, _shape_as_text(aval.shape), aval.dtype.name)
            for node, aval in zip(self.result_nodes, exported.out_avals[: len(self.result_nodes)], strict=True)
        ]
        manifest = Manifest(
            name=self.name,
            platforms=exported.platforms,
            dimensions=self.sizes.dimensions,
            weights=weights,
            inputs=inputs,
            outputs=tuple(outputs),
            arguments=self.arguments,
            results=self.results,
            updates=tuple(self.updates),
            checks=self.checks,
            draws_random=self.function.draws_random,
            calling_convention=exported.calling_convention_version,
            is_polymorphic=exported.uses_global_constants,
            made_with={name: importlib.metadata.version(name) for name in ("dynaxla", "torch", "jax")},
        )
        return ExportedModel(manifest, exported.mlir_module_serialized, {} if constants else values)

    def _refuse_uncompilable(self, platforms: tuple[str, ...]) -> None:
        """Raises UnsupportedOp for an op that XLA does not compile for one of the platforms. On such an op, XLA may crash the process."""
        module = self.program.graph_module
        for node in [node for graph in (module, *inner_graphs(module)) for node in graph.graph.nodes if node.op == "call_function"]:
            for platform in platforms:
                if is_uncompilable(node, platform):
                    raise uncompilable(node, platform)

    def _input_spec(self, position: int, name: str) -> ArraySpec:
        spec = self.function.specs[position]
        return ArraySpec(name, _shape_as_text(spec.shape), spec.jax_dtype.name)

    def _program(self, constants: Mapping[str, np.ndarray], names: Sequence[str]) -> Any:
        """Returns the program as a function. A trace of the function sets `self.checks`.

        The function takes the weights that are arguments, a key as uint32[2] if the program draws random numbers, and the inputs. It
        returns the results, the new values of buffers, and, if there are checks, the index of the first failed check (`Checks.failure`).

        Args:
            constants: The values of weights that are constants, by name.
            names: The names of the weights that are arguments.
        """

        def program(*arrays: jax.Array) -> list[jax.Array]:
            rest = list(arrays[len(names) :])
            weights = dict(zip(names, arrays, strict=False)) | {name: jax.numpy.asarray(value) for name, value in constants.items()}
            key = jax.random.wrap_key_data(rest.pop(0), impl="threefry2x32") if self.function.draws_random else None
            inputs = dict(zip(self.inputs, rest, strict=True)) | {position: weights[name] for position, name in self.weights.items()}
            results = self.function([inputs.get(position) for position in self.function.specs], key)
            self.checks = tuple(CheckSpec(check.error.__name__, check.message) for check in results.checks)
            return [*results.outputs, *([Checks(results.checks).failure()] if results.checks else [])]

        program.__name__ = program.__qualname__ = self.name
        return program

    def _lower(self, program: Any, avals: Sequence[Any], platforms: tuple[str, ...]) -> jax_export.Exported:
        """Lowers a function from `_program` to StableHLO for these platforms. Raises CaptureError, UnsupportedOp and LoweringError."""
        try:
            exported = jax_export.export(
                jax.jit(program, keep_unused=True), platforms=platforms, disabled_checks=[jax_export.DisabledSafetyCheck.custom_call("ALL")]
            )(*avals)
        except UnsupportedOp as error:
            raise _with_export_hint(error) from None
        except LoweringError as error:
            if not self.sizes.dimensions or not self._can_be_traced_with_numbers():
                raise
            is_inconclusive = isinstance(error.__cause__, jax.errors.InconclusiveDimensionOperation)
            limits = 'give the dimension limits (Dim("n", min=..., max=...)), or ' if is_inconclusive else ""
            raise CaptureError(
                f"{error.op} needs the sizes of its operands as numbers: {str(error.__cause__ or error.message).splitlines()[0]}",
                inputs=error.inputs,
                where=error.where,
                hint=f"{limits}leave the dimension out of dynamic_shapes; the dynamic dimensions are {', '.join(self.sizes.dimensions)}",
            ) from error
        except NotImplementedError as error:
            raise UnsupportedOp(f"{self.name} cannot run on {' or '.join(platforms)}: {error}", hint="choose other platforms") from error
        unlisted = sorted(target for target in called_functions(exported.mlir_module_serialized) if not is_allowed(target))
        if unlisted:
            raise UnsupportedOp(
                f"{self.name} would call {', '.join(unlisted)}, which other machines or later JAX versions may not have",
                hint="choose other platforms, or compute the result by other ops",
            )
        return exported

    def _can_be_traced_with_numbers(self) -> bool:
        """True if the program can be traced with concrete sizes, so that the symbolic dimensions are the cause of a failure."""
        function = Function(self._interpreter, self.sizes.examples(), self._numbers, self.output_nodes)
        avals = [jax.ShapeDtypeStruct(spec.shape, spec.jax_dtype) for spec in function.specs.values()]
        try:
            with jax.enable_x64(True):
                jax.eval_shape(lambda arrays: function(arrays, jax.random.key(0, impl="threefry2x32")), avals)
        except Exception:  # the trace fails with concrete sizes too, so the caller raises the original error
            return False
        return True


def _unsupported_input_error(program: ExportedProgram, name: str, spec: InputSpec) -> CaptureError:
    """Returns the error for an input that is neither a tensor nor a Python number or string."""
    effect = next(iter(program.graph.find_nodes(op="call_function", target=with_effects)), None)
    if spec.kind == InputKind.TOKEN and effect is not None:
        hint = "leave the op out: an exported program only returns results"
        return CaptureError(
            f"{effect.args[1]} has side effects, which an exported program cannot have",
            op=str(effect.args[1]),
            where=user_line(effect),
            hint=hint,
        )
    return CaptureError(
        f"the input {spec.arg.name} of {name} is no tensor, but a {spec.kind.name.lower()}",
        hint="pass tensors: an exported program takes nothing else",
    )


def _shape_as_text(shape: Sequence[Any]) -> tuple[int | str, ...]:
    return tuple(size if isinstance(size, int) else str(size) for size in shape)


def _checked(value: Any, name: str) -> Any:
    """Returns a tensor. Raises UnsupportedTensor if JAX cannot hold it."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_meta or not dtypes.is_supported(value.dtype):
        description = f"{value.dtype} {value.layout} on {value.device}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise UnsupportedTensor(
            f"{name} cannot be exported: it is {description}",
            hint="use a dense tensor with values (not on the device meta), of a dtype that JAX has",
        )
    return value


def _structure(spec: Any, leaves: Sequence[Structure], description: str) -> Structure:
    """Returns the nested structure of arguments or results.

    Args:
        spec: The structure as torch's TreeSpec.
        leaves: The descriptions of the leaves, in torch's order.
        description: The role of the nested value, for errors.

    Raises:
        CaptureError: A container is no tuple, list, mapping or dataclass, or has its items in another order than torch.
    """
    order: list[int] = []

    def describe(value: Any) -> Structure:
        if type(value) is int:
            order.append(value)
            return leaves[value]
        if isinstance(value, Mapping) and all(isinstance(key, (str, int)) for key in value):
            return mapping({key: describe(item) for key, item in value.items()})
        if isinstance(value, (tuple, list)):
            return sequence("list" if isinstance(value, list) else "tuple", [describe(item) for item in value])
        if dataclasses.is_dataclass(value):
            return mapping({field.name: describe(getattr(value, field.name)) for field in dataclasses.fields(value)})
        if value is None:
            return constant(None)
        raise CaptureError(f"{description} contain a {type(value).__name__}", hint="use tuples, lists and dicts of tensors")

    structure = describe(pytree.tree_unflatten(list(range(len(leaves))), spec))
    if order != list(range(len(leaves))):
        raise CaptureError(f"{description} contain a container that orders its items in its own way", hint="use tuples, lists and dicts")
    return structure


def _remove_assertions_of_sizes(module: torch.fx.GraphModule) -> None:
    """Removes assertions about sizes, and nodes whose number nothing uses. JAX checks the arguments' sizes by the program's signature."""
    for node in reversed(list(module.graph.nodes)):
        is_unused = not node.users and node.op == "call_function"
        is_assertion = node.target in (
            aten._assert_scalar.default,
            aten.sym_constrain_range_for_size.default,
            aten.sym_constrain_range.default,
        )
        if is_assertion or (is_unused and isinstance(node.meta.get("val"), (torch.SymInt, torch.SymBool, torch.SymFloat))):
            module.graph.erase_node(node)


def _with_export_hint(error: UnsupportedOp) -> UnsupportedOp:
    """Returns the same error with a hint for programs that cannot call torch's kernels."""
    hint = "register a lowering with dynaxla.lowers: an exported program cannot call torch's kernels"
    return UnsupportedOp(error.message, op=error.op, inputs=error.inputs, where=error.where, hint=hint)
