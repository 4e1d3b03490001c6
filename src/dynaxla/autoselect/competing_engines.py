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

from ..buffers.overlaps import Overlaps
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
        device: the device that does most of its work.
        obstacle: the reason why the graph must not be run twice, "" if there is none, None if no ATen graph was checked.
        written: the positions of the inputs that the graph writes to.
        overlaps: the guards on overlaps of inputs; None if no guard is needed.
    """

    name: str = ""
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))
    obstacle: str | None = None
    written: Collection[int] = ()
    overlaps: Overlaps | None = None

    def check_aten(self, module: GraphModule) -> None:
        """Looks for an obstacle in an ATen graph that has the forward and the backward pass."""
        self.obstacle = self.obstacle or obstacles.reason_in_aten(module)


class CompileFunction(Protocol):
    """The type of dynaxla's own compile function in backend.py. The caller must guard `facts.overlaps`."""

    def __call__(self, module: GraphModule, example_inputs: Sequence[Any], options: Options) -> Call: ...


def compete(module: GraphModule, example_inputs: Sequence[Any], options: Options, capture: CompileFunction, facts: GraphFacts) -> Call:
    """Returns the function that serves the calls of a graph.

    The first calls run in eager mode and the engines in turn, later calls in the fastest engine whose results agree with eager mode. An
    engine that raises an exception while it compiles is left out.

    Args:
        module: TorchDynamo's graph.
        example_inputs: the inputs of the first call.
        options: the options, with the names of the engines.
        capture: dynaxla's own compile function.
        facts: the facts about the graph, which `capture` fills in.

    Raises: OptionError for an engine that does not exist.
    """
    check_names(options.engines)
    training = torch.is_grad_enabled() and any(isinstance(item, torch.Tensor) and item.requires_grad for item in example_inputs)
    own = compiled_or_reason(lambda: capture(copy_graph(module), example_inputs, dataclasses.replace(options, engines=())))
    obstacle = _reason_to_run_once(module, example_inputs, facts, training)
    eager = private.forward_of(module)
    phase = "training" if training else "inference"
    if obstacle:
        left_out = {DEFAULT_ENGINE: own} if isinstance(own, str) else {}
        record_verdict(
            Verdict(
                facts.name, phase, (), EAGER if left_out else DEFAULT_ENGINE, f"the graph must not run twice: {obstacle}", left_out=left_out
            )
        )
        return eager if isinstance(own, str) else own
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
        engine = own if name == DEFAULT_ENGINE else eager if name == EAGER else compile_with(name, module, example_inputs, facts.device)
        if isinstance(engine, str):
            left_out[name] = engine
        else:
            engines[name] = engine
    ballot = ballot_for(content, options.engines)
    return _dispatcher(Contest(facts.name, eager, engines, left_out, facts.device, training, facts.written, choices, ballot), sizes)


def _reason_to_run_once(module: GraphModule, example_inputs: Sequence[Any], facts: GraphFacts, training: bool) -> str:
    """Returns the reason why a graph must not be run twice; "" if there is none."""
    if any(is_traceable_wrapper_subclass(item) for item in example_inputs):
        return "an input is of a subclass of torch.Tensor"
    if next(module.parameters(), None) is not None or next(module.buffers(), None) is not None:
        return "the graph has parameters or buffers that are not inputs"
    written = [example_inputs[position] for position in facts.written]
    if training and any(isinstance(item, torch.Tensor) and item.requires_grad for item in written):
        return "the graph writes to an input that requires gradients; a copy would be a leaf, to which torch allows no writes"
    if reason := obstacles.reason_in_captured(module):
        return reason
    return "dynaxla has no ATen graph to check for side effects" if facts.obstacle is None else facts.obstacle


def _dispatcher(contest: Contest, sizes: Sizes) -> Callable[..., Any]:
    """Returns a function that calls the engine selected for the sizes of its arguments, or the contest before there is one."""
    engine_by_sizes = contest.serving
    if not sizes.is_static:
        key = sizes.key

        def sized(*args: Any) -> Any:
            call_sizes = key(args)
            engine = engine_by_sizes.get(call_sizes)
            return contest.call(call_sizes, args) if engine is None else engine(*args)

        return sized

    current: Call = contest.eager

    def first(*args: Any) -> Any:
        nonlocal current
        results = contest.call((), args)
        current = engine_by_sizes.get((), first)
        return results

    current = first
    return lambda *args: current(*args)
