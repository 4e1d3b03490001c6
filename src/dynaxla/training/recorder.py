"""Records a function as a graph of all ATen ops below autograd: those of the forward pass, the backward pass and the optimizer.

The function runs once, on fake tensors, so nothing is computed and no memory changes. Real tensors that the function reads (parameters,
buffers, optimizer state) become inputs. Ops that write are recorded as they are; AOTAutograd functionalizes them later.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.fx import Graph, Node
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only

from .. import user_frames
from ..buffers.addresses import element_distance, lies_within
from ..errors import CaptureError
from ..guards.dispatch import has_own_dispatch
from ..guards.object_graph import storage_of
from ..guards.shared_memory import is_foreign
from ..guards.torch_state import without_cached_casts
from ..lowering.asynchronous import COLLECTIVES, NAMESPACES, WAIT
from ..runtime import private
from ..runtime.guards import is_not_observed
from ..runtime.number_tracer import Formula, formula_of
from ..runtime.private import storage_id
from ..torch_ops import aten
from ..user_frames import location_of
from . import inplace_collectives, traced_numbers, tracked_arrays
from .draws import Draws, depends_on_values, have_equal_values, is_random_draw, preserve_rng_state
from .fused_steps import FusedStep, fused_step
from .local_shards import with_local_tensors
from .recording_settings import InKernelFakeMode, without_torch_compile
from .traced_numbers import TracedNumber, TracedNumberInspected, TracedNumbers
from .updates import written_nodes
from .value_reads import DATA_ASSIGNMENTS, VALUE_READS, WITHOUT_VALUE_READS, in_optimizer


class Recorder:
    """Records the graph of one run of a function.

    Args:
        tensors: the real tensors that the function may read, by path (see `Snapshot`).
        seed: the seed of the traced numbers' stand-ins (traced_numbers.py).

    Attributes:
        graph: the recorded ops.
        tensor_placeholders: placeholders of real tensors, by path.
        number_placeholders: the traced number of each of its placeholders, which are float64 tensors of rank 0.
        constants: tensors that the function makes from Python numbers, by their names in the graph.
        traced_numbers: the traced numbers.
        mode: the fake tensor mode of the recording.
        arrays: tensors in the memory of NumPy arrays that may be inputs, by path.
        arrays_read: the paths of arrays whose values have been read.
        refused: the error of the first op or value read that could not be recorded; None if all were recorded.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], seed: int, arrays: Mapping[str, torch.Tensor], arrays_read: set[str]) -> None:
        self.graph = Graph()
        self.tensor_placeholders: dict[str, Node] = {}
        self.number_placeholders: dict[Node, TracedNumber] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.traced_numbers = TracedNumbers(seed)
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.arrays, self.arrays_read = arrays, arrays_read
        self._tensors = {**tensors, **arrays}
        self._paths = {id(tensor): path for path, tensor in self._tensors.items()}
        self._is_making_constant = False
        self._foreign_constants: list[tuple[FakeTensor, torch.Tensor, torch.Tensor]] = []
        # By the id of a tensor: the node of a fake tensor, the real tensor of a fake tensor, and the fake tensor of a real tensor.
        self._nodes: dict[int, Node] = {}
        self._originals: dict[int, torch.Tensor] = {}
        self._fakes: dict[int, FakeTensor] = {}
        self._kept_alive: list[Any] = []
        self._number_fakes: dict[Any, FakeTensor] = {}
        self._draws = Draws()
        # The user's lines, by the sequence numbers of autograd's nodes.
        self._lines: dict[int, str] = {}
        self._repeated_draws: dict[Node, Node] = {}
        self._dispatch = _RecordingMode(self)
        self.refused: Exception | None = None

    def run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs the function, and returns its result, in which tensors are fake.

        Raises:
            CaptureError: Python needs a tensor's value, or an op cannot be recorded.
            TracedNumberInspected: Python reads the value of a traced number.
            Exception: any exception of the function.
        """
        try:
            with self._recording_modes():
                result = function(*args, **kwargs)
            if self.refused is not None:  # the function has caught the error
                raise self.refused
            if self.traced_numbers.inspected:
                raise TracedNumberInspected(self.traced_numbers.inspected)
            self._check_foreign_constants()
            self._check_shapes()
            return result
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            hint = (
                "return the tensor from the step, and read it outside the step"
                if isinstance(error, DataDependentOutputException)
                else "call this op outside the step, or use one whose result has a fixed size, such as torch.where instead of x[mask]"
            )
            raise CaptureError(
                f"the step's control flow, or a size in it, depends on a tensor's values ({error.func})",
                where=location_of(error),
                hint=hint,
            ) from error
        except UnsupportedOperatorException as error:
            raise CaptureError(
                f"the step calls an op that cannot run without its tensors' values: {error}", where=location_of(error)
            ) from error
        except CaptureError as error:
            if not error.where:
                raise CaptureError(error.message, op=error.op, inputs=error.inputs, hint=error.hint, where=location_of(error)) from error
            raise

    @contextlib.contextmanager
    def _recording_modes(self) -> Iterator[None]:
        with preserve_rng_state(), torch.autograd.set_multithreading_enabled(False), without_torch_compile(), without_cached_casts():  # noqa: SIM117
            with self.mode, self._dispatch, _RecordingFunctionMode(self):
                yield

    def node(self, tensor: torch.Tensor) -> Node:
        """Returns the node of a tensor."""
        return self._nodes[id(self._fake(tensor))]

    def formula_of(self, placeholder: Node) -> Formula | None:
        """Returns the formula of the traced number of a placeholder; None for a tensor."""
        number = self.number_placeholders.get(placeholder)
        return None if number is None else number.dynaxla_formula

    def original(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns the real tensor for which a fake tensor stands; None if an op of the function computed the fake tensor."""
        return self._originals.get(id(tensor))

    def call(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs an op on fake tensors, and records it."""
        if op.namespace == "profiler":
            return op(*args, **kwargs)
        if op.namespace == "c10d":
            with self._dispatch:
                functional_result = inplace_collectives.run_as_functional(op, args)
            if functional_result is not NotImplemented:
                return functional_result
        # A wait for a fake tensor belongs to a functional collective that the step itself has called.
        is_wait = op._schema.name == WAIT and isinstance(args[0], FakeTensor)
        if op.namespace in NAMESPACES and not (is_wait or op._schema.name in COLLECTIVES):
            hint = "compile only the model, with torch.compile(model, backend='dynaxla'): the other calls then run as usual"
            raise CaptureError(f"the step calls {op}, a collective or another op that runs in the background", op=str(op), hint=hint)
        if op is aten._local_scalar_dense.default:
            return self._traced_number_of(args[0])
        if (step := fused_step(op)) is not None:
            return self._record_fused_step(step, args, kwargs)
        if self._traced_numbers_in((args, kwargs)):
            return self._record_with_traced_numbers(op, args, kwargs)
        if any(isinstance(item, torch.Generator) for item in tree_flatten((args, kwargs))[0]):
            hint = "leave the argument out, so that the op draws from torch's default generator, which torch.manual_seed seeds"
            raise CaptureError(f"the step passes a torch.Generator to {op}", op=str(op), hint=hint)
        if op is aten.lift_fresh.default and not isinstance(args[0], FakeTensor):
            return args[0] if self._view_of(args[0]) is not None else self._constant(args[0])
        if op is aten._assert_async.default:  # AOTAutograd removes this overload as dead code (torch 2.13)
            op, args = aten._assert_async.msg, (*args, "Expected Tensor with single nonzero value, but got zero")
        faked_args, faked_kwargs = tree_map_only(torch.Tensor, self._fake, (tuple(args), dict(kwargs)))
        if op is aten.pow.Scalar and in_optimizer() and not faked_args[1].dim() and faked_args[1].dtype == torch.float32:
            with self._dispatch:  # see traced_numbers.number_to_power
                return torch.pow(args[0], args[1].to(torch.float64))
        result = op(*faked_args, **faked_kwargs)
        if is_random_draw(op, faked_args, faked_kwargs):
            return self._record_draw(op, faked_args, faked_kwargs, result)
        if not op._schema.is_mutable:
            result = _distinct(result)
        returns_nothing = not op._schema.returns and not op._schema.is_mutable
        if returns_nothing and op.namespace != "aten":
            hint = "call it outside the step, or leave fullgraph=True out"
            raise CaptureError(f"the step calls {op}, which returns nothing: dynaxla does not know its effect", op=str(op), hint=hint)
        if not (op._schema.is_mutable or returns_nothing or any(isinstance(item, torch.Tensor) for item in tree_flatten(result)[0])):
            return result  # a query, such as a tensor's device
        inputs = tree_map_only(torch.Tensor, lambda fake: self._nodes[id(fake)], (faked_args, faked_kwargs))
        node = self.graph.call_function(op, *inputs)
        node.meta["stack_trace"] = self._user_line()
        return self._bind_result(node, result)

    def _user_line(self) -> str:
        """Returns the user's line in fx's format. An op in a backward pass has the line of the op whose derivative it computes."""
        number, is_backward = private.autograd_position()
        if is_backward and number in self._lines:
            return self._lines[number]
        frame = user_frames.innermost()
        line = "" if frame is None else '  File "{}", line {}, in {}'.format(*frame)
        if not is_backward:
            self._lines.setdefault(number, line)
        return line

    def _have_equal_values(self, first: Node, arguments: Any) -> bool:
        """True if a draw with these arguments reads the same values as an earlier draw, the node `first`."""
        shared: list[Node] = []
        if not have_equal_values((first.args, tuple(first.kwargs.values())), arguments, self._repeated_draws, shared):
            return False
        later = itertools.takewhile(lambda node: node is not first, reversed(self.graph.nodes))
        written = [target for node in later for target in written_nodes(node)]
        return _storages(shared).isdisjoint(_storages(written))

    def _record_draw(self, op: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """Records an op that draws random numbers. A repeated draw is recorded as a copy of the first draw's result.

        The tensors in `args`, `kwargs` and `result` are fake.
        """
        tensors = [item for item in tree_flatten(result)[0] if isinstance(item, torch.Tensor)]
        draw_key = self._draws.next_key(op, args, kwargs, tensors[0].device)
        inputs = tree_map_only(torch.Tensor, lambda fake: self._nodes[id(fake)], (args, kwargs))
        first = self._draws.first(draw_key)
        if first is None:
            node = self.graph.call_function(op, *inputs)
            self._draws.add(draw_key, node, result)
            return self._bind_result(node, result)
        node, first_result = first
        if depends_on_values(op) and not self._have_equal_values(node, (inputs[0], tuple(inputs[1].values()))):
            hint = "draw the numbers with torch.rand, whose results depend only on the generator"
            raise CaptureError(
                f"the step restores the state of torch's generator, and calls {op} with other arguments", op=str(op), hint=hint
            )
        # The first result is copied right after the node of the first draw, because the step may have written to the result since.
        copies = []
        for index, fake in enumerate(tree_flatten(first_result)[0]):
            value = node if isinstance(first_result, torch.Tensor) else self._nodes[id(fake)]
            with self.graph.inserting_after(value):
                copy = self.graph.call_function(aten.clone.default, (value,))
            self._repeated_draws[copy] = value
            copies.append(self._bind_result(copy, aten.clone.default(tensors[index])))
        if op._schema.is_mutable:
            return self.call(aten.copy_.default, (args[0], copies[0]), {})
        return copies[0] if isinstance(result, torch.Tensor) else type(result)(copies)

    def _traced_numbers_in(self, values: Any) -> list[TracedNumber]:
        """Returns the traced numbers whose stand-ins are in nested containers."""
        return [number for item in tree_flatten(values)[0] if (number := self.traced_numbers.find(item)) is not None]

    def _record_fused_step(self, step: FusedStep, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Records a fused optimizer step, whose settings may be traced numbers."""
        settings = dict(kwargs)
        for key, value in kwargs.items():
            number = self.traced_numbers.find(value)
            if number is not None and key != "lr":
                if number.dynaxla_formula[0] is _value_of_tensor:
                    hint = "give the optimizer Python numbers: only the learning rate may be a tensor"
                    message = "an optimizer's setting is a tensor, and the step needs its value in Python"
                    raise CaptureError(message, op=str(step.op), hint=hint)
                if not number:  # torch's step ignores a setting of 0, such as weight_decay; the test becomes a condition
                    settings[key] = 0.0
                    continue
            settings[key] = self._as_tensor(value)
        inputs = tree_map_only(torch.Tensor, lambda tensor: self._nodes[id(self._fake(tensor))], (tuple(args), settings))
        self.graph.call_function(step, *inputs)

    def _bind_result(self, node: Node, result: Any) -> Any:
        """Binds an op's results to its node, and returns the results. A result that is an argument is returned as the caller's tensor."""
        if isinstance(result, torch.Tensor):
            if id(result) in self._nodes:  # the op wrote to this argument
                return self._originals.get(id(result), result)
            self._bind(result, node)
            node.meta["val"] = result
            return result
        if isinstance(result, (list, tuple)):
            items = []
            for index, item in enumerate(result):
                if not isinstance(item, torch.Tensor):
                    items.append(item)
                    continue
                items.append(self._bind_result(self.graph.call_function(_getitem, (node, index)), item))
            return type(result)(items) if not hasattr(result, "_fields") else type(result)(*items)
        return result

    def _bind(self, fake: torch.Tensor, node: Node) -> None:
        self._nodes[id(fake)] = node
        self._kept_alive.append(fake)

    def _fake(self, tensor: torch.Tensor) -> FakeTensor:
        """Returns the fake tensor of a tensor that the function uses. A real tensor becomes an input, or a view of an input.

        Raises: CaptureError for a real tensor without a path, unless it is a view of a tensor with a path.
        """
        if isinstance(tensor, FakeTensor):
            return tensor
        fake = self._fakes.get(id(tensor))
        if fake is None:
            path, source = self._paths.get(id(tensor)), None
            if tensor.requires_grad and not tensor.is_leaf:
                raise CaptureError(
                    f"the step reads {path or 'a tensor'}, the result of differentiable ops outside the step: a recorded step cannot "
                    "compute gradients of these ops",
                    hint="detach the tensor, or compute it in the step",
                )
            if path is None and (source := self._view_of(tensor)) is not None:
                base = self._fake(source)
                offset = source.storage_offset() + element_distance(source, tensor)
                geometry = list(tensor.shape), list(tensor.stride()), offset
            with torch.no_grad():
                if source is not None and storage_of(source) != storage_of(tensor):
                    fake = aten.as_strided.default(base, *geometry)
                else:
                    fake = self.mode.from_tensor(tensor)
            self._kept_alive.append(tensor)
            self._fakes[id(tensor)] = fake
            self._originals[id(fake)] = tensor
            if path is not None:
                self.tensor_placeholders[path] = self._placeholder(f"leaf_{len(self.tensor_placeholders)}", fake)
                self.tensor_placeholders[path].meta["path"] = path
                self._nodes[id(fake)] = self.tensor_placeholders[path]
            elif source is not None:
                node = self.graph.call_function(aten.as_strided.default, (self._nodes[id(base)], *geometry))
                self._bind(fake, node)
                node.meta["val"] = fake
            else:
                raise CaptureError(
                    f"the step reads a {tensor.dtype} tensor of shape {list(tensor.shape)} that dynaxla cannot find: it is no argument, "
                    "and the step's arguments, closure and globals do not lead to it",
                    hint="pass it to the step as an argument, or keep it in a module, a closure or a global variable",
                )
        return fake

    def _view_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns the tensor with a path, or the array as a tensor, that `tensor` is a view of; None if there is none.

        For `parameter.data`, for example, the parameter is returned.
        """
        if tensor.layout != torch.strided or not tensor.untyped_storage().nbytes():
            return None
        storage = storage_id(tensor)
        for base in self._tensors.values():
            if base.layout == torch.strided and base.dtype == tensor.dtype and storage_id(base) == storage:
                return base
        for base in self.arrays.values():
            if base.dtype == tensor.dtype and lies_within(tensor, base):
                return base
        return None

    def _placeholder(self, name: str, fake: FakeTensor) -> Node:
        """Adds a placeholder before all other nodes."""
        first = next(iter(self.graph.nodes), None)
        with self.graph.inserting_before(first):
            node = self.graph.placeholder(name)
        node.meta["val"] = fake
        return node

    def constant_from_python(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls a function that makes a tensor from Python numbers, or from objects whose values Python has read."""
        self._is_making_constant = True
        try:
            return function(*args, **kwargs)
        finally:
            self._is_making_constant = False

    def _constant(self, tensor: torch.Tensor) -> FakeTensor:
        """Adds a constant to the graph, for a tensor that the function has made from numbers."""
        if not self._is_making_constant:  # `torch.Tensor(array)` reads an array unnoticed, so arrays of this size count as read
            self.arrays_read |= {path for path, array in self.arrays.items() if array.numel() == tensor.numel()}
        name = f"constant_{len(self.constants)}"
        with _disable_current_modes():
            self.constants[name] = tensor.detach().clone()
        fake = self.mode.from_tensor(self.constants[name])
        # Every run gets a copy of the constant, because the step may write to the tensor, or return it.
        node = self.graph.call_function(aten.clone.default, (self.graph.get_attr(name),))
        node.meta["val"] = fake
        self._bind(fake, node)
        if is_foreign(tensor):
            self._foreign_constants.append((fake, tensor, self.constants[name]))
        return fake

    def _written_storages(self) -> set[int]:
        """Returns the storages of fake tensors that the graph writes to."""
        return _storages(node for item in self.graph.nodes for node in written_nodes(item))

    def tensor_at(self, path: str) -> torch.Tensor:
        """Returns the real tensor at a path."""
        return self._tensors[path]

    def written_arrays(self) -> set[str]:
        """Returns the paths of NumPy arrays that the graph writes to."""
        storages = {path: storage_of(node.meta["val"]) for path, node in self.tensor_placeholders.items() if path in self.arrays}
        return {path for path, storage in storages.items() if storage in self._written_storages()} if storages else set()

    def _check_foreign_constants(self) -> None:
        """Checks constants that the step makes in memory that torch has not allocated, such as the memory of a NumPy array.

        Raises: CaptureError if that memory was written to after the constant was made: the program has only a copy.
        """
        if not self._foreign_constants:
            return
        changed = self._written_storages()
        for fake, tensor, copy in self._foreign_constants:
            if storage_of(fake) in changed or not tracked_arrays.is_same_data(tensor, copy):
                hint = "make the tensor with torch.tensor, which copies, or pass the array to the step as an argument"
                raise CaptureError("the step makes a tensor that shares memory with a NumPy array, and writes to that memory", hint=hint)

    def _check_shapes(self) -> None:
        """Raises: CaptureError if the step changes the shape of a real tensor, as `out=` does for a larger result, or `t_`."""
        for tensor in self._originals.values():
            fake = self._fakes[id(tensor)]
            if tensor.layout == torch.strided and (fake.shape, fake.stride()) != (tensor.shape, tensor.stride()):
                before, after = list(tensor.shape), list(fake.shape)
                raise CaptureError(f"the step changes the shape of a tensor from {before} to {after}", hint="make a new tensor in the step")

    def _traced_number_of(self, tensor: torch.Tensor) -> float:
        """Returns a stand-in for a tensor's only element, which torch's C++ code reads in order to pass it to an op that takes a number."""
        fake = self._fake(tensor)
        if not fake.is_floating_point():
            raise CaptureError("the step needs the value of a tensor", hint="return the tensor from the step, and read it outside")
        number = TracedNumber(self.traced_numbers, (_value_of_tensor, formula_of(id(fake))), math.nan)
        self._number_fakes[number.dynaxla_formula] = fake
        return self.traced_numbers.stand_in(number)

    def _record_with_traced_numbers(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Records an op with a traced number among its arguments.

        Raises: TracedNumberInspected if `traced_numbers.op_with_traced_numbers` does not support the op.
        """
        numbers = self._traced_numbers_in((args, kwargs))
        function = traced_numbers.op_with_traced_numbers(op)
        if function is None:
            traced_numbers.inspect(numbers)
        replaced_args, replaced_kwargs = tree_map(self._as_tensor, (tuple(args), dict(kwargs)))
        with self._dispatch:
            result = function(*replaced_args, **replaced_kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        traced_numbers.check_conversions(op, numbers, tensors)
        return result if op._schema.returns else None

    def _as_tensor(self, value: Any) -> Any:
        number = self.traced_numbers.find(value)
        if number is None:
            return value
        return self.number_tensor(number)

    def number_tensor(self, number: TracedNumber) -> FakeTensor:
        """Returns a traced number as a fake tensor of rank 0: float64, or the tensor itself if the number is the value of a tensor."""
        if number.dynaxla_formula not in self._number_fakes:
            with self.mode:
                fake = torch.empty((), dtype=torch.float64)
            node = self._placeholder(f"number_{len(self.number_placeholders)}", fake)
            traced_numbers.mark_number(node)
            self.number_placeholders[node] = number
            self._nodes[id(fake)] = node
            self._number_fakes[number.dynaxla_formula] = fake
        return self._number_fakes[number.dynaxla_formula]


def _value_of_tensor(_: int) -> float:
    """The function in the formula of a traced number that is the value of a tensor: the value is unknown until the program runs."""
    return math.nan


def _getitem(values: Any, index: int) -> Any:
    return values[index]


def _distinct(results: Any) -> Any:
    """Returns an op's results as distinct tensors.

    Some fake implementations return one tensor twice. At a later call, the cache of fake tensors returns two tensors instead. Without this
    function, two recordings of a step would differ.
    """
    if not isinstance(results, (tuple, list)):
        return results
    items = [
        item.clone() if isinstance(item, FakeTensor) and any(item is earlier for earlier in results[:index]) else item
        for index, item in enumerate(results)
    ]
    return type(results)(items) if type(results) in (tuple, list) else results


_RECORDING_ERRORS = (
    CaptureError, TracedNumberInspected, DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException,
)  # fmt: skip


class _RecordingMode(TorchDispatchMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    @is_not_observed
    def __torch_dispatch__(self, op: Any, kinds: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if any(has_own_dispatch(kind) and not issubclass(kind, FakeTensor) for kind in kinds):
            local = with_local_tensors(args, kwargs or {}) if fused_step(op) is not None else None
            if local is None:
                return NotImplemented  # the class runs the op on its inner tensors, and those calls arrive here
            args, kwargs = local
        try:
            with private.without_torch_function():  # value reads by the recorder are not the step's own reads
                return self._recorder.call(op, args, kwargs or {})
        except _RECORDING_ERRORS as error:
            self._recorder.refused = self._recorder.refused or error
            raise


class _RecordingFunctionMode(TorchFunctionMode):
    """Refuses functions that read tensors' values in Python, and records tensors that are made from traced numbers or arrays."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, function: Any, kinds: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        numbers = traced_numbers.traced_numbers_in((args, kwargs))
        if function in (torch.tensor, torch.as_tensor) and args and not isinstance(args[0], torch.Tensor):
            if type(args[0]) is TracedNumber:
                settings = {key: value for key, value in (kwargs or {}).items() if key in ("dtype", "device")}
                given = settings.get("dtype")
                may_be_rejected = given is not None and not (given.is_floating_point or given.is_complex)  # such as uint8 of 300
                if (
                    len(settings) < len(kwargs or {})
                    or may_be_rejected
                    or (isinstance(args[0], int) and not traced_numbers.is_exact(args[0]))
                ):
                    args[0].dynaxla_inspect()
                dtype = torch.get_default_dtype() if isinstance(args[0], float) else torch.int64
                return self._recorder.number_tensor(args[0]).to(**{"dtype": dtype, **settings})
            if numbers:
                numbers[0].dynaxla_inspect()
            if isinstance(args[0], tracked_arrays.TrackedArray if function is torch.tensor else np.ndarray) and len(args) == 1:
                return _tensor_from_array(function, args[0], **(kwargs or {}))
            # torch.tensor in place of torch.as_tensor, which does not reach the dispatcher.
            return self._recorder.constant_from_python(torch.tensor, args, kwargs or {})
        if self._recorder.arrays:
            tracked_arrays.mark_read((args, kwargs))
        if function in VALUE_READS:
            name = getattr(function, "__name__", str(function))
            hint = "compute with tensors (torch.where instead of if), or return the tensor and read it outside the step"
            raise self._refuse(CaptureError(f"the step needs the value of a tensor in Python ({name})", hint=hint))
        if function in DATA_ASSIGNMENTS:
            raise self._refuse(CaptureError("the step replaces the memory of a tensor (x.data = y)", hint="copy into it: x.data.copy_(y)"))
        function = WITHOUT_VALUE_READS.get(function, function)
        if numbers and traced_numbers.takes_stand_ins(function):
            return traced_numbers.call_with_stand_ins(function, args, kwargs or {})
        return function(*args, **(kwargs or {}))

    def _refuse(self, error: CaptureError) -> CaptureError:
        self._recorder.refused = self._recorder.refused or error
        return error


def _tensor_from_array(function: Any, array: np.ndarray[Any, Any], *, requires_grad: bool = False, **settings: Any) -> torch.Tensor:
    """Returns the tensor that `torch.tensor` makes from a tracked array, or `torch.as_tensor` from any array."""
    tensor = torch.from_numpy(array).to(**settings, copy=function is torch.tensor)
    return tensor.requires_grad_() if requires_grad else tensor


for _function in (FakeTensorMode.__torch_dispatch__, InKernelFakeMode.__enter__, InKernelFakeMode.__exit__):
    is_not_observed(_function)


def _storages(nodes: Iterable[Node]) -> set[int]:
    """Returns the storages of the nodes' tensors. The tensors of a node with several results are those of its items."""
    values = [node for item in nodes for node in ([item] if "val" in item.meta else item.users)]
    return {storage_of(node.meta["val"]) for node in values if "val" in node.meta}
