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
from ..observe.engine_decisions import Verdict, introduce, note
from ..runtime import private
from . import obstacles
from .candidates import by, check_names, compiled, copied
from .contest import EAGER, UNTRIED, Contest, Kept
from .engine_agreement import ballot_for
from .stored_choices import KeptChoices, key_of, text_of
from .verification import Call


@dataclass
class GraphFacts:
    """The facts about a graph that dynaxla finds while it captures the graph, before the other engines compile it.

    Attributes:
        name: of the graph.
        device: the device that does most of its work.
        obstacle: the reason why the graph must not be run twice, "" if there is none, None if no ATen graph was checked.
        written: the positions of TorchDynamo's inputs that the graph writes to.
        overlaps: the overlaps of inputs to guard, or None if they cannot change.
    """

    name: str = ""
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))
    obstacle: str | None = None
    written: Collection[int] = ()
    overlaps: Overlaps | None = None

    def check_aten(self, module: GraphModule) -> None:
        """Checks an ATen graph, which has the forward and the backward pass, for obstacles."""
        self.obstacle = self.obstacle or obstacles.reason_in_aten(module)


class CompileFunction(Protocol):
    """The type of dynaxla's own compile function in backend.py. The caller must guard `facts.overlaps`."""

    def __call__(self, module: GraphModule, example_inputs: Sequence[Any], options: Options) -> Call: ...


def compete(module: GraphModule, example_inputs: Sequence[Any], options: Options, capture: CompileFunction, facts: GraphFacts) -> Call:
    """Returns the function that serves the calls of a graph.

    At first it uses eager mode and the engines in turn, later the fastest engine whose results agree with eager mode. An engine that raises
    an exception while it compiles is left out.

    Args:
        capture: dynaxla's own compile function.
        facts: filled in by `capture`.

    Raises: OptionError.
    """
    check_names(options.engines)
    training = torch.is_grad_enabled() and any(isinstance(item, torch.Tensor) and item.requires_grad for item in example_inputs)
    own = by(lambda: capture(copied(module), example_inputs, dataclasses.replace(options, engines=())))
    obstacle = _obstacle(module, example_inputs, facts, training)
    eager = private.forward_of(module)
    phase = "training" if training else "inference"
    if obstacle:
        left_out = {UNTRIED: own} if isinstance(own, str) else {}
        note(Verdict(facts.name, phase, (), EAGER if left_out else UNTRIED, f"the graph must not run twice: {obstacle}", left_out=left_out))
        return eager if isinstance(own, str) else own
    content = text_of(module, example_inputs)
    introduce(facts.name, hashlib.blake2b(repr((content, options.engines, options.facts)).encode(), digest_size=16).hexdigest())
    sizes = Sizes(module.graph.find_nodes(op="placeholder"))
    store = options.store("engines")
    kept = Kept()
    wanted = list(options.engines)
    if store is not None:
        kept = KeptChoices(store, key_of(module, example_inputs, facts.device, (options.engines, options.facts)))
        if sizes.is_static and (found := kept.find(())) is not None and found[0] in wanted:
            wanted = [found[0]]
    engines: dict[str, Call] = {}
    left_out = {}
    for name in options.engines:
        if name not in wanted:
            left_out[name] = f"not compiled: an earlier process found {wanted[0]} to be faster"
            continue
        made = own if name == UNTRIED else eager if name == EAGER else compiled(name, module, example_inputs, facts.device)
        if isinstance(made, str):
            left_out[name] = made
        else:
            engines[name] = made
    ballot = ballot_for(content, options.engines)
    return _serving(Contest(facts.name, eager, engines, left_out, facts.device, training, facts.written, kept, ballot), sizes)


def _obstacle(module: GraphModule, example_inputs: Sequence[Any], facts: GraphFacts, training: bool) -> str:
    if any(is_traceable_wrapper_subclass(item) for item in example_inputs):
        return "an input is of a subclass of torch.Tensor"
    if next(module.parameters(), None) is not None or next(module.buffers(), None) is not None:
        return "it holds tensors that are not inputs"
    written = [example_inputs[position] for position in facts.written]
    if training and any(isinstance(item, torch.Tensor) and item.requires_grad for item in written):
        return "it writes to an input that wants gradients, which copies of it could not be"  # they are leaves
    if reason := obstacles.reason_in_captured(module):
        return reason
    return "dynaxla has no ATen graph of it" if facts.obstacle is None else facts.obstacle


def _serving(contest: Contest, sizes: Sizes) -> Callable[..., Any]:
    serving = contest.serving
    if not sizes.is_static:
        key = sizes.key

        def sized(*args: Any) -> Any:
            found = key(args)
            engine = serving.get(found)
            return contest.call(found, args) if engine is None else engine(*args)

        return sized

    current: Call = contest.eager

    def first(*args: Any) -> Any:
        nonlocal current
        results = contest.call((), args)
        current = serving.get((), first)
        return results

    current = first
    return lambda *args: current(*args)
