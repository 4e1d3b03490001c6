"""The cases, and the calls of each case.

An entry is (database, name). A case is an entry with a dtype and a kind of input.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from .ambiguous import UNIQUE
from .calls import Call, copy_tensors

if TYPE_CHECKING:
    from torch.testing._internal.opinfo.core import SampleInput

DATABASES = ("op_db", "python_ref_db", "module_db")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
KINDS = ("samples", "noncontiguous", "zero_size", "error_inputs", "changed_numbers", "inplace", "out", "gradients")
_COMPARING_TESTS = (
    ("TestCommon", "test_noncontiguous_samples"),
    ("TestCommon", "test_variant_consistency_eager"),
    ("TestDecomp", "test_comprehensive"),
    ("TestInductorOpInfo", "test_comprehensive"),
    ("TestModule", "test_forward"),
)


@dataclass(frozen=True)
class Case:
    """A case.

    Attributes:
        dtype: The name of the dtype, such as "float32".
    """

    database: str
    name: str
    dtype: str
    kind: str

    def __str__(self) -> str:
        return f"{self.database}/{self.name}/{self.dtype}/{self.kind}"

    @property
    def info(self) -> Any:
        return entries(self.database)[self.name]

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


@dataclass
class Trial:
    """A call to be compared.

    Attributes:
        process: Returns the part of the result that can be differentiated; None for the whole.
        unique: Takes the result and the first argument, and returns the part of the result that is unique; None for the whole.
        number: The index among the case's calls.
    """

    call: Call
    expects_error: bool = False
    differentiate: bool = False
    process: Callable[[Any], Any] | None = None
    unique: Callable[[Any, torch.Tensor], list[torch.Tensor]] | None = None
    number: int = 0


@functools.cache
def entries(database: str) -> dict[str, Any]:
    """Returns the entries of a database by name. The first call imports torch's databases in 2 s; collecting tests needs no entries."""
    if database == "module_db":
        from torch.testing._internal.common_modules import module_db

        return {info.name: info for info in module_db}
    from torch.testing._internal import common_methods_invocations, common_utils
    from torch.testing._internal.opinfo import core

    # The database's random ops seed the generator themselves, which TorchDynamo cannot trace. Here the seed is set around each call.
    common_methods_invocations.wrapper_set_seed = _call
    # A database searches the source of each frame of the stack for the test of torch that uses it, in half of the time of all calls.
    # There is no such test here.
    core.extract_test_fn = common_utils.extract_test_fn = lambda: None
    return {info.full_name: info for info in getattr(common_methods_invocations, database)}


def _call(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


def _is_module(info: Any) -> bool:
    return hasattr(info, "module_cls")


def cases() -> Iterator[Case]:
    """Yields all cases. The cases of an entry follow one another."""
    for database in DATABASES:
        for name, info in entries(database).items():
            dtypes = [dtype for dtype in DTYPES if dtype in info.supported_dtypes("cpu")]
            for dtype in dtypes:
                for kind in KINDS:
                    if _exists(info, dtype, kind, dtype is dtypes[0]):
                        yield Case(database, name, str(dtype).removeprefix("torch."), kind)


def _exists(info: Any, dtype: torch.dtype, kind: str, first: bool) -> bool:
    """True if there is a case. Error inputs and changed numbers do not depend on the dtype: only an entry's first dtype has them."""
    is_module = _is_module(info)
    if kind == "error_inputs":
        return first and (info.module_error_inputs_func if is_module else info.error_inputs_func) is not None
    if kind == "changed_numbers":
        return first and not is_module and not info.name.startswith("_refs.")
    if kind == "gradients":
        return dtype is torch.float64 and (is_module or dtype in info.supported_backward_dtypes("cpu"))
    if kind == "inplace":
        return not is_module and info.get_inplace() is not None
    if kind == "out":
        return not is_module and info.supports_out
    return kind == "samples" or not is_module


def trials(case: Case) -> Iterator[Trial]:
    """Yields the calls of a case, made one at a time. Raises the exceptions of the database."""
    for number, trial in enumerate(_trials(case)):
        trial.number = number
        yield trial


def _trials(case: Case) -> Iterator[Trial]:
    if case.database == "module_db":
        return _module_error_trials(case) if case.kind == "error_inputs" else _module_trials(case)
    if case.kind == "error_inputs":
        return (_trial(case, error.sample_input, expects_error=True) for error in case.info.error_inputs("cpu"))
    samples = case.info.sample_inputs("cpu", case.torch_dtype, requires_grad=case.kind == "gradients")
    match case.kind:
        case "samples":
            return (_trial(case, sample) for sample in samples)
        case "noncontiguous":
            return (_trial(case, sample.noncontiguous()) for sample in samples if has_strides(sample))
        case "zero_size":
            return (_trial(case, sample) for sample in zero_sized(itertools.islice(samples, 8)))
        case "changed_numbers":
            return _refused_trials(case, itertools.islice(samples, 8))
        case "inplace":
            return (_trial(case, sample, function=case.info.get_inplace()) for sample in samples if not sample.broadcasts_input)
        case "out":
            return _out_trials(case, samples)
        case "gradients":
            return (_trial(case, sample, differentiate=True, process=sample.output_process_fn_grad) for sample in samples)
    raise ValueError(case.kind)


def _trial(case: Case, sample: SampleInput, *, function: Callable[..., Any] | None = None, **options: Any) -> Trial:
    rule = UNIQUE.get(case.name.removeprefix("_refs."))
    unique = None if rule is None else lambda result, source: rule(result, source, sample.args, sample.kwargs)
    return Trial(Call.of(function or case.info.op, (sample.input, *sample.args), sample.kwargs), unique=unique, **options)


def _out_trials(case: Case, samples: Iterable[SampleInput]) -> Iterator[Trial]:
    """Yields calls with `out` tensors: as eager mode allocates them, with gaps, and empty. Only the first sample has all three."""
    from torch.testing._internal.common_utils import noncontiguous_like
    from torch.testing._internal.opinfo.core import SampleInput

    makers = (torch.empty_like, noncontiguous_like, lambda result: result.new_empty(0))
    for index, sample in enumerate(samples):
        result = _eager_result(case, sample)
        if result is None:  # eager will raise again
            yield _trial(case, sample)
            continue
        results = [result] if isinstance(result, torch.Tensor) else list(result)
        for maker in makers if index == 0 else makers[index % 3 : index % 3 + 1]:
            filled = [maker(item).fill_(1) for item in results]
            out = filled[0] if isinstance(result, torch.Tensor) else tuple(filled)
            kwargs = sample.kwargs | {"out": out}
            yield _trial(case, SampleInput(sample.input, args=sample.args, kwargs=kwargs))


def _refused_trials(case: Case, samples: Iterable[SampleInput]) -> Iterator[Trial]:
    """Yields samples with changed numbers that eager mode refuses, one for each kind of message."""
    seen = set()
    for sample in changed_numbers(samples):
        trial = _trial(case, sample, expects_error=True)
        torch.manual_seed(0)
        try:
            with torch.no_grad():
                trial.call.python_function()(*copy_tensors(trial.call.tensors))
        except Exception as error:
            kind = type(error), re.sub(r"\[.*?\]|\W|\d", "", str(error))[:80]
            if kind not in seen:
                seen.add(kind)
                yield trial


def _eager_result(case: Case, sample: SampleInput) -> Any:
    """Returns None if eager mode raises."""
    torch.manual_seed(0)
    try:
        with torch.no_grad():
            return case.info.op(sample.input, *sample.args, **sample.kwargs)
    except Exception:
        return None


def has_strides(sample: SampleInput) -> bool:
    leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    return all(leaf.layout is torch.strided for leaf in leaves if isinstance(leaf, torch.Tensor))


def zero_sized(samples: Iterable[SampleInput]) -> Iterator[SampleInput]:
    """Yields the samples with one size of the first tensor set to zero: in all places of all tensors, in the first place, or in the last.

    Eager mode decides if an op accepts the sample.
    """
    seen = set()
    for sample in samples:
        first = next((leaf for leaf in pytree.tree_leaves(sample.input) if isinstance(leaf, torch.Tensor)), None)
        if first is None or not first.dim() or not has_strides(sample):
            continue
        for size, places in [(size, None) for size in sorted(set(first.shape))] + [(first.shape[0], 0), (first.shape[-1], -1)]:
            emptied = sample.transform(functools.partial(_emptied, size=size, place=places))
            text = emptied.summary()
            if text not in seen:
                seen.add(text)
                yield emptied


# Dimensions out of range, sizes and steps of zero or less, invalid probabilities, and numbers that a dtype cannot hold.
OTHER_NUMBERS: dict[type, tuple[float, ...]] = {int: (9, -9, 0, -1), float: (-1.0, 0.0, 2.0, 1e39)}


def changed_numbers(samples: Iterable[SampleInput]) -> Iterator[SampleInput]:
    """Yields the samples with one number changed, or with empty tensors. Eager mode decides which of them are errors."""
    from torch.testing._internal.opinfo.core import SampleInput

    for sample in samples:
        if not has_strides(sample):
            continue
        leaves, tree = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
        for index, leaf in enumerate(leaves):
            for changed in OTHER_NUMBERS.get(type(leaf), ()):
                (first, *args), kwargs = pytree.tree_unflatten([*leaves[:index], changed, *leaves[index + 1 :]], tree)
                yield SampleInput(first, args=tuple(args), kwargs=kwargs)
        yield from zero_sized([sample])


def _emptied(value: Any, *, size: int, place: int | None) -> Any:
    """Returns the tensor with zeros for `size` in its shape, everywhere or in one place."""
    if not isinstance(value, torch.Tensor) or not value.dim():
        return value
    shape = [0 if item == size else item for item in value.shape]
    if place is not None:
        shape = list(value.shape)
        shape[place] = 0 if shape[place] == size else shape[place]
    return value if 0 not in shape else value.new_empty(shape)


def _module_trials(case: Case) -> Iterator[Trial]:
    info = case.info
    differentiate = case.kind == "gradients"
    for training in (True, False) if info.train_and_eval_differ else (True,):
        samples = info.module_inputs_func(info, device="cpu", dtype=case.torch_dtype, requires_grad=differentiate, training=training)
        for sample in samples:
            if sample.forward_input is not None:
                module = _module(case, sample.constructor_input).train(training)
                call = Call.of(module, sample.forward_input.args, sample.forward_input.kwargs)
                yield Trial(call, differentiate=differentiate)


def _module_error_trials(case: Case) -> Iterator[Trial]:
    from torch.testing._internal.common_modules import ModuleErrorEnum

    info = case.info
    for training in (True, False) if info.train_and_eval_differ else (True,):
        errors = info.module_error_inputs_func(info, device="cpu", dtype=case.torch_dtype, requires_grad=False, training=training)
        for error in errors:
            sample = error.module_error_input
            if error.error_on is ModuleErrorEnum.FORWARD_ERROR:
                module = _module(case, sample.constructor_input).train(training)
                yield Trial(Call.of(module, sample.forward_input.args, sample.forward_input.kwargs), expects_error=True)


def _module(case: Case, arguments: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    return case.info.module_cls(*arguments.args, **arguments.kwargs).to(case.torch_dtype)


def uninitialised(case: Case) -> bool:
    """True if the op returns uninitialised memory."""
    return case.name.rpartition(".")[2] in (
        "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"
    )  # fmt: skip


def tolerance_of(case: Case) -> tuple[float, float]:
    """Returns the relative and the absolute tolerance of torch's tests that compare the op with another implementation."""
    from torch.testing._internal.common_device_type import precisionOverride, toleranceOverride

    relative = absolute = 0.0
    for suite, test in _COMPARING_TESTS:
        for decorator in case.info.get_decorators(suite, test, "cpu", case.torch_dtype, {}):
            if isinstance(decorator, toleranceOverride) and case.torch_dtype in decorator.d:
                allowed = decorator.d[case.torch_dtype]
                relative, absolute = max(relative, allowed.rtol), max(absolute, allowed.atol)
            elif isinstance(decorator, precisionOverride):
                absolute = max(absolute, decorator.d.get(case.torch_dtype, 0.0))
    return relative, absolute
