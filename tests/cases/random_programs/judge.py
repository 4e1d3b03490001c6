"""The verdict on one program: does dynaxla do what eager mode does?"""

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
    """Runs the graph with torch's own kernels, but lays its results out as their metadata say: compilers know nothing else."""
    promises = [node.meta["val"] if isinstance(node, torch.fx.Node) else None for node in _returned(module)]
    inputs = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder" and isinstance(node.meta["val"], torch.Tensor)]
    shared = {promise.untyped_storage()._cdata for promise in inputs}

    def run(*args: Any) -> list[Any]:
        results = list(module(*args))
        memories: dict[int, torch.Tensor] = {}
        made = [
            (place, promise)
            for place, promise in enumerate(promises)
            if isinstance(results[place], torch.Tensor) and promise.untyped_storage()._cdata not in shared
        ]
        # The largest first: the others lie in its memory.
        for place, promise in sorted(made, key=lambda item: -results[item[0]].numel()):
            results[place] = _alone(_laid_out(results[place], promise, memories))
        return results

    return make_boxed_func(run)


def _laid_out(result: torch.Tensor, promise: torch.Tensor, memories: dict[int, torch.Tensor]) -> torch.Tensor:
    """memories: by the promise's storage, what is already there of it."""
    if [*map(_hint, promise.shape)] != [*result.shape]:
        return result
    stride, offset = [_hint(step) for step in promise.stride()], _hint(promise.storage_offset())
    said = tuple(step for size, step in zip(result.shape, stride, strict=True) if size > 1) if result.numel() else ()
    key = promise.untyped_storage()._cdata
    if key not in memories and (strides(result), result.storage_offset()) == (said, offset):
        return result
    size = offset + 1 + sum((size - 1) * step for size, step in zip(result.shape, stride, strict=True))
    if key not in memories or memories[key].numel() < size or memories[key].dtype != result.dtype:
        memories[key] = torch.empty(max(size, 0), dtype=result.dtype)
    return memories[key].as_strided(result.shape, stride, offset).copy_(result.detach())


def _alone(result: torch.Tensor) -> torch.Tensor:
    """The tensor, but no view that autograd knows of: it treats the views that a graph returns in a way of their own."""
    if not result._is_view() or result.is_conj() or result.is_neg():
        return result
    place = result.storage_offset(), result.shape, result.stride()
    return torch.empty(0, dtype=result.dtype).set_(result.untyped_storage(), *place)


def _hint(size: int | torch.SymInt) -> int:
    """The number that a size had when it was traced."""
    return size if isinstance(size, int) else size.node.hint


def _returned(module: GraphModule) -> Sequence[Any]:
    return next(node for node in reversed(module.graph.nodes) if node.op == "output").args[0]


# TorchDynamo and AOTAutograd without any compiler: what differs from eager mode here is torch's own.
REFERENCE = aot_autograd(fw_compiler=_as_promised)
MIN_CUT_REFERENCE = aot_autograd(fw_compiler=_as_promised, partition_fn=min_cut_rematerialization_partition)


@dataclass(frozen=True)
class Verdict:
    """Attributes:
    outcome: "agrees"; "disagrees"; "refused" (dynaxla has no lowering); "torch" (torch.compile refuses the program whatever the backend,
        or does the same without dynaxla).
    kind: what differs, in a word or an exception's name; detail: all of it.
    """

    outcome: str
    kind: str = ""
    detail: str = ""


def compiled(program: Program, backend: Any, seed: int = 0) -> list[Observation]:
    """What is seen of the compiled program's calls. Raises: whatever torch.compile raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*is deprecated.*", DeprecationWarning)
        # torch looks at the gradient of every input that requires grad, leaf or not.
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
        # Which tensors are kept for the backward, and then found changed, depends on the partitioner.
        reference, reference_seen = _against_eager(program, expected, MIN_CUT_REFERENCE)
        reference_seen = [] if reference.kind == verdict.kind else reference_seen
    if reference.outcome == "agrees":
        return verdict
    if reference_seen and seen:
        # torch itself is wrong; is dynaxla wrong only where torch is, and in the same way?
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
        # Whatever it is: eager mode runs this program.
        return Verdict("disagrees", type(error).__name__, f"{type(error).__name__}: {error}"), seen
    return Verdict("agrees"), seen


def _repeats(program: Program, expected: Expected, seen: Sequence[Observation]) -> Verdict:
    """Random numbers repeat under the same seed, and differ under another."""
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
    """Whether chance cannot make two draws equal: there are several numbers, and all of them differ."""
    if first is None or second is None or first.numel() < 3 or not first.is_floating_point():
        return False
    return len(torch.cat([first.reshape(-1), second.reshape(-1)]).unique()) == 2 * first.numel()


def _without_nans(value: torch.Tensor) -> torch.Tensor:
    """With NaNs, which equal nothing, replaced; complex numbers as two."""
    parts = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    return torch.where(parts.isnan(), 12345, parts) if parts.is_floating_point() else parts
