"""Which cases there are, and the calls of each.

An entry is (database, name); a case is an entry with a dtype and a kind of input.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_device_type import precisionOverride, toleranceOverride
from torch.testing._internal.common_methods_invocations import op_db, python_ref_db
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.opinfo.core import OpInfo

from .calls import Call

DATABASES: dict[str, list[Any]] = {"op_db": op_db, "python_ref_db": python_ref_db, "module_db": module_db}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
KINDS = ("samples",)
_COMPARING_TESTS = (
    ("TestCommon", "test_noncontiguous_samples"),
    ("TestCommon", "test_variant_consistency_eager"),
    ("TestDecomp", "test_comprehensive"),
    ("TestInductorOpInfo", "test_comprehensive"),
    ("TestModule", "test_forward"),
)


def _call(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


# The database's random ops seed the generator themselves, which TorchDynamo cannot trace. Here the seed is set around each call.
common_methods_invocations.wrapper_set_seed = _call


@dataclass(frozen=True)
class Case:
    """dtype: its name, e.g. "float32"."""

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
    """One call to be compared. process: what of the results can be differentiated; the whole if None."""

    call: Call
    expects_error: bool = False
    differentiate: bool = False
    process: Callable[[Any], Any] | None = None


@functools.cache
def entries(database: str) -> dict[str, Any]:
    return {info.full_name if isinstance(info, OpInfo) else info.name: info for info in DATABASES[database]}


def cases() -> Iterator[Case]:
    """All of them, those of an entry together."""
    for database in DATABASES:
        for name, info in entries(database).items():
            dtypes = [dtype for dtype in DTYPES if dtype in info.supported_dtypes("cpu")]
            for dtype in dtypes:
                for kind in KINDS:
                    if _exists(info, dtype, kind, dtype is dtypes[0]):
                        yield Case(database, name, str(dtype).removeprefix("torch."), kind)


def _exists(info: Any, dtype: torch.dtype, kind: str, first: bool) -> bool:
    return True


def trials(case: Case) -> Iterator[Trial]:
    """The calls of a case, made as they are asked for. Raises: what the database raises."""
    info = case.info
    if case.database == "module_db":
        yield from _module_trials(case)
        return
    for sample in info.sample_inputs("cpu", case.torch_dtype):
        yield Trial(Call.of(info.op, (sample.input, *sample.args), sample.kwargs))


def _module_trials(case: Case) -> Iterator[Trial]:
    info = case.info
    for training in (True, False) if info.train_and_eval_differ else (True,):
        for sample in info.module_inputs_func(info, device="cpu", dtype=case.torch_dtype, requires_grad=False, training=training):
            if sample.forward_input is None:
                continue
            constructor, forward = sample.constructor_input, sample.forward_input
            torch.manual_seed(0)
            module = info.module_cls(*constructor.args, **constructor.kwargs).to(case.torch_dtype).train(training)
            yield Trial(Call.of(copy.deepcopy(module), forward.args, forward.kwargs))


def uninitialised(case: Case) -> bool:
    """Whether the op gives memory as it finds it."""
    return case.name.rpartition(".")[2] in (
        "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"
    )  # fmt: skip


def tolerance_of(case: Case) -> tuple[float, float]:
    """What torch's own tests that compare an op with another computation of it allow beyond the defaults: relative, absolute."""
    relative = absolute = 0.0
    for suite, test in _COMPARING_TESTS:
        for decorator in case.info.get_decorators(suite, test, "cpu", case.torch_dtype, {}):
            if isinstance(decorator, toleranceOverride) and case.torch_dtype in decorator.d:
                allowed = decorator.d[case.torch_dtype]
                relative, absolute = max(relative, allowed.rtol), max(absolute, allowed.atol)
            elif isinstance(decorator, precisionOverride):
                absolute = max(absolute, decorator.d.get(case.torch_dtype, 0.0))
    return relative, absolute
