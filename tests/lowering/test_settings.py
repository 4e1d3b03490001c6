"""torch's settings of precision, as programs keep them: only CUDA has less than all of float32."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from jax import lax

from dynaxla.lowering.settings import EXACT, Settings
from dynaxla.runtime import private
from support.processes.scripts import run_script

# torch's own tests forbid assignments to flags of torch.backends; these are what such an assignment calls.
set_newer = torch._C._set_fp32_precision_setter
set_cudnn = torch._C._set_cudnn_allow_tf32
set_cublas = torch._C._set_cublas_allow_tf32
set_cudnn_enabled = torch._C._set_cudnn_enabled
set_matmul = torch.set_float32_matmul_precision


def usual() -> None:
    """torch's defaults, each set for its op."""
    set_matmul("highest")
    for backend, op in private.FLOAT32_PRECISIONS:
        set_newer(backend, op, "none")
    set_cudnn(True)
    set_cudnn_enabled(True)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    deterministic = torch.are_deterministic_algorithms_enabled()
    usual()
    yield
    usual()
    torch.use_deterministic_algorithms(deterministic)


class Kernels:
    """What torch's kernels do, from its documentation of TF32 and ATen's Context.cpp.

    Attributes: given (what each op or backend was told: "none" if it inherits); cudnn (whether cuDNN is used).
    """

    def __init__(self) -> None:
        self.given = {("generic", "all"): "none", ("cuda", "all"): "none", ("cuda", "matmul"): "none"}
        self.given |= {("cuda", "conv"): "tf32", ("cuda", "rnn"): "tf32"}
        self.cudnn = True

    def newer(self, backend: str, op: str, value: str) -> None:
        self.given[backend, op] = value

    def matmul(self, value: str) -> None:
        self.given["cuda", "matmul"] = "ieee" if value == "highest" else "tf32"

    def cublas(self, allowed: bool) -> None:
        self.given["cuda", "matmul"] = "tf32" if allowed else "ieee"

    def cudnn_tf32(self, allowed: bool) -> None:
        self.given["cuda", "conv"] = self.given["cuda", "rnn"] = "tf32" if allowed else "none"

    def enabled(self, enabled: bool) -> None:
        self.cudnn = enabled

    def rounds(self, op: str) -> bool:
        if op == "conv" and not self.cudnn:
            op = "matmul"
        places = [("cuda", op), ("cuda", "all"), ("generic", "all")]
        return next((self.given[place] for place in places if self.given[place] != "none"), "none") == "tf32"

    def settings(self) -> Settings:
        return Settings(*map(self.rounds, ("matmul", "conv", "rnn")))


Change = tuple[Callable[..., Any], Callable[..., None], tuple[Any, ...]]
CHANGES: list[Change] = [
    *((set_matmul, Kernels.matmul, (value,)) for value in ("highest", "high", "medium")),
    *((set_cublas, Kernels.cublas, (value,)) for value in (False, True)),
    *((set_cudnn, Kernels.cudnn_tf32, (value,)) for value in (False, True)),
    *((set_cudnn_enabled, Kernels.enabled, (value,)) for value in (False, True)),
    *((set_newer, Kernels.newer, ("generic", "all", value)) for value in ("none", "ieee", "tf32", "bf16")),
    *((set_newer, Kernels.newer, ("cuda", op, value)) for op in ("all", "matmul", "conv", "rnn") for value in ("none", "ieee", "tf32")),
]


@pytest.mark.parametrize("first", range(len(CHANGES)))
def test_older_and_newer_settings_in_every_order(first: int) -> None:
    """Three changes after each other, of all that torch has: what the kernels would do, without an error and without a trace."""
    seen = set()
    for rest in itertools.product(range(len(CHANGES)), repeat=2):
        usual()
        kernels = Kernels()
        for index in (first, *rest):
            change, expect, values = CHANGES[index]
            change(*values)
            expect(kernels, *values)
        state = {place: private.float32_precision(*place) for place in private.FLOAT32_PRECISIONS}
        assert Settings.current("cuda") == kernels.settings(), [CHANGES[index][2] for index in (first, *rest)]
        assert {place: private.float32_precision(*place) for place in private.FLOAT32_PRECISIONS} == state
        assert (state["cuda", "rnn"] == "tf32") == kernels.rounds("rnn")
        seen.add(Settings.current("cuda"))
    assert len(seen) >= 2
    assert Settings.current("cpu") == EXACT


def test_where_the_older_getters_raise() -> None:
    set_newer("cuda", "matmul", "tf32")
    set_newer("cuda", "conv", "ieee")
    with pytest.raises(RuntimeError, match="legacy and new"):
        torch.get_float32_matmul_precision()
    with pytest.raises(RuntimeError, match="legacy and new"):
        _ = torch.backends.cudnn.allow_tf32
    assert Settings.current("cuda") == Settings(matmul_tf32=True, convolution_tf32=False, recurrent_tf32=True)


@pytest.mark.parametrize("place", private.FLOAT32_PRECISIONS, ids=".".join)
def test_the_public_way_reads_the_same(place: tuple[str, str]) -> None:
    for value in ("ieee", "tf32", "none"):
        set_newer(*place, value)
        assert value == "none" or private._public_float32_precision(*place) == value
        for other in private.FLOAT32_PRECISIONS:
            assert private._public_float32_precision(*other) == private.float32_precision(*other)


def test_a_fresh_process() -> None:
    """torch's own defaults (TF32 for cuDNN alone), and what a later setting for all backends makes of them."""
    script = """
import warnings
warnings.simplefilter("error")
import torch
from dynaxla.lowering.settings import Settings
from dynaxla.runtime import private
print(*Settings.current("cuda")[:2])
torch.backends.fp32_precision = "ieee"
print(*Settings.current("cuda")[:2], private.float32_precision("cuda", "conv") == "tf32")
torch.backends.fp32_precision = "tf32"
print(*Settings.current("cuda")[:2])
"""
    default, exact, coarse = (line.split() for line in run_script(script).splitlines())
    assert default == ["False", "True"]
    assert coarse == ["True", "True"]
    assert exact[:2] == ["False", exact[2]]  # torch 2.13 lets convolutions inherit until one is set for them; 2.11 does not


def test_products_on_a_tpu() -> None:
    """A value of torch.set_float32_matmul_precision is a key of its own, and reaches products alone."""
    seen = {}
    for value in ("highest", "high", "medium"):
        set_matmul(value)
        seen[value] = Settings.current("tpu")
        assert seen[value].convolution_precision == seen[value].recurrent_precision == lax.Precision.HIGHEST
    assert [settings.matmul_precision for settings in seen.values()] == [lax.Precision.HIGHEST, lax.Precision.HIGH, lax.Precision.DEFAULT]
    assert seen["highest"] == EXACT
    set_matmul("highest")
    set_newer("cuda", "matmul", "tf32")  # the older getter raises if these two contradict each other
    assert Settings.current("tpu") == EXACT
    assert [Settings.vary_on(platform) for platform in ("tpu", "cuda", "cpu")] == [True, True, False]


def test_deterministic_algorithms() -> None:
    assert not Settings.current("cuda").deterministic
    torch.use_deterministic_algorithms(True)
    assert Settings.current("cuda").deterministic
    assert Settings.current("cpu") == EXACT


def test_precision_of_programs() -> None:
    """The three are set apart from each other."""
    settings = [EXACT, Settings(matmul_tf32=True), Settings(convolution_tf32=True), Settings(recurrent_tf32=True)]
    exact, coarse = lax.Precision.HIGHEST, lax.Precision.DEFAULT
    assert [item.matmul_precision for item in settings] == [exact, coarse, exact, exact]
    assert [item.convolution_precision for item in settings] == [exact, exact, coarse, exact]
    assert [item.recurrent_precision for item in settings] == [exact, exact, exact, coarse]
