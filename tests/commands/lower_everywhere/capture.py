"""AOTAutograd's graphs of a case for a platform, captured with fake tensors of the CPU."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from functorch.compile import aot_function
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from cases.conformance.entries import Case as Entry
from cases.conformance.entries import trials
from dynaxla.bench.suites import MODELS
from dynaxla.capture.decompositions import decompositions
from dynaxla.passes.joint.partition import partition
from support.fakes.fake_models import fake_inputs, fake_model

from .cases import Case


def graphs(case: Case, platform: str) -> list[GraphModule]:
    """Returns the graphs of a case. Raises torch's error if torch cannot capture the case."""
    return _of_model(case, platform) if case.kind == "model" else _of_op(case, platform)


def settings(found: list[GraphModule], platform: str) -> dict[str, Any]:
    """Returns the backend's settings for AOTAutograd. Its graphs are added to the list `found`."""

    def keep(graph: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        found.append(graph)
        return lambda args: graph(*args)

    def compiler(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        run = keep(graph, inputs)
        run._boxed_call = True
        return run

    return {
        "fw_compiler": compiler,
        "bw_compiler": compiler,
        "inference_compiler": compiler,
        "partition_fn": functools.partial(partition, platform=platform, exact_rng=False),
        "decompositions": decompositions(platform),
    }


def of_function(function: Callable[..., Any], args: Sequence[Any], platform: str) -> list[GraphModule]:
    """Returns the graphs of a function of tensors, captured without TorchDynamo."""
    captured: list[GraphModule] = []
    mode = FakeTensorMode()
    with torch.no_grad(), mode:
        aot_function(function, **settings(captured, platform))(*[mode.from_tensor(arg) for arg in args])
    return captured


def _of_op(case: Case, platform: str) -> list[GraphModule]:
    """Returns the graphs of the first sample without empty tensors, or of the first sample if all have empty tensors."""
    samples = trials(Entry("op_db", case.name, case.dtype, "samples"))
    first = next(samples)
    with_elements = (trial for trial in itertools.chain([first], samples) if all(x.numel() for x in trial.call.tensors))
    call = next(with_elements, first).call
    return of_function(call.python_function(), call.tensors, platform)


def _of_model(case: Case, platform: str) -> list[GraphModule]:
    """Returns the graphs of inference, of the forward and of the backward pass."""
    captured: list[GraphModule] = []
    model = next(item for item in MODELS if item.name == case.name)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    real = model.build()
    inputs = fake_inputs(model.inputs(1, torch.Generator().manual_seed(0)), mode, "cpu", case.torch_dtype)
    backend = aot_autograd(**settings(captured, platform))
    for training in (False, True):
        fake = fake_model(real.train(training), mode, "cpu", case.torch_dtype)
        with mode, torch.set_grad_enabled(training):
            results = torch.compile(fake, backend=backend, fullgraph=True, dynamic=False)(*inputs)
            if training:
                outputs = [leaf for leaf in pytree.tree_leaves(results) if leaf.requires_grad]
                torch.autograd.backward(outputs, [torch.empty_like(leaf) for leaf in outputs])
        torch._dynamo.reset()
    return captured
