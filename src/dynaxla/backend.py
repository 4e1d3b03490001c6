"""The backends of `torch.compile`, which torch finds by name through the entry-point group `torch_dynamo_backends`.

The life of a graph: TorchDynamo's FX graph -> AOTAutograd's functional ATen graphs -> (at the first call with given sizes) StableHLO -> an
XLA executable, which serves every later call with these sizes.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.utils  # torch imports it during the first capture, where a second thread could see it half imported
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext
from torch.fx import GraphModule
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .buffers.lost_writes import LostWrite, LostWrites, unwatched
from .buffers.overlaps import Overlaps, folded, guarded, overlooked
from .capture.decompositions import decompositions
from .capture.graph import AtenGraph, Phase
from .capture.graph_cache import KeptGraph, key_of
from .capture.inputs import Sizes, check_tensor
from .capture.runtime_wrapper import around, remade, writes_alone
from .config import Options
from .engine import artifact
from .engine.compositions import engine_for
from .engine.protocol import Runner
from .ensemble.compiled import Seen, compete
from .errors import DynaxlaError, OptionError, UnsupportedTensor, UnsupportedVersion
from .lowering import registry
from .lowering.forms import check_forced
from .observe import coverage, dump, events, metrics
from .partitioning import NotPartitioned, compile_partitioned, has_distributed, leave
from .passes.dynamo.composites import kept_whole
from .passes.dynamo.nested_regions import inline_writing_regions
from .passes.joint.partition import LateOutput, partition
from .runtime import capture_lock, devices, guards, machine, private

_graph_numbers = itertools.count()


def dynaxla(
    module: GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compiles a graph that is traced once: it is lowered and compiled for each combination of input sizes, and then only run.

    Use: torch.compile(model, backend="dynaxla", options={...}); see `Options`.
    Raises: OptionError, UnsupportedOp, UnsupportedTensor, DeviceMismatch.
    """
    parsed = Options.parse(options, mode)
    if not parsed.engines:
        return _compile(module, example_inputs, parsed)
    if getattr(torch._functorch.config, "force_autograd_cache", False):
        hint = "leave engines out: aot_compile saves one program, and does not measure engines"
        raise OptionError("option engines together with aot_compile or force_autograd_cache", hint=hint)
    seen = Seen()
    served = compete(module, example_inputs, parsed, _compile, seen)
    if seen.overlaps is None:
        return served
    return guarded(served, functools.partial(_by_torch, module, parsed, _OVERLAP), seen.overlaps)


def dynaxla_auto(
    module: GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compiles a graph as `dynaxla` does, with engines=["dynaxla", "inductor", "eager"] unless options say otherwise."""
    return dynaxla(module, example_inputs, mode=mode, options={"engines": ["dynaxla", "inductor", "eager"], **(options or {})})


def dynaxla_retrace(
    module: GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compiles a graph that is traced again at every call, as with lazy tensors; the program's hash finds the executable.

    This is a baseline to measure against.

    Source: the backend `torchxla_trivial` of PyTorch PR #87741.
    """
    parsed = Options.parse(options, mode)
    if parsed.engines:
        raise OptionError(
            "option engines for dynaxla_retrace", hint="use the backend dynaxla: dynaxla_retrace is only a baseline for measurements"
        )
    if parsed.compile == "background":
        raise OptionError(
            "option compile='background' for dynaxla_retrace", hint="use the backend dynaxla: dynaxla_retrace traces at every call"
        )
    if parsed.collectives == "xla":
        raise OptionError("option collectives='xla' for dynaxla_retrace", hint="use the backend dynaxla, or collectives='torch'")
    return _compile(module, example_inputs, parsed, retrace=True)


def compile_graph(module: GraphModule, example_inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    """Compiles a graph of ATen ops that may write to its inputs. Call it under `torch.no_grad()`.

    Raises: the errors of `dynaxla`; CaptureError for a graph with collectives or with other asynchronous work.
    """
    return _compile(module, example_inputs, options, collectives=False)


def _compile(
    module: GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    *,
    retrace: bool = False,
    collectives: bool = True,
    seen: Seen | None = None,
) -> Callable[..., Any]:
    """Captures a graph with AOTAutograd and gives the ATen graphs to the engine, which returns a runner for each.

    Args:
        retrace: the engine traces at every call.
        collectives: the graph may have collectives.
        seen: filled in with facts about the graph. A caller that passes it must guard `seen.overlaps` itself.
    """
    private.warn_of_newer_releases()
    pickled = False
    if getattr(torch._functorch.config, "force_autograd_cache", False):
        _check_may_be_pickled(module, options, retrace)
        pickled = torch._functorch.config.bundled_autograd_cache  # without it torch looks up results, but keeps only Inductor's
    check_forced(options.forms)
    options.store("programs")  # raises now if the directory cannot be used
    if options.dump is not None:
        dump.prepare(options.dump)
    inline_writing_regions(module)
    tensors: Sequence[torch.Tensor] = [example for example in example_inputs if isinstance(example, torch.Tensor)]
    for tensor in tensors:
        if not is_traceable_wrapper_subclass(tensor):  # for a subclass, the graph has the wrapped tensors
            check_tensor(tensor, "an input")
    main_device = _main_device(module, tensors)
    platform = devices.platform_of(main_device)
    if main_device.type == "cuda" and _names_current_gpu(module):
        guards.guard_current_gpu()
    if devices.is_in_xla(main_device):
        _refuse(options, pickled)
    number = next(_graph_numbers)
    if seen is not None:
        seen.name, seen.device = f"dynaxla_{number}", main_device
        if devices.is_in_xla(main_device):
            seen.obstacle = "its tensors are on the device jax"
    if events.is_heard():
        events.tell(events.Captured(number, module, options, is_step=not collectives, competes=seen is not None))
    if options.partition == "xla" and has_distributed(module):
        try:
            if pickled:
                raise NotPartitioned("aot_compile saves a program of local tensors")
            if seen is not None:
                seen.obstacle = "XLA partitions it over processes"
            with metrics.timed("capture"):
                return compile_partitioned(module, example_inputs, options, number)
        except NotPartitioned as reason:
            leave(f"dynaxla_{number}", reason, options)
    overlapping = overlooked(example_inputs)

    def guard(compiled: Callable[..., Any], overlaps: Overlaps) -> Callable[..., Any]:
        if seen is not None:
            seen.overlaps = overlaps
            return compiled
        return guarded(compiled, functools.partial(_by_torch, module, options, _OVERLAP), overlaps)

    unwrapped: list[Callable[..., Any]] = []
    writing: list[Overlaps] = []
    engine = engine_for(options, retrace=retrace, collectives=collectives)
    with metrics.timed("capture"):
        wants_gradients = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        store = None if main_device.type != "cpu" or overlapping or wants_gradients or pickled else options.store("graphs")
        key = key_of(module, example_inputs, (options.facts, platform, retrace, collectives)) if store is not None else None
        if store is not None and key is not None and (kept := KeptGraph.find(store, key)) is not None:
            with capture_lock.capturing():
                graph = kept.graph(f"dynaxla_{number}_inference")
                if seen is not None:
                    seen.look(graph.module)
                    seen.written = kept.written
                runner = engine.runner(graph)
            metrics.add("kept_graphs")
            overlaps = Overlaps(example_inputs, kept.written, kept.static, static=True)
            run = kept.around(runner)
            return guard(run, overlaps) if overlaps.may_change else run
        registry.fill()  # before AOTAutograd sets its dispatch modes

    def compiler(phase: Phase) -> Callable[[GraphModule, Sequence[Any]], Runner]:
        @unwatched()
        def compile_graph(aten_graph: GraphModule, _: Sequence[Any]) -> Runner:
            static = _static_inputs() if phase != "backward" else ()
            if seen is not None and phase == "inference":
                seen.look(aten_graph)
            if options.freeze and phase != "inference":
                hint = "call the model under torch.no_grad(), or call model.requires_grad_(False) before"
                raise OptionError("option freeze is for inference, and this call needs gradients", hint=hint)
            metadata = _metadata()
            made_anew = remade(metadata, aten_graph) if phase == "inference" else frozenset()
            graph = AtenGraph(f"dynaxla_{number}_{phase}", aten_graph, tuple(static), phase, remade=made_anew)
            if events.is_heard():
                ops = [str(node.target) for node in aten_graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
                events.tell(events.Functional(number, graph, ops))
            alone = None
            if phase == "inference" and metadata is not None and not pickled:
                alone = writes_alone(metadata, aten_graph, module, example_inputs)
            # Here, since an engine may change the graph.
            kept = KeptGraph.of(graph, alone) if key is not None and alone is not None else None
            program: Any = artifact.Artifact.of(graph, options) if pickled else engine.runner(graph)
            if phase != "backward":  # the backward graph is compiled after example_inputs are released
                written, parameters = _written(metadata, example_inputs)
                if seen is not None:
                    seen.written = written
                if written and (overlapping | folded(example_inputs)) & written:
                    raise LostWrite(_OVERLAP)
                overlaps = Overlaps(example_inputs, written, parameters, Sizes(aten_graph.graph.find_nodes(op="placeholder")).is_static)
                if overlaps.may_change:
                    writing.append(overlaps)
            if store is not None and key is not None and kept is not None:
                store.put(key, kept.text())
            if alone is not None:
                unwrapped.append(around(program, alone))
            return program

        return compile_graph

    def parted(joint: GraphModule, inputs: Any, **settings: Any) -> tuple[GraphModule, GraphModule]:
        if seen is not None:
            seen.look(joint)
        try:
            return partition(joint, inputs, platform=platform, exact_rng=options.exact_rng, **settings)
        except LateOutput:
            raise LostWrite("its forward pass returns a view of an input, and its backward pass writes to that input") from None

    def capture() -> Callable[..., Any]:
        # For pickled results torch needs a cache key, and it finds none for a graph that calls functions from outside of torch.
        with LostWrites(), contextlib.nullcontext() if pickled else kept_whole(module):
            return aot_autograd(
                fw_compiler=compiler("forward"),
                bw_compiler=compiler("backward"),
                inference_compiler=compiler("inference"),
                partition_fn=parted,
                decompositions=decompositions(platform),
            )(module, example_inputs)

    try:
        with capture_lock.capturing(), metrics.timed("capture"):
            compiled = capture()
        # TorchDynamo disables itself around a backend's function; the wrapper with which AOTAutograd's helper does so too costs every call.
        if pickled:  # a loaded function has no wrapper of ours: the artifact checks overlaps of its inputs itself
            return getattr(compiled, "_torchdynamo_orig_callable", compiled)
        (compiled,) = unwrapped or [getattr(compiled, "_torchdynamo_orig_callable", compiled)]
        return guard(compiled, writing[-1]) if writing else compiled
    except LostWrite as lost:
        if pickled:
            raise UnsupportedTensor(
                f"aot_compile does not support this graph: {lost.what}", hint="write to a clone of that tensor"
            ) from None
        if seen is not None:
            seen.obstacle = f"torch runs it, since {lost.what}"
        return functools.partial(_by_torch, module, options, lost.what)
    except DynaxlaError as error:
        error.first_useful_frame = inspect.currentframe()  # torch.compile removes its own frames above this one from the traceback
        raise
    finally:
        # AOTAutograd keeps the backward compiler, and with it the variables of this function, as long as the compiled function lives.
        example_inputs = tensors = ()


def _refuse(options: Options, pickled: bool) -> None:
    """Raises OptionError for options that need tensors in torch's own memory."""
    if options.freeze:
        raise OptionError(
            "option freeze for tensors on the device jax", hint="leave it out: freeze supports only tensors in torch's own memory"
        )
    if options.compile == "background":
        hint = "leave it out: torch's kernels, which run the graph until XLA has compiled it, cannot read these tensors"
        raise OptionError("option compile='background' for tensors on the device jax", hint=hint)
    if options.collectives == "xla":
        hint = "leave it out: it supports only CPU tensors in torch's own memory"
        raise OptionError("option collectives='xla' for tensors on the device jax", hint=hint)
    if pickled:
        raise OptionError(
            "aot_compile for tensors on the device jax", hint="call the function that torch.compile returns: it compiles at the first call"
        )


def _check_may_be_pickled(module: GraphModule, options: Options, retrace: bool) -> None:
    """Checks that torch can pickle AOTAutograd's result, which it does under aot_compile and with force_autograd_cache.

    Stores the facts on which the result depends besides the graph in an attribute of the module, so that torch's cache key has them.

    Raises: UnsupportedVersion for a torch that pickles only Inductor's results; OptionError.
    """
    if not artifact.IS_POSSIBLE:
        raise UnsupportedVersion(
            f"aot_compile needs torch to pickle compiled programs, and torch {torch.__version__} can pickle only those of Inductor",
            hint="install torch 2.13, or use torch.compile with a cache directory (option cache), which later processes read",
        )
    if retrace:
        raise OptionError("aot_compile does not support dynaxla_retrace, which traces at every call", hint="use the backend dynaxla")
    if not torch._functorch.config.enable_autograd_cache:
        raise OptionError(
            "aot_compile needs AOTAutograd's cache, which is turned off",
            hint="leave torch._functorch.config.enable_autograd_cache (TORCHINDUCTOR_AUTOGRAD_CACHE) at its default",
        )
    module.dynaxla_facts = repr((options.facts, machine.versions(), machine.sources(), machine.processor_facts()))


# The reason to let torch run a graph whose inputs overlap.
_OVERLAP = "it writes to an input that shares memory with another input or overlaps itself, and AOTAutograd did not detect that"


def _by_torch(module: GraphModule, options: Options, what: str, *args: Any) -> Any:
    """Runs TorchDynamo's graph in eager mode. `what` is the reason. Raises: UnsupportedTensor if options.fallback is "error"."""
    if options.fallback == "error":
        raise UnsupportedTensor(
            f"dynaxla cannot compile a graph, and the fallback to torch is off: {what}",
            hint="write to a clone of that tensor, or leave out fallback='error'",
        )
    coverage.fell_back("a graph", what, "")
    return module(*args)


def _written(metadata: Any, inputs: Sequence[Any]) -> tuple[set[int], set[int]]:
    """Returns the positions of TorchDynamo's inputs that a graph writes to, and the positions of parameters and buffers.

    If AOTAutograd has other inputs than TorchDynamo, a graph with any write counts as writing to all inputs. Both sets are empty for a
    graph without writes.

    Args:
        metadata: AOTAutograd's `ViewAndMutationMeta`, or None if there is none.
        inputs: TorchDynamo's example inputs.
    """
    if metadata is None or not any(info.mutates_data for info in metadata.input_info):
        return set(), set()
    if len(metadata.input_info) != len(inputs):
        return set(range(len(inputs))), set()
    return {position for position, info in enumerate(metadata.input_info) if info.mutates_data}, set(metadata.static_input_indices or ())


def _static_inputs() -> Sequence[int]:
    """Returns the positions of parameters and buffers among the graph's inputs."""
    metadata = _metadata()
    return metadata.static_input_indices if metadata is not None else ()


def _metadata() -> Any:
    """Returns AOTAutograd's `ViewAndMutationMeta` of the graph that it compiles now; None outside of TorchDynamo."""
    context = TracingContext.try_get()
    return context.fw_metadata if context is not None else None


def _main_device(module: GraphModule, inputs: Sequence[torch.Tensor]) -> torch.device:
    """Returns the device that does most of a graph's work: the accelerator if the graph uses one."""
    values = [node.meta.get("example_value", node.meta.get("val")) for node in module.graph.nodes]
    return devices.main_device(tensor.device for tensor in pytree.tree_leaves((inputs, values)) if isinstance(tensor, torch.Tensor))


def _names_current_gpu(module: GraphModule) -> bool:
    """True if a node of the graph names the device "cuda" without an index, which means the current GPU, or calls `.cuda()`."""
    leaves = pytree.tree_leaves([(node.args, dict(node.kwargs)) for node in module.graph.nodes])
    return any(leaf in ("cuda", torch.device("cuda")) for leaf in leaves if isinstance(leaf, (str, torch.device))) or any(
        node.op == "call_method" and node.target == "cuda" for node in module.graph.nodes
    )
