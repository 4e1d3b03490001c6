"""Exports a PyTorch model as StableHLO: captured by torch.export, and lowered like any graph, for platforms that need not be present."""

from __future__ import annotations

import dataclasses
import importlib.metadata
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
from ..lowering.interpreter import Interpreter, to_numpy, with_effects
from ..lowering.registry import registry
from ..torch_ops import aten
from .dynamic_sizes import symbolic_sizes

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
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

    New values of the model's buffers, such as those of a batch norm in training mode, are named results of the program: see
    `ExportedModel.call`. Random numbers are derived from a key, which the call must then have. Values that eager mode refuses, such as
    indices out of range, are refused by the call.

    Args:
        args: As for `torch.export.export`, which captures the model in its current mode (`model.eval()`); none for an ExportedProgram.
            Numbers, strings and None among the arguments become constants of the program.
        kwargs: As for `torch.export.export`.
        dynamic_shapes: As for `torch.export.export`. Dynamic dimensions stay dynamic in the program.
        platforms: The platforms out of "cpu", "cuda", "rocm" and "tpu" on which the program runs, whatever this machine is. A program for
            several platforms selects its code by the platform at run time.
        weights: "arguments": the program takes them as arguments, and they are stored next to it; "constants": they are part of the
            program.

    Raises:
        CaptureError: torch.export cannot capture the model, or a dimension that should be dynamic is not.
        UnsupportedOp: An op has no lowering, or none for these platforms.
        UnsupportedTensor: A tensor that JAX cannot hold.
        OptionError: An invalid option.

    Source: torch.export (graph signatures), jax.export (calling convention, symbolic dimensions)
    """
    platforms = _checked_platforms(platforms)
    if weights not in ("arguments", "constants"):
        raise OptionError(f"weights={weights!r} is not supported", hint='give "arguments" or "constants"')
    program = _functional(_captured(model, tuple(args), dict(kwargs or {}), dynamic_shapes))
    return _Exporter(program, _name(model), dynamic_shapes).exported(platforms, constants=weights == "constants")


def _checked_platforms(platforms: Sequence[str]) -> tuple[str, ...]:
    if isinstance(platforms, str) or not platforms or len(set(platforms)) < len(platforms) or set(platforms) - set(PLATFORMS):
        raise OptionError(f"platforms={platforms!r} is not supported", hint=f"give a sequence of different names of {', '.join(PLATFORMS)}")
    return tuple(platforms)


def _name(model: Any) -> str:
    return getattr(model, "__name__", None) or type(model).__name__


class _Called(torch.nn.Module):
    """A plain function as a module for torch.export, with the function's own signature.

    Its code is renamed to `forward`, the name of the functions whose source lines torch records.
    """

    def __init__(self, function: Any) -> None:
        super().__init__()
        if isinstance(function, FunctionType):
            code = function.__code__.replace(co_name="forward")
            named = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
            named.__kwdefaults__ = function.__kwdefaults__
            named.__dict__.update(function.__dict__)
            function = named
        self.forward = function


def _captured(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any) -> ExportedProgram:
    if isinstance(model, ExportedProgram):
        if args or kwargs or dynamic_shapes is not None:
            raise OptionError(
                "arguments were given together with an ExportedProgram",
                hint="leave them out: torch.export has captured it with its arguments",
            )
        return model
    if not callable(model):
        raise OptionError(f"a {type(model).__name__} cannot be exported", hint="give a module, a function or an ExportedProgram")
    module = model if isinstance(model, torch.nn.Module) else _Called(model)
    try:
        args, kwargs = _apart((args, kwargs))
        return torch.export.export(module, args, kwargs, dynamic_shapes=dynamic_shapes)
    except Exception as error:
        raise CaptureError(
            f"torch.export cannot capture {_name(model)}: {type(error).__name__}: {error}",
            hint="fix the error that torch reports; leave a dimension out of dynamic_shapes if the model needs its size as a number",
        ) from error


def _apart(arguments: Any) -> Any:
    """Clones tensors that occur more than once among the arguments: torch.export would treat them as one, in later calls too."""
    seen: set[int] = set()

    def copied(value: torch.Tensor) -> torch.Tensor:
        if id(value) in seen:
            return value.clone()
        seen.add(id(value))
        return value

    return pytree.tree_map_only(torch.Tensor, copied, arguments)


def _functional(program: ExportedProgram) -> ExportedProgram:
    """Returns the program without mutations, in ops that have lowerings.

    Raises:
        CaptureError: Functionalization would lose a write.
    """
    try:
        with LostWrites(), warnings.catch_warnings():
            # torch copies a tree of arguments in a way that it deprecates itself (torch 2.13).
            warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)
            return program.run_decompositions(_decompositions())
    except LostWrite as lost:
        raise CaptureError(f"the model cannot be exported: {lost.what}", hint=lost.hint) from None


def _decompositions() -> dict[Any, Any]:
    """Returns decompositions for all ops without a lowering; composite ops that have a lowering are kept whole."""
    table = dict(torch.export.default_decompositions().items())
    for op in list(table):
        if isinstance(op, torch._ops.OpOverload) and registry.find(op, PORTABLE) is not None:
            del table[op]
    return table | decompositions(PORTABLE)


class _Exporter:
    """A captured program with the contents of its signature. `dynamic_shapes`: as the user gave them."""

    def __init__(self, program: ExportedProgram, name: str, dynamic_shapes: Any) -> None:
        """Reads the signature and looks up the lowerings.

        Raises:
            CaptureError: The program does something that an exported program cannot do.
            UnsupportedOp: An op has no lowering.
            UnsupportedTensor: A tensor that JAX cannot hold.
        """
        self.program, self.name = program, name
        signature = program.graph_signature
        placeholders = program.graph.find_nodes(op="placeholder")
        self.weights: dict[int, str] = {}  # by position among the program's inputs; so are `inputs` and `numbers`
        self.inputs: dict[int, str] = {}
        numbers: dict[int, Any] = {}
        self.values: dict[str, torch.Tensor] = {}
        first: dict[int, str] = {}
        leaves: list[Structure] = []
        for position, (spec, node) in enumerate(zip(signature.input_specs, placeholders, strict=True)):
            if spec.kind in _WEIGHTS:
                value = program.state_dict.get(spec.target, program.constants.get(spec.target))
                # One tensor under two names is one weight.
                self.weights[position] = first.setdefault(id(value), spec.target)
                self.values[self.weights[position]] = _checked(value, spec.target)
            elif spec.kind != InputKind.USER_INPUT:
                raise _no_tensor(program, name, spec)
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
            program, dynamic_shapes, [(item, placeholders[place].meta["val"]) for place, item in self.inputs.items()]
        )
        self._read_outputs()
        _remove_assertions_of_sizes(program.graph_module)
        try:
            self._interpreter = Interpreter(program.graph_module, PORTABLE, kernels=False)
        except UnsupportedOp as error:
            raise _without_kernel(error) from None
        self._numbers = numbers
        self.function = Function(self._interpreter, self.sizes, numbers, self.output_nodes)
        self.checks: tuple[CheckSpec, ...] = ()
        self.weights = {
            place: item for place, item in self.weights.items() if place in self.function.read or placeholders[place] in self.output_nodes
        }

    def _read_outputs(self) -> None:
        """Divides the output nodes into results and new values of buffers."""
        outputs = self.program.graph.output_node().args[0]
        results: list[Node] = []
        updated: list[Node] = []
        self.updates: list[str] = []
        leaves: list[Structure] = []
        for spec, output in zip(self.program.graph_signature.output_specs, outputs, strict=True):
            if spec.kind == OutputKind.BUFFER_MUTATION:
                self.updates.append(spec.target)
                updated.append(output)
            elif spec.kind != OutputKind.USER_OUTPUT:
                what = f"writes to its {spec.kind.name.lower().replace('_mutation', '').replace('_', ' ')} {spec.target}"
                raise CaptureError(f"{self.name} {what}", hint="return the new value instead: JAX's arrays are immutable")
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

    def exported(self, platforms: tuple[str, ...], *, constants: bool) -> ExportedModel:
        """Returns the exported model. Raises the exceptions of `export`."""
        if constants and self.updates:
            raise OptionError(
                f'weights="constants" for {self.name}, which writes to its buffers {", ".join(self.updates)}',
                hint='call model.eval(), or give weights="arguments": constants cannot change',
            )
        names = list(dict.fromkeys([*self.weights.values(), *self.updates]))
        values = {item: to_numpy(self.values[item]) for item in names}
        weights = () if constants else tuple(ArraySpec(item, value.shape, value.dtype.name) for item, value in values.items())
        inputs = tuple(self._input_spec(place, item) for place, item in self.inputs.items())
        with jax.enable_x64(True):
            program = self._program(values if constants else {}, [spec.name for spec in weights])
            taken = [jax.ShapeDtypeStruct(spec.shape, DTYPES[spec.dtype]) for spec in weights]
            taken += [jax.ShapeDtypeStruct((2,), np.uint32)] if self.function.draws_random else []
            taken += [jax.ShapeDtypeStruct(spec.shape, spec.jax_dtype) for spec in (self.function.specs[place] for place in self.inputs)]
            made = self._lowered(program, taken, platforms)
        outputs = [
            ArraySpec(node.name, _as_text(aval.shape), aval.dtype.name)
            for node, aval in zip(self.result_nodes, made.out_avals[: len(self.result_nodes)], strict=True)
        ]
        manifest = Manifest(
            name=self.name,
            platforms=made.platforms,
            dimensions=self.sizes.dimensions,
            weights=weights,
            inputs=inputs,
            outputs=tuple(outputs),
            arguments=self.arguments,
            results=self.results,
            updates=tuple(self.updates),
            checks=self.checks,
            draws_random=self.function.draws_random,
            calling_convention=made.calling_convention_version,
            is_polymorphic=made.uses_global_constants,
            made_with={item: importlib.metadata.version(item) for item in ("dynaxla", "torch", "jax")},
        )
        return ExportedModel(manifest, made.mlir_module_serialized, {} if constants else values)

    def _input_spec(self, place: int, item: str) -> ArraySpec:
        spec = self.function.specs[place]
        return ArraySpec(item, _as_text(spec.shape), spec.jax_dtype.name)

    def _program(self, fixed: Mapping[str, np.ndarray], names: Sequence[str]) -> Any:
        """Returns a function of flat arrays.

        Args:
            fixed: The weights that are constants.
            names: The names of the weights that are arguments.
        """

        def program(*arrays: jax.Array) -> list[jax.Array]:
            rest = list(arrays[len(names) :])
            weights = dict(zip(names, arrays, strict=False)) | {item: jax.numpy.asarray(value) for item, value in fixed.items()}
            key = jax.random.wrap_key_data(rest.pop(0), impl="threefry2x32") if self.function.draws_random else None
            given = dict(zip(self.inputs, rest, strict=True)) | {place: weights[item] for place, item in self.weights.items()}
            found = self.function([given.get(place) for place in self.function.specs], key)
            self.checks = tuple(CheckSpec(check.error.__name__, check.message) for check in found.checks)
            return [*found.outputs, *([Checks(found.checks).failure()] if found.checks else [])]

        program.__name__ = program.__qualname__ = self.name
        return program

    def _lowered(self, program: Any, taken: Sequence[Any], platforms: tuple[str, ...]) -> jax_export.Exported:
        try:
            made = jax_export.export(
                jax.jit(program, keep_unused=True), platforms=platforms, disabled_checks=[jax_export.DisabledSafetyCheck.custom_call("ALL")]
            )(*taken)
        except UnsupportedOp as error:
            raise _without_kernel(error) from None
        except LoweringError as error:
            if not self.sizes.dimensions or not self._can_be_traced_with_numbers():
                raise
            is_open = isinstance(error.__cause__, jax.errors.InconclusiveDimensionOperation)
            known = 'give the dimension limits (Dim("n", min=..., max=...)), or ' if is_open else ""
            raise CaptureError(
                f"{error.op} needs the sizes of its operands as numbers: {str(error.__cause__ or error.message).splitlines()[0]}",
                inputs=error.inputs,
                where=error.where,
                hint=f"{known}leave the dimension out of dynamic_shapes; the dynamic dimensions are {', '.join(self.sizes.dimensions)}",
            ) from error
        except NotImplementedError as error:
            raise UnsupportedOp(f"{self.name} cannot run on {' or '.join(platforms)}: {error}", hint="choose other platforms") from error
        unlisted = sorted(target for target in called_functions(made.mlir_module_serialized) if not is_allowed(target))
        if unlisted:
            raise UnsupportedOp(
                f"{self.name} would call {', '.join(unlisted)}, which other machines and later versions may not have",
                hint="choose other platforms, or compute the result by other ops",
            )
        return made

    def _can_be_traced_with_numbers(self) -> bool:
        """True if lowering succeeds with concrete sizes, so that the symbolic dimensions are the cause of a failure."""
        function = Function(self._interpreter, self.sizes.examples(), self._numbers, self.output_nodes)
        taken = [jax.ShapeDtypeStruct(spec.shape, spec.jax_dtype) for spec in function.specs.values()]
        try:
            with jax.enable_x64(True):
                jax.eval_shape(lambda arrays: function(arrays, jax.random.key(0, impl="threefry2x32")), taken)
        except Exception:  # it fails with concrete sizes, too, so the original error is raised
            return False
        return True


def _no_tensor(program: ExportedProgram, name: str, spec: InputSpec) -> CaptureError:
    """Returns the error for an input that is neither a tensor nor a number."""
    effect = next(iter(program.graph.find_nodes(op="call_function", target=with_effects)), None)
    if spec.kind == InputKind.TOKEN and effect is not None:
        hint = "leave the op out: an exported program only returns results"
        return CaptureError(
            f"{effect.args[1]} has other effects than its result", op=str(effect.args[1]), where=user_line(effect), hint=hint
        )
    return CaptureError(f"{name} takes {spec.kind.name.lower()} {spec.target}", hint="pass tensors: an exported program takes nothing else")


def _as_text(shape: Sequence[Any]) -> tuple[int | str, ...]:
    return tuple(size if isinstance(size, int) else str(size) for size in shape)


def _checked(value: Any, name: str) -> Any:
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_meta or not dtypes.is_supported(value.dtype):
        told = f"{value.dtype} {value.layout} on {value.device}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise UnsupportedTensor(f"{name} is {told}", hint="an exported program takes dense tensors of a dtype that JAX has, with values")
    return value


def _structure(spec: Any, leaves: Sequence[Structure], what: str) -> Structure:
    """Returns the nesting of arguments or results. `leaves`: the descriptions of the leaves, in torch's order."""
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
        raise CaptureError(f"{what} contain a {type(value).__name__}", hint="use tuples, lists and dicts of tensors")

    found = describe(pytree.tree_unflatten(list(range(len(leaves))), spec))
    if order != list(range(len(leaves))):
        raise CaptureError(f"{what} contain a container that orders its items in its own way", hint="use tuples, lists and dicts")
    return found


def _remove_assertions_of_sizes(module: torch.fx.GraphModule) -> None:
    """Removes assertions about sizes that the program's signature makes already: JAX checks the arguments of a call against it."""
    for node in reversed(list(module.graph.nodes)):
        is_size = not node.users and node.op == "call_function" and not isinstance(node.meta.get("val"), torch.Tensor)
        about_sizes = node.target in (
            aten._assert_scalar.default,
            aten.sym_constrain_range_for_size.default,
            aten.sym_constrain_range.default,
        )
        if about_sizes or (is_size and isinstance(node.meta.get("val"), (torch.SymInt, torch.SymBool, torch.SymFloat))):
            module.graph.erase_node(node)


def _without_kernel(error: UnsupportedOp) -> UnsupportedOp:
    """Returns the same error with a hint for programs that cannot call torch's kernels."""
    hint = "register a lowering with dynaxla.lowers: an exported program cannot call torch's kernels"
    return UnsupportedOp(error.message, op=error.op, inputs=error.inputs, where=error.where, hint=hint)
