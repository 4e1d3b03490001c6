"""Runs a case, and records everything that a caller can observe."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from support.comparisons.compare import assert_equal, strides

from .table import Case

Facts = dict[str, Any]


def judge(case: Case) -> None:
    """Raises an AssertionError unless each fact of each call is that of eager mode or of aot_eager."""
    eager_calls = observe(case, case.function)
    actual_calls = observe(case, _compiled(case, "dynaxla"))
    aot_calls: list[Facts] | None = None
    for index, (actual, expected) in enumerate(zip(actual_calls, eager_calls, strict=True)):
        for name in dict.fromkeys((*expected, *actual)):
            eager_problem = _difference(actual.get(name), expected.get(name))
            if eager_problem:
                aot_calls = aot_calls or observe(case, _compiled(case, "aot_eager"))
                aot_problem = _difference(actual.get(name), aot_calls[index].get(name))
                assert not aot_problem, f"call {index}, {name}: unlike eager ({eager_problem}) and unlike aot_eager ({aot_problem})"


def _compiled(case: Case, backend: str) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(case.function, backend=backend, fullgraph=case.fullgraph, dynamic=case.dynamic)


def observe(case: Case, function: Callable[..., Any]) -> list[Facts]:
    """Returns the facts of each of two calls."""
    facts = []
    with torch._dynamo.config.patch(case.config), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in (0, 1):
            torch.manual_seed(seed)
            with case.around():
                facts.append(_observe_call(case, function, case.make()))
    return facts


def _observe_call(case: Case, function: Callable[..., Any], args: tuple[Any, ...]) -> Facts:
    inputs = tensors_of(args)
    versions = [None if tensor.is_inference() else tensor._version for tensor in inputs]
    try:
        outputs = function(*args)
    except Exception as error:
        return {"error": _class_of(error), "inputs after the call": _values(inputs)}
    flat, structure = pytree.tree_flatten(outputs)
    results = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
    shared = {index for pair in _aliases([*inputs, *results]) for index in pair}
    facts: Facts = {
        "structure": str(structure),
        "numbers": [leaf for leaf in flat if not isinstance(leaf, torch.Tensor)],
        "types": [type(tensor).__name__ for tensor in results],
        "metadata": list(map(_metadata, results)),
        "views": [
            tensor._is_view() for index, tensor in enumerate(results, len(inputs)) if index in shared and type(tensor) is torch.Tensor
        ],
        "input of each result": [next((i for i, given in enumerate(inputs) if given is tensor), None) for tensor in results],
        "aliases": _aliases([*inputs, *results]),
        "inputs' metadata": list(map(_metadata, inputs)),
        "written": [version is not None and tensor._version != version for tensor, version in zip(inputs, versions, strict=True)],
        "gradient mode": torch.is_grad_enabled(),
    }
    if not case.random:
        facts |= {"values": _values(results), "inputs after the call": _values(inputs)}
    return facts | _differentiate(case, inputs, results)


def _differentiate(case: Case, inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> Facts:
    wanted = [tensor for tensor in results if tensor.requires_grad and not tensor.is_complex()]
    leaves = [leaf for tensor in inputs if (leaf := getattr(tensor, "leaf", tensor)).requires_grad and leaf.is_leaf]
    if not wanted or not torch.is_grad_enabled():
        return {}
    loss = sum((tensor * _weights(tensor)).sum() for tensor in wanted)
    try:
        if case.order > 1:
            first = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
            loss = sum(gradient.square().sum() for gradient in first if gradient is not None)
        loss.backward()
    except Exception as error:
        return {"error of the backward pass": _class_of(error)}
    facts: Facts = {
        "leaves with gradients": [leaf.grad is not None for leaf in leaves],
        "gradients' metadata": [_metadata(leaf.grad) for leaf in leaves if leaf.grad is not None],
    }
    if not case.random:
        facts["gradients"] = _values([leaf.grad for leaf in leaves if leaf.grad is not None])
        facts["inputs after the backward pass"] = _values(inputs)
        facts["results after the backward pass"] = _values(results)
    return facts


def _weights(tensor: torch.Tensor) -> torch.Tensor | float:
    """Returns the factor of a result in the loss. Gradients get the strides of the factor, which are not those of the result."""
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
        return 1.5
    return torch.linspace(0.5, 1.5, tensor.numel(), dtype=tensor.dtype).view(tensor.shape[::-1]).permute(tuple(range(tensor.dim()))[::-1])


def tensors_of(values: Any) -> list[torch.Tensor]:
    """Returns the tensors in containers and modules, each once."""
    found: dict[int, torch.Tensor] = {}
    for leaf in pytree.tree_leaves(values):
        held = [*leaf.parameters(), *leaf.buffers()] if isinstance(leaf, nn.Module) else [leaf]
        for tensor in held:
            if isinstance(tensor, torch.Tensor):
                found[id(tensor)] = tensor
    return list(found.values())


def plain(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns the tensors that a tensor wraps, down to tensors that wrap none."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()]
    return [inner for name in tensor.__tensor_flatten__()[0] for inner in plain(getattr(tensor, name))]


def _values(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [inner.clone() for tensor in tensors for inner in plain(tensor)]


def _metadata(tensor: torch.Tensor) -> tuple[Any, ...]:
    common = (tensor.dtype, str(tensor.layout), tensor.requires_grad, tensor.is_leaf, tensor.is_inference())
    if tensor.layout == torch.jagged:
        return common
    if tensor.layout != torch.strided:
        return (*common, tuple(tensor.shape))
    return (*common, tuple(tensor.shape), strides(tensor), tensor.is_conj(), tensor.is_neg())


def _aliases(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    inner = [item for tensor in tensors for item in plain(tensor)]
    keys = [item.untyped_storage().data_ptr() if item.numel() else -index - 1 for index, item in enumerate(inner)]
    return [(i, j) for i in range(len(keys)) for j in range(i + 1, len(keys)) if keys[i] == keys[j]]


def _class_of(error: Exception) -> str:
    """Returns the name of an error's class; for an error that TorchDynamo wraps, that of the inner error."""
    inner = getattr(error, "inner_exception", None) or error.__cause__
    return _class_of(inner) if isinstance(inner, Exception) else type(error).__name__


def _difference(actual: Any, expected: Any) -> str:
    if isinstance(actual, list) and isinstance(expected, list) and any(isinstance(item, torch.Tensor) for item in (*actual, *expected)):
        try:
            assert_equal(actual, expected, tolerance=None)
        except AssertionError as error:
            return str(error)
        return ""
    return "" if actual == expected else f"{actual}, not {expected}"
