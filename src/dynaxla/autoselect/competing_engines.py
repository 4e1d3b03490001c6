"""Compiles a TorchDynamo graph with several engines, and dispatches its calls to them."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.fx import GraphModule
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..buffers.overlaps import AliasGuard
from ..capture.inputs import Sizes
from ..config import Options
from ..observe.engine_decisions import Verdict, record_verdict, register_graph
from ..runtime import private
from . import obstacles
from .candidates import check_names, compile_with, compiled_or_reason, copy_graph
from .contest import DEFAULT_ENGINE, EAGER, Choices, Contest
from .engine_agreement import ballot_for
from .stored_choices import StoredChoices, key_of, text_of
from .verification import Call


@dataclass
class GraphFacts:
    """The facts about a graph that dynaxla finds while it captures the graph, before the other engines compile it.

    Attributes:
        name: the name of the graph.
        device: the device that does most of the graph's work.
        run_once_reason: the reason why a call of the graph must not be run by several engines; "" if there is none. None before an ATen
            graph was checked.
        written_inputs: the positions of the inputs that the graph writes to.
        overlaps: the guard on inputs that share memory; None if no guard is needed.
    """

    name: str = ""
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))
    run_once_reason: str | None = None
    written_inputs: Collection[int] = ()
    overlaps: AliasGuard | None = None

    def check_aten(self, module: GraphModule) -> None:
        """Looks for a reason to run calls once, in an ATen graph that has the forward and the backward pass."""
        self.run_once_reason = self.run_once_reason or obstacles.obstacle_in_aten_graph(module)


class CompileFunction(Protocol):
    """The type of the function in backend.py that compiles a graph with dynaxla.

    The function that it returns does not check the guard `GraphFacts.overlaps`. Its caller must check the guard before each call.
    """

    def __call__(self, module: GraphModule, example_inputs: Sequence[Any], options: Options) -> Call: ...


def compile_with_contest(
    module: GraphModule, example_inputs: Sequence[Any], options: Options, compile_with_dynaxla: CompileFunction, facts: GraphFacts
) -> Call:
    """Compiles a graph with each engine, and returns a function that takes the graph's arguments and returns its results.

    In the first calls, eager mode and the engines run in turn, and their results are compared. The fastest engine whose results agree with
    eager mode runs the later calls. An engine that raises an exception while it compiles does not take part.

    Args:
        module: TorchDynamo's graph.
        example_inputs: the inputs of the first call.
        options: the options, with the names of the engines.
        compile_with_dynaxla: compiles the graph with dynaxla, and fills in `facts`.
        facts: the facts about the graph, still empty.

    Raises: OptionError for the name of an engine that does not exist.
    """
    check_names(options.engines)
    training = torch.is_grad_enabled() and any(isinstance(item, torch.Tensor) and item.requires_grad for item in example_inputs)
    # Engines are compared by the times of their calls, so no call of dynaxla may be one of torch's kernels while XLA compiles.
    compile_option = "now" if options.compile == "auto" else options.compile
    own_options = dataclasses.replace(options, engines=(), compile=compile_option)
    dynaxla_or_reason = compiled_or_reason(lambda: compile_with_dynaxla(copy_graph(module), example_inputs, own_options))
    run_once_reason = _reason_to_run_once(module, example_inputs, facts, training)
    eager = private.forward_of(module)
    phase = "training" if training else "inference"
    if run_once_reason:
        left_out = {DEFAULT_ENGINE: dynaxla_or_reason} if isinstance(dynaxla_or_reason, str) else {}
        selected, reason = EAGER if left_out else DEFAULT_ENGINE, f"the graph must not run twice: {run_once_reason}"
        record_verdict(Verdict(facts.name, phase, (), selected, reason, left_out=left_out))
        return eager if isinstance(dynaxla_or_reason, str) else dynaxla_or_reason
    content = text_of(module, example_inputs)
    register_graph(facts.name, hashlib.blake2b(repr((content, options.engines, options.facts)).encode(), digest_size=16).hexdigest())
    sizes = Sizes(module.graph.find_nodes(op="placeholder"))
    store = options.store("engines")
    choices = Choices()
    names = list(options.engines)
    if store is not None:
        choices = StoredChoices(store, key_of(module, example_inputs, facts.device, (options.engines, options.facts)))
        if sizes.is_static and (choice := choices.find(())) is not None and choice[0] in names:
            names = [choice[0]]
    engines: dict[str, Call] = {}
    left_out = {}
    for name in options.engines:
        if name not in names:
            left_out[name] = f"not compiled: {names[0]} was faster in an earlier process"
            continue
        if name == DEFAULT_ENGINE:
            call_or_reason = dynaxla_or_reason
        else:
            call_or_reason = eager if name == EAGER else compile_with(name, module, example_inputs, facts.device)
        if isinstance(call_or_reason, str):
            left_out[name] = call_or_reason
        else:
            engines[name] = call_or_reason
    ballot = ballot_for(content, options.engines)
    return _dispatcher(Contest(facts.name, eager, engines, left_out, facts.device, training, facts.written_inputs, choices, ballot), sizes)


def _reason_to_run_once(module: GraphModule, example_inputs: Sequence[Any], facts: GraphFacts, training: bool) -> str:
    """Returns the reason why a call of the graph must not be run by several engines; "" if there is none."""
    if any(is_traceable_wrapper_subclass(item) for item in example_inputs):
        return "an input is of a subclass of torch.Tensor"
    if next(module.parameters(), None) is not None or next(module.buffers(), None) is not None:
        return "the graph has parameters or buffers that are not inputs"
    written_values = [example_inputs[position] for position in facts.written_inputs]
    if training and any(isinstance(item, torch.Tensor) and item.requires_grad for item in written_values):
        return "the graph writes to an input that requires gradients; a copy would be a leaf, to which torch allows no writes"
    if reason := obstacles.obstacle_in_dynamo_graph(module):
        return reason
    return "dynaxla has no ATen graph to check for side effects" if facts.run_once_reason is None else facts.run_once_reason


def _dispatcher(contest: Contest, sizes: Sizes) -> Callable[..., Any]:
    """Returns a function that calls the engine selected for the sizes of its arguments. If none is selected yet, it calls the contest."""
    engine_by_sizes = contest.serving
    if not sizes.is_static:
        key = sizes.key

        def call_by_sizes(*args: Any) -> Any:
            call_sizes = key(args)
            engine = engine_by_sizes.get(call_sizes)
            return contest.call(call_sizes, args) if engine is None else engine(*args)

        return call_by_sizes

    current: Call

    def call_contest(*args: Any) -> Any:
        nonlocal current
        results = contest.call((), args)
        current = engine_by_sizes.get((), call_contest)
        return results

    current = call_contest
    return lambda *args: current(*args)
