"""Tests of errors for bad input: they have dynaxla's classes and clear messages, inputs are unchanged, and later calls work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch

import dynaxla
from dynaxla import errors, user_frames
from dynaxla.lowering.registry import Registry
from support import internals

pytestmark = pytest.mark.quick

aten = torch.ops.aten


def compile_and_call(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return torch.compile(function, backend="dynaxla", fullgraph=True, **options)(*args)


def check_later_call() -> None:
    x = torch.randn(3)
    assert torch.equal(compile_and_call(lambda x: x * 2, x), x * 2)


def test_unknown_option_is_refused_with_suggestions() -> None:
    with pytest.raises(dynaxla.errors.OptionError, match=r"unknown option 'dmup'(.|\n)*did you mean 'dump'(.|\n)*executables"):
        compile_and_call(lambda x: x * 2, torch.randn(3), options={"dmup": "here"})
    check_later_call()


def test_unknown_xla_option_names_the_option() -> None:
    with pytest.raises(dynaxla.errors.CompilationError, match="xla_no_such_flag"):
        compile_and_call(lambda x: x * 2, torch.randn(3), options={"xla": {"xla_no_such_flag": True}})
    check_later_call()


@pytest.mark.parametrize("error", [jax.errors.JaxRuntimeError("INTERNAL: no"), NotImplementedError("not on this platform")])
def test_error_of_xlas_compiler_is_a_compilation_error(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        internals.compiler(patch, refuse)
        with pytest.raises(dynaxla.errors.CompilationError, match=f"XLA could not compile .*{error}"):
            compile_and_call(lambda x: x * 2, torch.randn(3))
    check_later_call()


def test_exhausted_memory_during_compilation_is_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no")

    internals.compiler(monkeypatch, refuse)
    with pytest.raises(dynaxla.errors.OutOfMemory, match="RESOURCE_EXHAUSTED"):
        compile_and_call(lambda x: x * 2, torch.randn(3))


def test_defect_of_dynaxla_is_not_a_compilation_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_lowered(*_: Any) -> None:
        raise AttributeError("a defect")

    with monkeypatch.context() as patch:
        internals.compiler(patch, compile_lowered)
        with pytest.raises(AttributeError, match=r"^a defect$"):
            compile_and_call(lambda x: x * 2, torch.randn(3))
    check_later_call()


def test_meta_tensor_is_refused() -> None:
    with pytest.raises(dynaxla.errors.UnsupportedTensor, match=r"meta device(.|\n)*to_empty"):
        compile_and_call(lambda x: x * 2, torch.randn(3, device="meta"))
    check_later_call()


def test_meta_tensor_with_cpu_tensor_is_refused() -> None:
    with pytest.raises(dynaxla.errors.UnsupportedTensor, match=r"an input: torch.float32 of shape \[3\] is on the meta device"):
        compile_and_call(lambda x, y: (x * 2, y * 2), torch.randn(3), torch.randn(3, device="meta"))
    check_later_call()


def test_op_without_a_lowering_names_op_input_line_and_remedy() -> None:
    @torch.library.custom_op("dynaxla_test::unknown", mutates_args=())
    def unknown(x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * factor

    unknown.register_fake(lambda x, factor: torch.empty_like(x))
    x = torch.randn(8, 4)
    before = x.clone()
    with pytest.raises(dynaxla.errors.UnsupportedOp) as raised:
        compile_and_call(lambda x: unknown(x.mul_(2), 2.0) + 1, x, options={"fallback": "error"})
    message = str(raised.value)
    assert "dynaxla_test.unknown" in message
    assert "f32[8, 4]" in message
    assert "test_errors.py" in message
    assert "dynaxla.lowers" in message
    assert torch.equal(x, before), "an input must not be written to if the program cannot run"
    check_later_call()


def test_users_lowering_with_wrong_shape_is_refused() -> None:
    @torch.library.custom_op("dynaxla_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(lambda x: torch.empty_like(x))
    dynaxla.lowers(torch.ops.dynaxla_test.twice.default)(lambda x: x[:1] * 2)
    with pytest.raises(dynaxla.errors.LoweringError, match=r"returned float32\[1, 4\], and PyTorch returns float32\[8, 4\]"):
        compile_and_call(lambda x: twice(x), torch.randn(8, 4))


def test_failing_lowering_of_a_user_is_named() -> None:
    @torch.library.custom_op("dynaxla_test::thrice", mutates_args=())
    def thrice(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    thrice.register_fake(lambda x: torch.empty_like(x))

    def lowering(x: Any) -> Any:
        raise ValueError("broken on purpose")

    dynaxla.lowers(torch.ops.dynaxla_test.thrice.default)(lowering)
    with pytest.raises(dynaxla.errors.LoweringError, match=r"thrice(.|\n)*broken on purpose(.|\n)*f32\[8, 4\]"):
        compile_and_call(lambda x: thrice(x), torch.randn(8, 4))


def test_second_lowering_of_an_op_is_refused_with_both_places() -> None:
    registry = Registry()
    registry.register(aten.sin.default, lambda x: x)
    with pytest.raises(ValueError, match=r"aten.sin.default has two lowerings(.|\n)*test_errors:\d+ and at .*test_errors:\d+"):
        registry.register(aten.sin.default, lambda x: x)


def test_lowering_that_does_not_fit_its_schema_is_refused() -> None:
    registry = Registry()

    def wrong_keyword(x: Any, *, flavour: int) -> Any:
        return x

    with pytest.raises(TypeError, match="flavour"):
        registry.register(aten.sin.default, wrong_keyword)
    with pytest.raises(TypeError, match="positional"):
        registry.register(aten.sin.default, lambda x, y: x)


def test_out_of_memory_leaves_inputs_unchanged() -> None:
    x = torch.randn(1, requires_grad=False)
    before = x.clone()

    def huge(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x.expand(2**44) + torch.ones(2**44)

    with pytest.raises(dynaxla.errors.OutOfMemory, match=r"out of memory(.|\n)*inputs are unchanged"):
        compile_and_call(huge, x)
    assert torch.equal(x, before)
    check_later_call()


def test_size_that_depends_on_data_without_fallback_is_refused() -> None:
    with pytest.raises(dynaxla.errors.UnsupportedOp, match=r"depends on the values(.|\n)*test_errors.py(.|\n)*fallback"):
        compile_and_call(lambda x: x[x > 0] * 2, torch.randn(8), options={"fallback": "error"})
    check_later_call()


@pytest.mark.parametrize("options", [{"dmup": "here"}, {"xla": {"xla_no_such_flag": True}}])
def test_tracebacks_have_only_the_users_frames_and_the_innermost_frame(options: dict[str, Any]) -> None:
    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 + 1

    with pytest.raises(errors.DynaxlaError) as raised:
        torch.compile(Net(), backend="dynaxla", options=options)(torch.randn(3))
    frames = [(entry.frame.f_globals["__name__"], entry.name) for entry in raised.traceback]
    below = frames[[name for _, name in frames].index("compile_wrapper") + 1 :]
    assert [module for module, _ in below[:-1] if module != __name__] == []
    assert below[-1][0].startswith("dynaxla.")
    assert raised.value.__cause__ is None


def test_verbose_tracebacks_have_all_frames_and_the_cause() -> None:
    with torch._dynamo.config.patch(verbose=True), pytest.raises(errors.CompilationError) as raised:
        torch.compile(lambda x: x * 2, backend="dynaxla", options={"xla": {"xla_no_such_flag": True}})(torch.randn(3))
    names = [entry.frame.f_globals["__name__"] for entry in raised.traceback]
    assert "dynaxla.engine.xla" in names
    (note,) = raised.value.__notes__
    assert note.startswith("The cause:\n")
    assert "JaxRuntimeError: INVALID_ARGUMENT: No such compile option" in note


def test_users_line_in_a_folder_named_like_a_library() -> None:
    train: dict[str, Any] = {}
    exec(compile("def train(function):\n    return function()", "/home/me/jax/train.py", "exec"), train)
    line = "/home/me/jax/train.py:2, in train"
    assert [train["train"](function) for function in (user_frames.location, user_frames.short_location)] == [line, "train.py:2, in train"]
    with pytest.raises(RuntimeError) as raised:
        train["train"](lambda: torch.ones(2).view(3))
    assert user_frames.location_of(raised.value).startswith(f"{__file__}:")
    with pytest.raises(RuntimeError) as raised:
        train["train"](torch.ones(2).backward)
    assert user_frames.location_of(raised.value) == line
