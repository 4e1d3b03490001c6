"""The backends of `torch.compile`, which torch finds by name through the entry-point group `torch_dynamo_backends`.

The life of a graph: TorchDynamo's FX graph -> AOTAutograd's functional ATen graphs -> (at the first call with given sizes) StableHLO -> an
XLA executable, which serves every later call with these sizes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.utils  # torch imports it during the first capture, where a second thread could see it half imported
from torch.fx import GraphModule
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .aot import OVERLAP, AotCapture, cache_location, load_from_cache
from .autoselect.competing_engines import GraphFacts, compile_with_contest
from .buffers.lost_writes import LostWrite
from .buffers.overlaps import guarded, undetected_overlaps
from .capture.inputs import check_tensor
from .config import Options
from .engine import artifact
from .engine.scheduler import engine_for
from .errors import OptionError, UnsupportedTensor, UnsupportedVersion
from .lowering import registry
from .lowering.implementations import check_forced
from .observe import coverage, dump, events, metrics, rewrites
from .partitioning import NotPartitioned, compile_partitioned, has_distributed, report_not_partitioned
from .passes import pipeline
from .runtime import devices, guards, machine, private

_graph_numbers = itertools.count()


def dynaxla(
    module: GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compiles a graph. AOTAutograd traces the graph once. It is lowered and compiled once for each combination (or bucket) of input sizes.

    Use: torch.compile(model, backend="dynaxla", options={...}); see `Options`.
    Raises: OptionError, UnsupportedOp, UnsupportedTensor, DeviceMismatch.
    """
    return _compile_with_engines(module, example_inputs, Options.parse(options, mode))


def _compile_with_engines(module: GraphModule, example_inputs: Sequence[Any], parsed: Options) -> Callable[..., Any]:
    """Compiles a graph with dynaxla alone, or with several competing engines if the options name some."""
    if not parsed.engines:
        return _compile(module, example_inputs, parsed)
    if getattr(torch._functorch.config, "force_autograd_cache", False):
        hint = "use the backend dynaxla: aot_compile saves one program, and does not measure engines"
        raise OptionError("the option engines does not support aot_compile and force_autograd_cache", hint=hint)
    facts = GraphFacts()
    compile_with_dynaxla = functools.partial(_compile_unguarded, facts=facts, has_competitors=True)
    return _guarded(compile_with_contest(module, example_inputs, parsed, compile_with_dynaxla, facts), module, parsed, facts)


def dynaxla_auto(
    module: GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compiles a graph with several engines, and runs it with the fastest engine whose results agree with eager mode.

    The options are the options of `dynaxla`, and `engines`: the competing backends, by default ["dynaxla", "inductor", "eager"].
    """
    return _compile_with_engines(module, example_inputs, Options.parse(options, mode, "dynaxla_auto"))


def dynaxla_retrace(
    module: GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compiles a graph. The graph is traced at every call, as with lazy tensors, and the executable is found by the program's hash.

    This backend is a baseline for measurements.

    Source: the backend `torchxla_trivial` of PyTorch PR #87741.
    """
    if options is not None and "engines" in options:
        raise OptionError(
            "dynaxla_retrace does not support the option engines",
            hint="use the backend dynaxla_auto: dynaxla_retrace is only a baseline for measurements",
        )
    parsed = Options.parse(options, mode)
    if parsed.compile == "background":
        raise OptionError(
            "dynaxla_retrace does not support the option compile='background'",
            hint="use the backend dynaxla: dynaxla_retrace traces at every call",
        )
    if parsed.distributed != "torch":
        raise OptionError(
            f"dynaxla_retrace does not support the option distributed={parsed.distributed!r}",
            hint="use the backend dynaxla, or leave the option out",
        )
    return _compile(module, example_inputs, parsed, retrace=True)


def compile_graph(module: GraphModule, example_inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    """Compiles a graph of ATen ops that may write to its inputs. The caller must disable gradients with `torch.no_grad()`.

    Raises: the errors of `dynaxla`; CaptureError for a graph with collectives or with other asynchronous work.
    """
    return _compile(module, example_inputs, options, collectives=False)


def _compile(
    module: GraphModule, example_inputs: Sequence[Any], options: Options, *, retrace: bool = False, collectives: bool = True
) -> Callable[..., Any]:
    """Compiles a graph.

    Args:
        module: the graph.
        example_inputs: the graph's inputs.
        options: the options.
        retrace: True if the engine traces at every call.
        collectives: True if the graph may have collectives.
    """
    facts = GraphFacts()
    return _guarded(_compile_unguarded(module, example_inputs, options, facts, retrace, collectives), module, options, facts)


def _guarded(compiled: Callable[..., Any], module: GraphModule, options: Options, facts: GraphFacts) -> Callable[..., Any]:
    """Returns a function that calls the compiled function, or runs torch's kernels if inputs overlap in an unsupported way."""
    if facts.overlaps is None:
        return compiled
    return guarded(compiled, functools.partial(_run_with_torch, module, options, OVERLAP, _OVERLAP_HINT), facts.overlaps)


def _compile_unguarded(
    module: GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    facts: GraphFacts,
    retrace: bool = False,
    collectives: bool = True,
    has_competitors: bool = False,
) -> Callable[..., Any]:
    """Compiles a graph. The caller must check `facts.overlaps` at each call (`_guarded`).

    Args:
        module: the graph.
        example_inputs: the graph's inputs.
        options: the options.
        facts: receives the facts about the graph, also if an error is raised.
        retrace: see `_compile`.
        collectives: see `_compile`.
        has_competitors: True if other engines may run the graph.
    """
    private.warn_of_newer_releases()
    is_pickled = _will_be_pickled(module, options, retrace)
    check_forced(options.implementations)
    options.store("programs")  # raises now if the directory cannot be used
    if options.dump is not None:
        dump.prepare(options.dump)
    number = next(_graph_numbers)
    facts.name = f"dynaxla_{number}"
    if events.has_listeners():
        events.emit(events.GraphCaptured(number, module, options, is_step=not collectives, has_competitors=has_competitors))
    with rewrites.dumping_to(options.dump_directory, facts.name):
        pipeline.NESTED_REGIONS(module)
    device = facts.device = _accepted_device(module, example_inputs, options, is_pickled)
    if devices.is_in_xla(device):
        facts.run_once_reason = "its tensors are on the device jax"
    if (partitioned := _partitioned(module, example_inputs, options, number, facts, is_pickled)) is not None:
        return partitioned
    engine = engine_for(options, retrace=retrace, collectives=collectives)
    platform = devices.platform_of(device)
    location, overlaps = None, undetected_overlaps(example_inputs)
    if device.type == "cpu" and not is_pickled and not overlaps:
        location = cache_location(module, example_inputs, options, (options.facts, platform, retrace, collectives))
        with metrics.timed("capture", facts.name):
            if location is not None and (cached := load_from_cache(location, example_inputs, number, engine.runner, facts)) is not None:
                return cached
    with metrics.timed("capture", facts.name):
        registry.fill()  # before AOTAutograd sets its dispatch modes
    build = functools.partial(artifact.Artifact.of, options=options) if is_pickled else engine.runner
    try:
        return AotCapture(module, example_inputs, options, number, platform, build, facts, overlaps, location, is_pickled).run()
    except LostWrite as lost:
        if is_pickled:
            message = f"aot_compile does not support this graph: {lost.reason}"
            raise UnsupportedTensor(message, hint=lost.hint) from None
        facts.overlaps, facts.run_once_reason = None, f"torch runs it, since {lost.reason}"
        return functools.partial(_run_with_torch, module, options, lost.reason, lost.hint)


def _accepted_device(module: GraphModule, example_inputs: Sequence[Any], options: Options, is_pickled: bool) -> torch.device:
    """Checks that a graph's inputs can be compiled with these options, and returns the device that does most of its work.

    Raises: OptionError, UnsupportedTensor.
    """
    tensors = [example for example in example_inputs if isinstance(example, torch.Tensor)]
    for tensor in tensors:
        if not is_traceable_wrapper_subclass(tensor):  # for a subclass, the graph has the wrapped tensors
            check_tensor(tensor, "an input")
    device = _main_device(module, tensors)
    if device.type == "cuda" and _names_current_gpu(module):
        guards.guard_current_gpu()
    if devices.is_in_xla(device):
        _check_device_jax_options(options, is_pickled)
    return device


def _partitioned(
    module: GraphModule, example_inputs: Sequence[Any], options: Options, number: int, facts: GraphFacts, is_pickled: bool
) -> Callable[..., Any] | None:
    """Returns the compiled function of a graph that XLA partitions over processes; None for any other graph."""
    if options.distributed != "spmd" or not has_distributed(module):
        return None
    try:
        if is_pickled:
            raise NotPartitioned("aot_compile cannot save a program that XLA partitions")
        facts.run_once_reason = "XLA partitions it over processes"
        with metrics.timed("capture", facts.name):
            return compile_partitioned(module, example_inputs, options, number)
    except NotPartitioned as reason:
        report_not_partitioned(f"dynaxla_{number}", reason, options)
        return None


def _will_be_pickled(module: GraphModule, options: Options, retrace: bool) -> bool:
    """True if torch pickles the compiled function, as for aot_compile. Raises: UnsupportedVersion, OptionError."""
    if not getattr(torch._functorch.config, "force_autograd_cache", False):
        return False
    _check_picklable(module, options, retrace)
    return bool(torch._functorch.config.bundled_autograd_cache)  # if off, torch pickles only Inductor's results


def _check_device_jax_options(options: Options, is_pickled: bool) -> None:
    """Raises OptionError for options that need tensors in torch's own memory."""
    if options.freeze:
        raise OptionError(
            "the option freeze does not support tensors on the device jax",
            hint="leave it out: freeze supports only tensors in torch's own memory",
        )
    if options.compile == "background":
        hint = "leave it out: torch's kernels, which run the graph until XLA has compiled it, cannot read these tensors"
        raise OptionError("the option compile='background' does not support tensors on the device jax", hint=hint)
    if options.distributed != "torch":
        hint = "leave it out: it supports only CPU tensors in torch's own memory"
        raise OptionError(f"the option distributed={options.distributed!r} does not support tensors on the device jax", hint=hint)
    if is_pickled:
        raise OptionError(
            "aot_compile does not support tensors on the device jax",
            hint="call the function that torch.compile returns: it compiles at the first call",
        )


def _check_picklable(module: GraphModule, options: Options, retrace: bool) -> None:
    """Checks that torch can pickle AOTAutograd's result, which torch does under aot_compile and with force_autograd_cache.

    Sets an attribute of the module to further facts on which the result depends, so that torch's cache key covers these facts.

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


# The change to a program that avoids `OVERLAP`.
_OVERLAP_HINT = "write to a clone of that input, and copy the clone back"


def _run_with_torch(module: GraphModule, options: Options, reason: str, hint: str, *args: Any) -> Any:
    """Runs TorchDynamo's graph in eager mode, and counts the fallback. Raises: UnsupportedTensor if options.fallback is "error"."""
    if options.fallback == "error":
        raise UnsupportedTensor(
            f"dynaxla cannot compile a graph, and the fallback to torch is off: {reason}",
            hint=f"{hint}, or leave out fallback='error'",
        )
    coverage.count_fallback("a graph", reason, "")
    return module(*args)


def _main_device(module: GraphModule, inputs: Sequence[torch.Tensor]) -> torch.device:
    """Returns the device that does most of a graph's work: the accelerator if the graph uses one."""
    values = [node.meta.get("example_value", node.meta.get("val")) for node in module.graph.nodes]
    return devices.main_device(tensor.device for tensor in pytree.tree_leaves((inputs, values)) if isinstance(tensor, torch.Tensor))


def _names_current_gpu(module: GraphModule) -> bool:
    """True if a node of the graph names the device "cuda" without an index, or calls `.cuda()`: both mean the current GPU."""
    leaves = pytree.tree_leaves([(node.args, dict(node.kwargs)) for node in module.graph.nodes])
    return any(leaf in ("cuda", torch.device("cuda")) for leaf in leaves if isinstance(leaf, (str, torch.device))) or any(
        node.op == "call_method" and node.target == "cuda" for node in module.graph.nodes
    )
