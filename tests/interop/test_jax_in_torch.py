"""Tests of interop/jax_in_torch.py (`to_torch`): JAX functions in eager mode, in compiled code, and under torch's transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.experimental import pallas as pl

import dynaxla
from dynaxla import to_torch
from dynaxla.errors import DeviceMismatch, DynaxlaError, UnsupportedTensor
from dynaxla.observe import metrics


def swish(x: Any) -> Any:
    return x * jax.nn.sigmoid(x)


def torch_swish(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


def random_tensor(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_trees_keywords_and_numbers() -> None:
    def affine(inputs: Any, *, scale: float, names: tuple[str, ...]) -> Any:
        return {name: inputs["x"] @ inputs["w"][0] * scale for name in names} | {"count": (inputs["x"] > 0).sum(), "none": None}

    x, w = random_tensor(3, 4), random_tensor(4, 5, seed=1)
    found = to_torch(affine)({"x": x, "w": [w]}, scale=2.0, names=("a", "b"))
    assert list(found) == ["a", "b", "count", "none"]
    assert found["none"] is None
    assert found["count"].dtype == torch.int32
    torch.testing.assert_close(found["a"], x @ w * 2)
    assert found["a"].data_ptr() != found["b"].data_ptr()


def test_gradients_are_those_of_torch() -> None:
    x = random_tensor(5).requires_grad_()
    to_torch(swish)(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.autograd.grad(torch_swish(x).sum(), x)[0])


def test_gradients_of_any_order_and_of_complex_numbers() -> None:
    x, z = random_tensor(3, dtype=torch.float64).requires_grad_(), random_tensor(3, dtype=torch.complex128).requires_grad_()
    function = to_torch(lambda x, n: (jnp.sin(x) * x**n, x.conj() * 2), x64=True)
    assert torch.autograd.gradcheck(lambda x: function(x, 3), (x,))
    assert torch.autograd.gradgradcheck(lambda x: function(x, 3), (x,))
    assert torch.autograd.gradcheck(lambda z: function(z, 2), (z,))


def test_integers_have_no_gradient() -> None:
    table, tokens = random_tensor(7, 3).requires_grad_(), torch.tensor([1, 5, 1], dtype=torch.int32)
    rows, largest = to_torch(lambda table, tokens: (table[tokens], table.argmax(1)))(table, tokens)
    assert rows.requires_grad
    assert not largest.requires_grad
    rows.sum().backward()
    torch.testing.assert_close(table.grad, torch.autograd.grad(table[tokens].sum(), table)[0])


def test_unused_results_and_inputs_without_gradient() -> None:
    x, y = random_tensor(3).requires_grad_(), random_tensor(3, seed=1)
    first, _ = to_torch(lambda x, y: (x * y, x / y))(x, y)
    first.sum().backward()
    torch.testing.assert_close(x.grad, y)
    assert y.grad is None
    with torch.no_grad():
        assert not to_torch(swish)(x).requires_grad


def test_writing_to_an_input_before_the_backward_pass_is_noticed() -> None:
    x = random_tensor(3).requires_grad_()
    inner = x * 1
    result = to_torch(swish)(inner).sum()
    with torch.no_grad():
        inner.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


def test_results_have_their_own_memory() -> None:
    constant = jnp.arange(4.0)
    x = torch.ones(4)
    same, again, constant_result = to_torch(lambda x: (x, x, constant))(x)
    for tensor in (same, again, constant_result):
        tensor.mul_(5)
    assert x.tolist() == [1] * 4
    assert np.asarray(constant).tolist() == [0, 1, 2, 3]
    assert same.tolist() == again.tolist() == [5] * 4
    y = random_tensor(3).requires_grad_()  # JAX saves the result of exp for its gradient
    result = to_torch(jnp.exp)(y)
    expected = result.detach().clone()
    result.detach().mul_(100)
    result.sum().backward()
    torch.testing.assert_close(y.grad, expected)


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(6, 5).t(), torch.ones(9)[1:], torch.ones(3, 8)[:, ::2], torch.ones(1, 3).expand(4, 3), torch.ones(()), torch.ones(0, 3)],
)
def test_tensors_of_all_strides(tensor: torch.Tensor) -> None:
    found = to_torch(lambda x: x * 2)(tensor)
    torch.testing.assert_close(found, tensor * 2)
    assert found.is_contiguous()


def test_conjugate_bits_are_seen() -> None:
    z = random_tensor(3, dtype=torch.complex64)
    torch.testing.assert_close(to_torch(lambda z: z * 2)(z.conj()), z.conj() * 2)
    torch.testing.assert_close(to_torch(lambda z: z * 2)(z.conj().imag), z.conj().imag * 2)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.complex128])
def test_64_bit_types_are_never_truncated(dtype: torch.dtype) -> None:
    value = torch.tensor([2**40 + 1]).to(dtype)
    with jax.enable_x64(False), pytest.raises(UnsupportedTensor, match=r"64-bit types are off(.|\n)*x64=True"):
        to_torch(lambda x: x + 1)(value)
    for x64, function in ((True, to_torch(lambda x: x + 1)), (False, to_torch(lambda x: x + 1, x64=True))):
        with jax.enable_x64(x64):
            found = function(value)
        assert found.dtype == dtype
        assert found.tolist() == (value + 1).tolist()


def test_exceptions_of_the_function_are_raised() -> None:
    def wrong(x: Any) -> Any:
        raise ValueError("the user's error")

    with pytest.raises(ValueError, match="the user's error") as caught:
        to_torch(wrong)(torch.ones(2))
    assert any(entry.name == "wrong" for entry in caught.traceback)
    with pytest.raises(TypeError, match="takes a function"):
        to_torch(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="result 0 of"):
        to_torch(lambda x: "text")(torch.ones(2))
    with pytest.raises(UnsupportedTensor, match=r"key_data"):
        to_torch(lambda x: jax.random.key(0))(torch.ones(2))
    with pytest.raises(UnsupportedTensor, match="layout"):
        to_torch(swish)(torch.ones(2).to_sparse())
    with pytest.raises((DeviceMismatch, UnsupportedTensor)):
        to_torch(lambda x, y: x)(torch.ones(2), torch.ones(2, device="meta"))


def test_callbacks_run_in_eager_mode() -> None:
    seen: list[float] = []

    def with_callback(x: Any) -> Any:
        jax.debug.callback(lambda value: seen.append(float(value)), x.sum(), ordered=True)
        return x + 1

    assert to_torch(with_callback)(torch.ones(3)).tolist() == [2] * 3
    jax.effects_barrier()
    assert seen == [3.0]


def test_torchs_transforms() -> None:
    function, x = to_torch(swish), random_tensor(4)
    expected = torch.func.grad(lambda x: torch_swish(x).sum())
    torch.testing.assert_close(torch.func.grad(lambda x: function(x).sum())(x), expected(x))
    second = torch.func.grad(lambda x: torch.func.grad(lambda x: function(x).sum())(x).sum())
    torch.testing.assert_close(second(x), torch.func.grad(lambda x: expected(x).sum())(x))
    batch = random_tensor(3, 4)
    torch.testing.assert_close(torch.func.vmap(function)(batch), torch_swish(batch))
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(lambda x: function(x).sum()))(batch), torch.func.vmap(expected)(batch))
    product = to_torch(jnp.dot)
    torch.testing.assert_close(
        torch.func.vmap(product, in_dims=(1, None))(batch, random_tensor(3, seed=2)), batch.t() @ random_tensor(3, seed=2)
    )


# Compiled functions.


def composed(first: Callable[..., Any], second: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, w: second(first(x) @ w) + 1


def test_two_functions_are_one_program_forward_and_one_backward() -> None:
    function = composed(to_torch(swish), to_torch(lambda x: jnp.tanh(x) * 2))
    expected = composed(torch_swish, lambda x: torch.tanh(x) * 2)
    compiled = torch.compile(function, backend="dynaxla", fullgraph=True)
    x, w = random_tensor(3, 4).requires_grad_(), random_tensor(4, 5, seed=1).requires_grad_()
    metrics.reset()
    result = compiled(x, w)
    assert [metrics.counter_value(name) for name in ("graphs", "calls")] == [1, 1]
    gradients = torch.autograd.grad(result.square().sum(), (x, w))
    assert [metrics.counter_value(name) for name in ("graphs", "UncachedCompile", "calls")] == [2, 2, 2]
    torch.testing.assert_close(result, expected(x, w))
    torch.testing.assert_close(gradients, torch.autograd.grad(expected(x, w).square().sum(), (x, w)))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_other_backends_call_the_function(backend: str) -> None:
    compiled = torch.compile(composed(to_torch(swish), to_torch(jnp.tanh)), backend=backend)
    x, w = random_tensor(3, 4).requires_grad_(), random_tensor(4, 5, seed=1)
    result = compiled(x, w)
    torch.testing.assert_close(result, composed(torch_swish, torch.tanh)(x, w))
    torch.testing.assert_close(torch.autograd.grad(result.sum(), x), torch.autograd.grad(composed(torch_swish, torch.tanh)(x, w).sum(), x))


def test_captured_state_is_never_stale() -> None:
    state = {"scale": jnp.full(3, 2.0)}
    function = to_torch(lambda x: x * state["scale"])
    compiled = torch.compile(lambda x: function(x), backend="dynaxla", fullgraph=True)
    x = torch.ones(3)
    assert compiled(x).tolist() == [2] * 3
    state["scale"] = jnp.full(3, 5.0)
    assert compiled(x).tolist() == function(x).tolist() == [5] * 3
    captures = metrics.counter_value("capture")
    assert compiled(x).tolist() == [5] * 3
    assert metrics.counter_value("capture") == captures


def test_two_functions_of_one_name() -> None:
    def make_function(number: float) -> Callable[..., Any]:
        def function(x: Any) -> Any:
            return x + number

        return to_torch(function)

    functions = [make_function(1.0), make_function(2.0)]
    compiled = torch.compile(lambda x, index: functions[index](x), backend="dynaxla")
    assert [compiled(torch.zeros(2), index).tolist() for index in (0, 1)] == [[1, 1], [2, 2]]
    functions[0] = make_function(3.0)
    assert compiled(torch.zeros(2), 0).tolist() == [3, 3]


def test_numbers_and_sizes_are_part_of_the_program() -> None:
    function = to_torch(lambda x, n, *, name: jnp.sum(x, axis=0) * n + (1 if name == "one" else x.shape[0]))
    compiled = torch.compile(lambda x, n, name: function(x, n, name=name), backend="dynaxla", dynamic=True)
    for rows, n, name in ((3, 2, "one"), (5, 2, "one"), (5, 4, "one"), (5, 4, "rows"), (5, 0.5, "rows")):
        x = random_tensor(rows, 2)
        torch.testing.assert_close(compiled(x, n, name), x.sum(0) * n + (1 if name == "one" else rows))


def test_x64_is_part_of_the_program() -> None:
    compiled = torch.compile(to_torch(lambda x: x + jnp.ones(2)), backend="dynaxla")
    for x64, dtype in ((False, torch.float32), (True, torch.float64), (False, torch.float32)):
        with jax.enable_x64(x64):
            assert compiled(torch.zeros(2)).dtype == dtype


def test_function_is_part_of_a_compiled_step() -> None:
    function, weight = to_torch(swish), random_tensor(4, 4).requires_grad_()
    twin = weight.detach().clone().requires_grad_()
    optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in (weight, twin)]

    @dynaxla.compile_step(fullgraph=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = function(x @ weight).square().sum()
        loss.backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        return loss

    for number in range(3):
        x = random_tensor(2, 4, seed=number)
        loss = step(x)
        expected = torch_swish(x @ twin).square().sum()
        expected.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(weight, twin)


def test_untraceable_function_runs_between_programs() -> None:
    branching = to_torch(lambda x: x * 2 if float(x.sum()) > 0 else x)
    compiled = torch.compile(lambda x: branching(x + 1) + 1, backend="dynaxla")
    assert [compiled(torch.full((2,), number)).tolist() for number in (0.0, -3.0)] == [[3, 3], [-1, -1]]
    weight, product = jnp.full(2, 3.0), to_torch(lambda x, w: x * w)
    assert torch.compile(lambda x: product(x, weight) + 1, backend="dynaxla")(torch.ones(2)).tolist() == [4, 4]


def test_pallas_kernels() -> None:
    def double(x: Any) -> Any:
        def kernel(given: Any, result: Any) -> None:
            result[...] = given[...] * 2

        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)

    function, x = to_torch(double), random_tensor(8, 8)
    torch.testing.assert_close(function(x), x * 2)
    torch.testing.assert_close(torch.compile(lambda x: function(x) + 1, backend="dynaxla", fullgraph=True)(x), x * 2 + 1)


def test_custom_derivatives() -> None:
    @jax.custom_vjp
    def straight(x: Any) -> Any:
        return jnp.round(x)

    straight.defvjp(lambda x: (jnp.round(x), None), lambda _, cotangent: (cotangent * 3,))
    function = to_torch(straight)
    for called in (function, torch.compile(function, backend="dynaxla", fullgraph=True)):
        x = random_tensor(4).requires_grad_()
        called(x).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [3] * 4


def test_compiled_step_is_never_stale() -> None:
    state = {"scale": 2.0}
    function = to_torch(lambda x: x * state["scale"])
    step = dynaxla.compile_step(lambda x: function(x) + 1, fullgraph=True)
    x = torch.ones(3)
    for scale in (2.0, 2.0, 2.0, 5.0, 5.0):
        state["scale"] = scale
        assert step(x).tolist() == [scale + 1] * 3


def test_exceptions_of_compiled_functions_are_the_users() -> None:
    def wrong(x: Any) -> Any:
        raise ValueError("the user's error")

    with pytest.raises(ValueError, match="the user's error"):
        torch.compile(to_torch(wrong), backend="dynaxla")(torch.ones(2))
    with jax.enable_x64(False), pytest.raises(UnsupportedTensor, match="64-bit types are off"):
        torch.compile(to_torch(swish), backend="dynaxla")(torch.ones(2, dtype=torch.float64))


def test_forward_mode_is_refused() -> None:
    with pytest.raises(
        DynaxlaError, match="sin, a function that to_torch returned, does not support torch's forward-mode derivatives"
    ) as caught:
        torch.func.jvp(to_torch(jnp.sin), (torch.ones(3),), (torch.ones(3),))
    assert "torch.func.vjp" in str(caught.value)


def test_leaked_tracer_raises() -> None:
    leaked: list[jax.Array] = []

    def leaks_a_tracer(x: jax.Array) -> jax.Array:
        leaked.append(x * 2)
        return x + 1

    first, second = to_torch(leaks_a_tracer), to_torch(lambda x: x + leaked[0])
    with pytest.raises(UnsupportedTensor, match="reads a tracer") as caught:
        torch.compile(lambda x: second(first(x)), backend="dynaxla")(torch.ones(3))
    assert "return them" in caught.value.hint
