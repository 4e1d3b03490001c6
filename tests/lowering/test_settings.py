"""torch's float32 precision settings, and the precision that programs use."""

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

# torch's own tests forbid assignments to flags of torch.backends; such an assignment calls these functions.
set_newer = torch._C._set_fp32_precision_setter
set_cudnn = torch._C._set_cudnn_allow_tf32
set_cublas = torch._C._set_cublas_allow_tf32
set_cudnn_enabled = torch._C._set_cudnn_enabled
set_matmul = torch.set_float32_matmul_precision


def set_defaults() -> None:
    """Sets torch's defaults for each op."""
    set_matmul("highest")
    for backend, op in private.FLOAT32_PRECISIONS:
        set_newer(backend, op, "none")
    set_cudnn(True)
    set_cudnn_enabled(True)


@pytest.fixture(autouse=True)
def defaults() -> Iterator[None]:
    deterministic = torch.are_deterministic_algorithms_enabled()
    set_defaults()
    yield
    set_defaults()
    torch.use_deterministic_algorithms(deterministic)


class Kernels:
    """A model of torch's kernels, after torch's documentation of TF32 and ATen's Context.cpp.

    Attributes:
        precisions: The setting of each (backend, op); "none" if it inherits.
        cudnn: True if cuDNN is used.
    """

    def __init__(self) -> None:
        self.precisions = {("generic", "all"): "none", ("cuda", "all"): "none", ("cuda", "matmul"): "none"}
        self.precisions |= {("cuda", "conv"): "tf32", ("cuda", "rnn"): "tf32"}
        self.cudnn = True

    def newer(self, backend: str, op: str, value: str) -> None:
        self.precisions[backend, op] = value

    def matmul(self, value: str) -> None:
        self.precisions["cuda", "matmul"] = "ieee" if value == "highest" else "tf32"

    def cublas(self, allowed: bool) -> None:
        self.precisions["cuda", "matmul"] = "tf32" if allowed else "ieee"

    def cudnn_tf32(self, allowed: bool) -> None:
        self.precisions["cuda", "conv"] = self.precisions["cuda", "rnn"] = "tf32" if allowed else "none"

    def enabled(self, enabled: bool) -> None:
        self.cudnn = enabled

    def rounds(self, op: str) -> bool:
        if op == "conv" and not self.cudnn:
            op = "matmul"
        keys = [("cuda", op), ("cuda", "all"), ("generic", "all")]
        return next((self.precisions[key] for key in keys if self.precisions[key] != "none"), "none") == "tf32"

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
def test_settings_match_the_kernels_after_any_three_changes(first: int) -> None:
    """`Settings.current` raises nothing and changes no setting, whichever older and newer setters were called."""
    results = set()
    for rest in itertools.product(range(len(CHANGES)), repeat=2):
        set_defaults()
        kernels = Kernels()
        for index in (first, *rest):
            change, expect, values = CHANGES[index]
            change(*values)
            expect(kernels, *values)
        state = {key: private.float32_precision(*key) for key in private.FLOAT32_PRECISIONS}
        assert Settings.current("cuda") == kernels.settings(), [CHANGES[index][2] for index in (first, *rest)]
        assert {key: private.float32_precision(*key) for key in private.FLOAT32_PRECISIONS} == state
        assert (state["cuda", "rnn"] == "tf32") == kernels.rounds("rnn")
        results.add(Settings.current("cuda"))
    assert len(results) >= 2
    assert Settings.current("cpu") == EXACT


def test_settings_for_which_the_older_getters_raise() -> None:
    set_newer("cuda", "matmul", "tf32")
    set_newer("cuda", "conv", "ieee")
    with pytest.raises(RuntimeError, match="legacy and new"):
        torch.get_float32_matmul_precision()
    with pytest.raises(RuntimeError, match="legacy and new"):
        _ = torch.backends.cudnn.allow_tf32
    assert Settings.current("cuda") == Settings(matmul_tf32=True, convolution_tf32=False, recurrent_tf32=True)


@pytest.mark.parametrize("key", private.FLOAT32_PRECISIONS, ids=".".join)
def test_public_getter_agrees(key: tuple[str, str]) -> None:
    for value in ("ieee", "tf32", "none"):
        set_newer(*key, value)
        assert value == "none" or private._public_float32_precision(*key) == value
        for other in private.FLOAT32_PRECISIONS:
            assert private._public_float32_precision(*other) == private.float32_precision(*other)


def test_defaults_of_a_fresh_process() -> None:
    """torch's own defaults (TF32 for cuDNN alone), and the effect of a later setting for all backends."""
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
    """Each value of torch.set_float32_matmul_precision gives different settings, and affects products alone."""
    results = {}
    for value in ("highest", "high", "medium"):
        set_matmul(value)
        results[value] = Settings.current("tpu")
        assert results[value].convolution_precision == results[value].recurrent_precision == lax.Precision.HIGHEST
    assert [settings.matmul_precision for settings in results.values()] == [
        lax.Precision.HIGHEST,
        lax.Precision.HIGH,
        lax.Precision.DEFAULT,
    ]
    assert results["highest"] == EXACT
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
    """The three precisions are independent."""
    settings = [EXACT, Settings(matmul_tf32=True), Settings(convolution_tf32=True), Settings(recurrent_tf32=True)]
    exact, coarse = lax.Precision.HIGHEST, lax.Precision.DEFAULT
    assert [item.matmul_precision for item in settings] == [exact, coarse, exact, exact]
    assert [item.convolution_precision for item in settings] == [exact, exact, coarse, exact]
    assert [item.recurrent_precision for item in settings] == [exact, exact, exact, coarse]
