"""The verdict on one program: compares dynaxla with eager mode, and if they differ, also torch.compile without dynaxla."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule

from dynaxla.errors import UnsupportedOp
from support.comparisons.compare import strides

from .observed import Disagreement, Expected, Observation, check_agreement, disagreements, observe
from .program import Program


def _as_promised(module: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
    """Compiles a graph to torch's own kernels. Results get the layout and storages of the fake tensors, as with a compiler."""
    promises = [node.meta["val"] if isinstance(node, torch.fx.Node) else None for node in _returned(module)]
    inputs = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder" and isinstance(node.meta["val"], torch.Tensor)]
    shared = {promise.untyped_storage()._cdata for promise in inputs}

    def run(*args: Any) -> list[Any]:
        results = list(module(*args))
        memories: dict[int, torch.Tensor] = {}
        new_results = [
            (index, promise)
            for index, promise in enumerate(promises)
            if isinstance(results[index], torch.Tensor) and promise.untyped_storage()._cdata not in shared
        ]
        # The largest result of a storage comes first: the others are views of its memory.
        for index, promise in sorted(new_results, key=lambda item: -results[item[0]].numel()):
            results[index] = _without_view(_laid_out(results[index], promise, memories))
        return results

    return make_boxed_func(run)


def _laid_out(result: torch.Tensor, promise: torch.Tensor, memories: dict[int, torch.Tensor]) -> torch.Tensor:
    """Returns the result with the strides, offset and storage of a fake tensor.

    Args:
        result: the result.
        promise: the fake tensor.
        memories: the storages so far, by the storage of a fake tensor.
    """
    if [*map(_hint, promise.shape)] != [*result.shape]:
        return result
    stride, offset = [_hint(step) for step in promise.stride()], _hint(promise.storage_offset())
    promised = tuple(step for size, step in zip(result.shape, stride, strict=True) if size > 1) if result.numel() else ()
    key = promise.untyped_storage()._cdata
    if key not in memories and (strides(result), result.storage_offset()) == (promised, offset):
        return result
    size = offset + 1 + sum((size - 1) * step for size, step in zip(result.shape, stride, strict=True))
    if key not in memories or memories[key].numel() < size or memories[key].dtype != result.dtype:
        memories[key] = torch.empty(max(size, 0), dtype=result.dtype)
    return memories[key].as_strided(result.shape, stride, offset).copy_(result.detach())


def _without_view(result: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, not as a view: autograd treats views that a graph returns in a special way."""
    if not result._is_view() or result.is_conj() or result.is_neg():
        return result
    geometry = result.storage_offset(), result.shape, result.stride()
    return torch.empty(0, dtype=result.dtype).set_(result.untyped_storage(), *geometry)


def _hint(size: int | torch.SymInt) -> int:
    """Returns the value that a size had when it was traced."""
    return size if isinstance(size, int) else size.node.hint


def _returned(module: GraphModule) -> Sequence[Any]:
    return next(node for node in reversed(module.graph.nodes) if node.op == "output").args[0]


# TorchDynamo and AOTAutograd without a compiler: differences from eager mode here come from torch.
REFERENCE = aot_autograd(fw_compiler=_as_promised)
MIN_CUT_REFERENCE = aot_autograd(fw_compiler=_as_promised, partition_fn=min_cut_rematerialization_partition)


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison.

    Attributes:
        outcome: "agrees"; "disagrees"; "refused" (dynaxla has no lowering); "torch" (torch.compile rejects the program with any backend, or
            differs in the same way without dynaxla).
        kind: the kind of difference, in one word, or the name of an exception.
        detail: the full message.
    """

    outcome: str
    kind: str = ""
    detail: str = ""


def compiled(program: Program, backend: Any, seed: int = 0) -> list[Observation]:
    """Returns the observations of the compiled program's calls. Raises the exceptions of torch.compile."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*is deprecated.*", DeprecationWarning)
        # torch reads the gradient of each input that requires grad, even if it is no leaf.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.*")
        dynamic = True if program.dynamic else None
        return observe(program, lambda world: torch.compile(world.function, backend=backend, fullgraph=True, dynamic=dynamic), seed)


def judge(program: Program, expected: Expected) -> Verdict:
    verdict, seen = _against_eager(program, expected, "dynaxla")
    if verdict.outcome == "agrees" and program.is_random:
        verdict = _repeats(program, expected, seen)
    if verdict.outcome == "agrees":
        return verdict
    reference, reference_seen = _against_eager(program, expected, REFERENCE)
    if reference.outcome == "agrees" and not seen:
        # An error about a changed saved tensor depends on which tensors the partitioner saves for the backward pass.
        reference, reference_seen = _against_eager(program, expected, MIN_CUT_REFERENCE)
        reference_seen = [] if reference.kind == verdict.kind else reference_seen
    if reference.outcome == "agrees":
        return verdict
    if reference_seen and seen:
        # torch itself differs from eager mode. dynaxla must differ only in the same values and in the same way.
        from_torch = disagreements(Expected(reference_seen, expected.bounds, expected.random), seen)
        for what, error in disagreements(expected, seen).items():
            if what in from_torch:
                detail = f"torch differs from eager mode too, but in another way: {error}\ntorch's own: {reference.detail}"
                return Verdict("disagrees", error.kind, detail)
    elif reference_seen:
        return verdict
    return Verdict("torch", f"{'differs: ' if reference_seen else 'refuses: '}{reference.kind}", reference.detail)


def _against_eager(program: Program, expected: Expected, backend: Any) -> tuple[Verdict, list[Observation]]:
    seen: list[Observation] = []
    try:
        seen = compiled(program, backend)
        check_agreement(expected, seen)
    except Disagreement as error:
        return Verdict("disagrees", error.kind, str(error)), seen
    except UnsupportedOp as error:
        return Verdict("refused", error.op or "UnsupportedOp", str(error)), seen
    except Exception as error:
        # Every exception is a difference, because eager mode runs this program.
        return Verdict("disagrees", type(error).__name__, f"{type(error).__name__}: {error}"), seen
    return Verdict("agrees"), seen


def _repeats(program: Program, expected: Expected, seen: Sequence[Observation]) -> Verdict:
    """Checks that random numbers repeat with the same seed, and differ with another seed."""
    again, other = compiled(program, "dynaxla"), compiled(program, "dynaxla", seed=100)
    other_eager = observe(program, lambda world: world.function, seed=100)
    for number, (mine, repeated) in enumerate(zip(seen, again, strict=True)):
        for name in expected.random[number]:
            value, same = mine.values[name], repeated.values[name]
            if (value is None) != (same is None) or (value is not None and not torch.equal(_without_nans(value), _without_nans(same))):
                return Verdict("disagrees", "random", f"call {number}: {name} is {value}, then under the same seed {same}")
            theirs, their_other = expected.calls[number].values[name], other_eager[number].values[name]
            if value is None or not _are_continuous(theirs, their_other):
                continue
            if torch.equal(value, other[number].values[name]):
                return Verdict("disagrees", "random", f"call {number}: {name} is {value} under two seeds")
    return Verdict("agrees")


def _are_continuous(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    """True if two draws cannot be equal by chance: there are several numbers, and all of them differ."""
    if first is None or second is None or first.numel() < 3 or not first.is_floating_point():
        return False
    return len(torch.cat([first.reshape(-1), second.reshape(-1)]).unique()) == 2 * first.numel()


def _without_nans(value: torch.Tensor) -> torch.Tensor:
    """Returns the value with NaNs replaced, so that equal values compare equal. Complex numbers become two real numbers."""
    parts = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    return torch.where(parts.isnan(), 12345, parts) if parts.is_floating_point() else parts
