"""One ATen graph and its executables: what AOTAutograd calls.

Program         lowers the graph once for each combination of input sizes, compiles it, and from then on only runs it.
RetracedProgram traces and lowers the graph again at every call, and finds the executable by the lowered program's hash.
SplitProgram    a graph that no single XLA program can hold, as a sequence of these and of torch's own ops.
FrozenProgram   a graph whose parameters seldom change: one program for what they alone decide, one for the rest.
PackedProgram   such a graph with its weights in the order in which oneDNN reads them, as far as a thread may rely on that.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, cast

import jax
import numpy as np
import torch
from jax import lax

from .capture.between import ASYNCHRONOUS, between_programs, is_array, last_writes
from .capture.freeze import Frozen, freeze
from .capture.packing import pack_weights
from .capture.randomness import hoist
from .capture.signature import Buffer, Constant, Empty, FromBuffer, FromInput, Output, Sizes, check_tensor, only_saved, plan_outputs
from .capture.split import Part, split
from .config import Options
from .errors import CaptureError, DynaxlaError, UnsupportedOp
from .lowering import Check, Context, Interpreter, Settings, SymbolValues, TensorSpec, dtypes, fallback, packing
from .lowering.forms import Choice
from .lowering.halves import with_few_roundings
from .lowering.interpreter import describe_inputs, is_computable, user_line
from .lowering.layouts import Orders, without_transposes
from .observe import dump, metrics, ops
from .runtime import by_torch, devices, forks, heap, random, transfer, xla_options
from .runtime.arguments import Arguments, Parameter
from .runtime.cache import LeastRecentlyUsed
from .runtime.executable import Executable, compilation_error, execution_error
from .runtime.layout import Layout
from .tuning import Tuner

# Seconds. A compilation that takes longer leaves hundreds of megabytes behind in the C library's heap.
LONG = 0.5

# Forward and backward graphs hand each other values that nobody else sees.
Phase = Literal["forward", "backward", "inference"]


class Program:
    """A graph, callable with the list of its inputs (AOTAutograd's boxed convention: the list is emptied).

    module: a functional ATen graph. static_inputs: positions of parameters and buffers. phase: what a forward program gives to a backward
    program alone may have other strides than in the graph.
    Raises: UnsupportedOp, UnsupportedTensor, DeviceMismatch.
    """

    def __init__(
        self, name: str, module: torch.fx.GraphModule, static_inputs: Sequence[int], options: Options, phase: Phase = "inference"
    ) -> None:
        # On the instance, not the class: AOTAutograd wraps the backward with functools.wraps, which copies the instance's attributes only.
        self._boxed_call = True
        self.name = name
        self.options = options
        self.phase = phase
        self.device = graph_device(module)
        self.platform = devices.platform_of(self.device)
        self.interpreter = Interpreter(module, self.platform, kernels=options.fallback == "kernel")
        self.static_inputs = frozenset(static_inputs)
        placeholders = self.interpreter.placeholders
        for node in placeholders:
            if isinstance(node.meta["val"], torch.Tensor):
                check_tensor(node.meta["val"], "an input")
        self.tensor_positions = [i for i, node in enumerate(placeholders) if isinstance(node.meta["val"], torch.Tensor)]
        self.sizes = Sizes(placeholders)
        self._executables: LeastRecentlyUsed[Executable] = LeastRecentlyUsed(options.executables)
        forks.renew(self)
        if not forks.is_cut_off():
            _ = self.jax_device  # whether there is one is known now
        self._lock = forks.lock()
        self._dumps = itertools.count(1)
        metrics.add("graphs")

    def __call__(self, args: list[Any]) -> list[Any]:
        if by_torch.is_looked_at():
            return self.run_by_torch(args)
        key: Any = () if self.sizes.is_static else self.sizes.key(args)
        if self.platform == "cuda":
            key = (*key, Settings.current(self.platform))
        executable = self._executables.get(key)
        if executable is None:
            if by_torch.is_needed(args):
                return self.run_by_torch(args)
            with self._lock:
                executable = self._executables.get(key)
                if executable is None:
                    executable = self.build(args)
                    self._executables.put(key, executable)
        return executable(executable.take(args))

    def run_by_torch(self, args: list[Any]) -> list[Any]:
        """Without XLA. Raises: ForkError with options.fallback "error", where XLA cannot be used."""
        if self.options.fallback == "error" and forks.is_cut_off():
            raise forks.cut_off()
        return by_torch.run(self.interpreter.module, args)

    def after_fork(self) -> None:
        """Programs of the parent's are not called, and not freed either."""
        if len(self._executables):
            forks.leave(self._executables)
            self._executables = LeastRecentlyUsed(self.options.executables)

    @functools.cached_property
    def jax_device(self) -> jax.Device:
        return devices.jax_device(self.device)

    @functools.cached_property
    def choose(self) -> Choice:
        """How a form is chosen for a problem."""
        if self.options.tune:
            options = {**xla_options.default_options(self.platform), **self.options.xla}
            return Tuner(self.jax_device, self.options.forms, options, self.options.store("tuning"), self.options.heap == "keep").choose
        return lambda forms, problem: forms.choose(problem, self.options.forms)

    def executables(self) -> list[Executable]:
        """Those that are kept, the one not used for the longest time first."""
        return self._executables.values()

    def build(self, args: Sequence[Any]) -> Executable:
        """Trace, lower and compile the graph for inputs like these."""
        start = time.perf_counter()
        with transfer.below_caller():
            executable = self._build(args)
        if time.perf_counter() - start > LONG and self.options.heap == "keep":
            heap.return_freed_memory()
        return executable

    def _build(self, args: Sequence[Any]) -> Executable:
        specialised = Specialised(self, args)
        compiled = None
        if specialised.computes:
            with metrics.timed("trace"):
                traced = specialised.trace()
            lowered = self.lower(traced)
            compiled = self.compile(lowered, traced)
            dump.record(self.dump_name(), self.interpreter.module, lowered, compiled.text, self.options.dump_directory)
        return specialised.executable(compiled)

    def dump_name(self) -> str:
        """The graph's name; with a number behind it for every executable after the first."""
        number = next(self._dumps)
        return self.name if number == 1 else f"{self.name}_{number}"

    def lower(self, traced: jax.stages.Traced) -> jax.stages.Lowered:
        """The traced program as StableHLO."""
        with metrics.timed("lower"), jax.enable_x64(True), jax.default_device(self.jax_device):
            return traced.lower()

    def compile(self, lowered: jax.stages.Lowered, traced: jax.stages.Traced) -> transfer.XlaProgram:
        """Raises: CompilationError; OutOfMemory."""
        options = {**xla_options.options_for(self.platform, traced.jaxpr), **self.options.xla}
        with metrics.timed("compile"):
            try:
                return transfer.compile_lowered(
                    lowered, self.jax_device, options, self.options.store("programs"), self.options.heap == "keep"
                )
            except Exception as error:
                if "RESOURCE_EXHAUSTED" in str(error):
                    raise execution_error(self.name, error) from error
                raise compilation_error(self.name, error) from error


class RetracedProgram(Program):
    """The same graph as lazy tensors would run it: traced and lowered at every call, only XLA's work is found again."""

    def __call__(self, args: list[Any]) -> list[Any]:
        if by_torch.is_looked_at() or by_torch.is_needed(args):
            return self.run_by_torch(args)
        with transfer.below_caller():
            return self._trace_and_run(args)

    def _trace_and_run(self, args: list[Any]) -> list[Any]:
        specialised = Specialised(self, args)
        if not specialised.computes:
            executable = specialised.executable(None)
            return executable(executable.take(args))
        with metrics.timed("trace"):
            traced = specialised.trace()
        lowered = self.lower(traced)
        with metrics.timed("lookup"):
            key = (transfer.fingerprint(lowered), specialised.facts)
            found = self._executables.get(key)
        if found is None:
            compiled = self.compile(lowered, traced)
            dump.record(self.dump_name(), self.interpreter.module, lowered, compiled.text, self.options.dump_directory)
            found = specialised.executable(compiled)
            self._executables.put(key, found)
        with metrics.timed("run"):
            return found(found.take(args))


def make_program(
    kind: type[Program],
    name: str,
    module: torch.fx.GraphModule,
    static_inputs: Sequence[int],
    options: Options,
    phase: Phase = "inference",
    *,
    collectives: bool = True,
) -> AnyProgram:
    """A program of this kind for a graph; or several, if there are ops in it that no XLA program can hold, or with options.freeze.

    collectives: whether there may be any, and other work in the background, between the programs.
    Raises: UnsupportedOp for an op between programs if options.fallback is "error"; CaptureError for a collective that may not be.
    """
    if options.freeze:
        return _freeze(kind, name, module, static_inputs, dataclasses.replace(options, freeze=False))
    drawn: set[torch.fx.Node] = set()
    if options.exact_rng:
        module, drawn = hoist(module)
    found = between_programs(module)
    platform = devices.platform_of(graph_device(module, found))
    if options.fallback == "kernel" and platform not in fallback.PLATFORMS:
        for node in module.graph.nodes:
            if node.op == "call_function" and node not in found and not is_computable(node, platform):
                found[node] = "it has no lowering"
    unseen = last_writes(module, found) | drawn
    for node, reason in found.items():
        if reason == ASYNCHRONOUS and not collectives:
            raise _refused(CaptureError, node, reason, _INSTEAD_OF_COLLECTIVES)
        if node in unseen:
            continue
        if options.fallback == "error":
            raise _refused(UnsupportedOp, node, reason, _INSTEAD_OF_SPLITTING)
        ops.fell_back(str(node.target), f"the graph is split around it, since {reason}", user_line(node))
    if not found and not drawn:
        return kind(name, module, static_inputs, options, phase)
    return SplitProgram(kind, name, module, static_inputs, options, split(module, (found.keys() | drawn).__contains__), phase)


_INSTEAD_OF_SPLITTING = "options={'fallback': 'kernel'} splits the graph here; or use a form of fixed size, e.g. torch.where"
_INSTEAD_OF_COLLECTIVES = (
    "compile the model alone with torch.compile(model, backend='dynaxla'), and let backward, collectives and optimizer run as usual"
)


def _refused(kind: type[DynaxlaError], node: torch.fx.Node, reason: str, hint: str) -> DynaxlaError:
    message = f"{node.target} cannot be part of an XLA program: {reason}"
    return kind(message, op=str(node.target), inputs=describe_inputs(node), where=user_line(node), hint=hint)


def _freeze(kind: type[Program], name: str, module: torch.fx.GraphModule, static_inputs: Sequence[int], options: Options) -> AnyProgram:
    device = graph_device(module, between_programs(module))

    def pack(graph: torch.fx.Graph, fixed: Collection[torch.fx.Node]) -> bool:
        return device.type == "cpu" and not forks.is_cut_off() and pack_weights(graph, fixed, devices.jax_device(device), options.forms)

    def plain() -> AnyProgram:
        frozen = freeze(module, static_inputs)
        return (
            make_program(kind, name, module, static_inputs, options)
            if frozen is None
            else FrozenProgram(kind, name, frozen, static_inputs, options)
        )

    packed = freeze(module, static_inputs, pack)
    if packed is None or not packed.packed:
        return plain()
    return PackedProgram(FrozenProgram(kind, name, packed, static_inputs, options), plain)


class SplitProgram:
    """A graph with ops that no program can hold (`between_programs`): torch runs them itself, and the parts in between are programs.

    kind: of the programs. The rest as for `Program`.
    """

    def __init__(
        self,
        kind: type[Program],
        name: str,
        module: torch.fx.GraphModule,
        static_inputs: Sequence[int],
        options: Options,
        parts: list[Part],
        phase: Phase = "inference",
    ) -> None:
        self._boxed_call = True
        self.name = name
        self.placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        self.outputs = next(node for node in reversed(module.graph.nodes) if node.op == "output").args[0]
        static = {self.placeholders[position] for position in static_inputs}
        self.parts: list[tuple[Part, Callable[[list[Any]], Sequence[Any]]]] = []
        for part in parts:
            positions = [index for index, node in enumerate(part.inputs) if node in static]
            run: Callable[[list[Any]], Sequence[Any]]
            if part.compiled:
                # What a forward part gives has the strides of the graph: it may be read by torch.
                run = kind(f"{name}_part{len(self.parts)}", part.module, positions, options, "inference" if phase == "forward" else phase)
            else:
                run = functools.partial(by_torch.run, part.module)
            self.parts.append((part, run))
        last_use = {node: index for index, part in enumerate(parts) for node in part.inputs}
        kept = {node for node in self.outputs if isinstance(node, torch.fx.Node)}
        self._dead_after = [[node for node, last in last_use.items() if last == index and node not in kept] for index in range(len(parts))]

    def __call__(self, args: list[Any]) -> list[Any]:
        values: dict[Any, Any] = dict(zip(self.placeholders, args, strict=True))
        args.clear()
        for (part, run), dead in zip(self.parts, self._dead_after, strict=True):
            values.update(zip(part.outputs, run([values[node] for node in part.inputs]), strict=True))
            for node in dead:
                del values[node]
        return [values[output] if isinstance(output, torch.fx.Node) else output for output in self.outputs]


class FrozenProgram:
    """A graph for inference, in two parts: what parameters and buffers alone decide is computed again only after one has changed.

    A change is seen by the tensor itself (another object), its address, or its version counter. Writes that bump no counter of the
    tensor itself are not: through `tensor.data`, through NumPy or DLPack, and to tensors made in inference mode.
    """

    def __init__(self, kind: type[Program], name: str, frozen: Frozen, static_inputs: Sequence[int], options: Options) -> None:
        self._boxed_call = True
        self.name = name
        module, prepared, rest = frozen.module, frozen.prepared, frozen.rest
        self.by_torch: Callable[[list[Any]], Sequence[Any]] = functools.partial(by_torch.run, module)
        self.placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        self.output_values = next(node for node in reversed(module.graph.nodes) if node.op == "output").args[0]
        static = {self.placeholders[position] for position in static_inputs} | set(prepared.outputs)
        self._sources = [self.placeholders.index(node) for node in prepared.inputs]
        self._prepare = make_program(kind, f"{name}_prepared", prepared.module, range(len(prepared.inputs)), options)
        positions = [position for position, node in enumerate(rest.inputs) if node in static]
        self._run = make_program(kind, name, rest.module, positions, options)
        self._derived = prepared.outputs
        self._rest = rest
        self._kept: _Prepared | None = None
        self._lock = forks.lock()

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        if by_torch.is_looked_at():
            return self.by_torch(args)
        sources = [args[index] for index in self._sources]
        kept = self._kept
        if kept is None or not kept.is_of(sources):
            if by_torch.is_needed(args):
                return self.by_torch(args)
            with self._lock:
                kept = self._kept
                if kept is None or not kept.is_of(sources):
                    metrics.add("preparations")
                    forget = weakref.WeakMethod(self._forget)
                    kept = self._kept = _Prepared(sources, self._prepare, lambda _: (call := forget()) and call())
        values: dict[Any, Any] = dict(zip(self.placeholders, args, strict=True))
        values.update(zip(self._derived, kept.results, strict=True))
        args.clear()
        results = self._run([values[node] for node in self._rest.inputs])
        values.update(zip(self._rest.outputs, results, strict=True))
        return [values[output] if isinstance(output, torch.fx.Node) else output for output in self.output_values]

    def _forget(self) -> None:
        self._kept = None


class PackedProgram:
    """A frozen program whose weights are packed for oneDNN's kernels, and one whose weights are not, for threads in which these kernels
    take them in another order. plain: makes the second one."""

    def __init__(self, packed: FrozenProgram, plain: Callable[[], AnyProgram]) -> None:
        self._boxed_call = True
        self.name = packed.name
        self._packed = packed
        self._packed.by_torch = self._run_plain  # torch has no kernels for packed weights
        self._make_plain = plain
        self._plain: AnyProgram | None = None
        self._lock = forks.lock()

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        return self._packed(args) if packing.holds() else self._run_plain(args)

    def _run_plain(self, args: list[Any]) -> Sequence[Any]:
        with self._lock:
            if self._plain is None:
                self._plain = self._make_plain()
        return self._plain(args)


AnyProgram = Program | SplitProgram | FrozenProgram | PackedProgram


class _Prepared:
    """What `compute` gives for tensors, and how these were before it. gone: called when one of them is freed.

    It holds the tensors' storages (not the tensors), so that no other can come to lie at their addresses.
    """

    def __init__(
        self, sources: Sequence[torch.Tensor], compute: Callable[[list[Any]], Sequence[Any]], gone: Callable[[Any], object]
    ) -> None:
        # First: what another thread changes while the results are computed is seen at the next call.
        self._state = _state(sources)
        self.results = compute(list(sources))
        self._storages = [source.untyped_storage() for source in sources]
        self._references = [weakref.ref(source, gone) for source in sources]

    def is_of(self, sources: Sequence[torch.Tensor]) -> bool:
        return self._state == _state(sources)


def _state(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int, int]]:
    return [(id(tensor), tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for tensor in tensors]


class Specialised:
    """A graph with concrete sizes: what is passed to XLA, what comes back, and how the graph's outputs are made of it."""

    def __init__(self, program: Program, args: Sequence[Any]) -> None:
        self.program = program
        self.interpreter = program.interpreter
        self.args = [None if isinstance(arg, torch.Tensor) else arg for arg in args]
        placeholders = self.interpreter.placeholders
        self.symbols: SymbolValues = program.sizes.values(args)
        self.outputs, self.buffers = plan_outputs(
            placeholders, cast("Sequence[Any]", self.interpreter.output_node.args[0]), self.interpreter.module.graph, self.symbols
        )
        aliased = {output.position for output in self.outputs if isinstance(output, FromInput)}
        self.specs: dict[int, TensorSpec] = {
            position: self.symbols.spec(placeholders[position].meta["val"]) for position in program.tensor_positions
        }
        if program.phase == "backward":
            for position in self.specs.keys() - aliased:
                if isinstance(args[position], torch.Tensor):  # for an output that the loss does not use, autograd has no gradient
                    self.specs[position] = _as_given(self.specs[position], args[position])
        self.reorders = program.platform == "cpu" and self.interpreter.has_convolutions
        # Results for the backward pass alone may have their dimensions in whatever order they were computed.
        self.free: list[int] = []
        if program.phase == "forward" and self.reorders:
            self.free = only_saved(self.outputs, self.buffers, self.interpreter.output_node)
        # Tensors without elements are made inside the program; those that only outputs alias are not passed to it.
        self.passed = [position for position, spec in self.specs.items() if 0 not in spec.shape and placeholders[position].users]
        self.positions = self.passed + sorted(aliased - set(self.passed))
        # A graph without buffers of its own may still check something, or call a kernel for its effect.
        self.computes = bool(self.buffers) or self.interpreter.acts
        self.settings = Settings.current(program.platform)
        # Of a program that computes something, the trace gives them.
        returned = [output.node for output in self.outputs if isinstance(output, Constant) and output.node is not None]
        self.numbers: dict[torch.fx.Node, Any] = {} if self.computes else {node: self._number(node) for node in returned}
        self.context = Context(program.platform, self.settings, self.symbols, choose=program.choose)

    def _number(self, node: torch.fx.Node) -> Any:
        """The value of a size."""
        placeholders = self.interpreter.placeholders
        return self.args[placeholders.index(node)] if node in placeholders else self.symbols.integer(node.meta["val"])

    @property
    def facts(self) -> tuple[Any, ...]:
        """What an executable depends on besides its program."""
        checks = tuple((check.error, check.message) for check in self.context.checks)
        strides = tuple(buffer.spec.stride for buffer in self.buffers)
        return (tuple(self.specs.items()), strides, tuple(self.numbers.values()), tuple(self.context.kernels), checks)

    def trace(self) -> jax.stages.Traced:
        """Walk the graph under jax tracing."""
        parameters = self.parameters()
        avals = [jax.ShapeDtypeStruct(item.layout.packed_shape, dtypes.to_jax(item.dtype)) for item in parameters]
        seed = [jax.ShapeDtypeStruct((2,), np.int32)] if self.interpreter.draws_random else []
        layouts = [item.layout for item in parameters]

        def program(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            ctx = self.context = Context(
                self.program.platform, self.settings, self.symbols, arrays[0] if seed else None, self.program.choose, self.reorders
            )
            inputs: list[Any] = list(self.args)
            for position, spec in self.specs.items():
                if position not in self.passed:
                    inputs[position] = lax.full(spec.shape, 0, spec.jax_dtype)
            for position, layout, array in zip(self.passed, layouts, arrays[len(seed) :], strict=True):
                inputs[position] = layout.unpack(array)
            constants = [output.node for output in self.outputs if isinstance(output, Constant) and output.node is not None]
            wanted = [buffer.node for buffer in self.buffers] + constants
            values = self.interpreter.run(inputs, ctx, wanted)
            self.numbers = dict(zip(constants, values[len(self.buffers) :], strict=True))
            code = [Check.first_failed(ctx.checks)] if ctx.checks else []
            packed = [
                value if index in self.free else buffer.pack(value)
                for index, (buffer, value) in enumerate(zip(self.buffers, values, strict=False))
            ]
            return (*packed, *code)

        program.__name__ = self.program.name
        orders: Orders = {}
        with jax.enable_x64(True), jax.default_device(self.program.jax_device):
            if self.program.platform == "cpu":
                if self.reorders:
                    program, orders = without_transposes(program, self.program.platform, self.free)
                if self.program.interpreter.has_halves:
                    program = with_few_roundings(program, self.program.platform)
            traced = jax.jit(program, keep_unused=True).trace(*seed, *avals)
        for index in self.free:
            shape = self.buffers[index].spec.shape
            self._order(index, Layout.ordered(shape, orders.get(index, tuple(range(len(shape))))))
        return traced

    def _order(self, index: int, layout: Layout) -> None:
        """Give a buffer, and the outputs that it is for, another layout."""
        spec = dataclasses.replace(self.buffers[index].spec, stride=layout.strides)
        self.buffers[index] = dataclasses.replace(self.buffers[index], spec=spec, layout=layout)
        self.outputs = [
            dataclasses.replace(output, stride=layout.strides) if isinstance(output, FromBuffer) and output.buffer == index else output
            for output in self.outputs
        ]

    def parameters(self) -> list[Parameter]:
        result = []
        for position in self.passed:
            spec = self.specs[position]
            layout = Layout.of(spec.shape, spec.stride)
            result.append(Parameter(spec.shape, spec.stride, spec.dtype, layout, position in self.program.static_inputs))
        return result

    def executable(self, compiled: transfer.XlaProgram | None) -> Executable:
        program = self.program
        arguments = Arguments(self.parameters(), program.device, program.jax_device)
        seed = (lambda: random.seed(program.device, program.jax_device)) if self.interpreter.draws_random else None
        checks = [(check.error, check.message) for check in self.context.checks]
        return Executable(
            program.name,
            compiled,
            arguments,
            self._assembler(),
            seed,
            program.device,
            self.positions,
            checks,
        )

    def _assembler(self) -> Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], list[Any]]:
        """How to make the graph's outputs of the program's buffers and the inputs."""
        buffer_specs = [_BufferView(buffer) for buffer in self.buffers]
        index_of = {position: index for index, position in enumerate(self.positions)}
        given: set[int] = set()
        makers: list[Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], Any]] = []
        places: list[int] = []
        first_place: dict[torch.fx.Node, int] = {}
        nodes = cast("Sequence[Any]", self.interpreter.output_node.args[0])
        may_differ = self.program.phase == "backward"
        uses = Counter(
            output.buffer for node, output in dict(zip(nodes, self.outputs, strict=True)).items() if isinstance(output, FromBuffer)
        )
        for node, output in zip(nodes, self.outputs, strict=True):
            if isinstance(node, torch.fx.Node):
                places.append(first_place.setdefault(node, len(makers)))
                if places[-1] < len(makers):
                    continue
            else:
                places.append(len(makers))
            again = isinstance(output, FromBuffer) and output.buffer in given
            shared = self.program.phase if isinstance(output, FromBuffer) and uses[output.buffer] > 1 and not may_differ else None
            makers.append(_maker(output, buffer_specs, index_of, self.numbers, self.specs, self.program.device, again, shared, may_differ))
            if isinstance(output, FromBuffer):
                given.add(output.buffer)

        def assemble(buffers: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> list[Any]:
            return [make(buffers, tensors) for make in makers]

        if len(makers) == len(places):
            return assemble

        def repeat(buffers: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> list[Any]:
            made = assemble(buffers, tensors)
            return [made[place] for place in places]

        return repeat


def _as_given(spec: TensorSpec, tensor: torch.Tensor) -> TensorSpec:
    """The spec of a backward graph's input, with the strides that it has: what the forward program saves may have its own."""
    given = tensor.stride()
    both = Layout.of(spec.shape, spec.stride), Layout.of(spec.shape, given)
    return dataclasses.replace(spec, stride=given) if all(layout.is_whole for layout in both) else spec


class _BufferView:
    """A buffer as torch sees it: contiguous, packed."""

    def __init__(self, buffer: Buffer) -> None:
        self.shape = buffer.shape
        self.dtype = buffer.spec.dtype
        self.whole = (buffer.spec.shape, buffer.spec.stride) if not buffer.scattered and buffer.layout.is_row_major else None


def _laid_out(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The tensor, or if it has other strides than the graph was traced with (a gradient may), a copy that has those."""
    if tensor.stride() == spec.stride or Layout.of(tuple(tensor.shape), tensor.stride()) == Layout.of(spec.shape, spec.stride):
        return tensor
    metrics.add("input_copies")
    return torch.empty_strided(spec.shape, spec.stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor.detach())


def _maker(
    output: Output,
    buffers: Sequence[_BufferView],
    index_of: dict[int, int],
    numbers: dict[torch.fx.Node, Any],
    specs: dict[int, TensorSpec],
    device: torch.device,
    again: bool,
    shared: Phase | None,
    may_differ: bool,
) -> Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], Any]:
    """again, shared: as for `_buffer_maker`. may_differ: whether inputs may have other strides than in the graph, as saved tensors may."""
    if isinstance(output, Constant):
        value = output.value if output.node is None else numbers[output.node]
        return lambda _, __: value
    if isinstance(output, Empty):
        spec, is_conj, is_neg = output.spec, output.is_conj, output.is_neg
        return lambda _, __: _flagged(torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device), is_conj, is_neg)
    if isinstance(output, FromInput):
        index = index_of[output.position]
        source = specs[output.position]
        if output.whole and may_differ:
            return lambda _, tensors: _laid_out(tensors[index], source)
        if output.whole:
            return lambda _, tensors: tensors[index]
        shape, stride, offset = output.shape, output.stride, output.offset
        is_conj, is_neg, dtype = output.is_conj, output.is_neg, output.dtype

        def view(_: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
            base = _unflagged(_laid_out(tensors[index], source))
            if base.dtype != dtype:
                return _flagged(transfer.view_as(base, dtype, shape, stride, offset), is_conj, is_neg)
            if may_differ:
                return _flagged(transfer.reinterpret(base, shape, stride, offset), is_conj, is_neg)
            # A view also for autograd, which otherwise would not see that a write to one is a write to the other.
            return _flagged(base.as_strided(shape, stride, base.storage_offset() + offset), is_conj, is_neg)

        return view
    make = _buffer_maker(output, buffers[output.buffer], again, shared)
    if output.device.type == device.type:
        return make
    return lambda results, tensors: make(results, tensors).to(output.device)


def _buffer_maker(
    output: FromBuffer, view: _BufferView, again: bool, shared: Phase | None
) -> Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], torch.Tensor]:
    """again: whether an earlier output is the buffer's own tensor; this one is then another tensor on the same memory.

    shared: the phase, if others are on that memory, too, so that autograd should see that a write to one is a write to all. What a forward
    graph gives, autograd takes for views of one another only where AOTAutograd says so.
    """
    index, shape, stride, offset, dtype = output.buffer, output.shape, output.stride, output.offset, output.dtype
    is_whole = view.whole == (shape, stride) and offset == 0 and view.dtype == dtype and not output.is_conj and not output.is_neg
    if is_whole and not again:
        return lambda buffers, _: buffers[index]

    def make(buffers: Sequence[torch.Tensor], _: Sequence[torch.Tensor]) -> torch.Tensor:
        base = buffers[index]
        if base.dtype != dtype:
            base = base.view(-1).view(dtype)
        if shared is not None:
            base = base.detach() if shared == "forward" else base
            return _flagged(base.as_strided(shape, stride, base.storage_offset() + offset), output.is_conj, output.is_neg)
        return _flagged(transfer.reinterpret(base, shape, stride, offset), output.is_conj, output.is_neg)

    return make


def _flagged(tensor: torch.Tensor, is_conj: bool, is_neg: bool) -> torch.Tensor:
    tensor = torch._conj(tensor) if is_conj else tensor
    return torch._neg_view(tensor) if is_neg else tensor


def _unflagged(tensor: torch.Tensor) -> torch.Tensor:
    """What memory holds, whatever the tensor makes of it."""
    tensor = torch._conj(tensor) if tensor.is_conj() else tensor
    return torch._neg_view(tensor) if tensor.is_neg() else tensor


def graph_device(module: torch.fx.GraphModule, between: Collection[torch.fx.Node] = ()) -> torch.device:
    """The device of a graph. Rank-0 CPU tensors may stand beside tensors of another device, as in eager mode.

    between: the nodes that run between programs; what only they read or give may be anything.
    Raises: DeviceMismatch; UnsupportedTensor.
    """
    found: set[torch.device] = set()
    scalars: set[torch.device] = set()
    for node in module.graph.nodes:
        value = node.meta.get("val")
        anything = node in between or (between and node.users and all(user in between or user.op == "output" for user in node.users))
        for tensor in value if isinstance(value, (tuple, list)) else [value]:
            if isinstance(tensor, torch.Tensor):
                if not anything or is_array(tensor):
                    check_tensor(tensor, "a tensor of the graph")
                (found if tensor.dim() or tensor.device.type != "cpu" else scalars).add(tensor.device)
    return devices.common_device(found or scalars)
