"""Tests of interop/torch_in_jax.py (`to_jax`): values and gradients are eager mode's under each transform of JAX, with 32 and 64 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest
import torch
from jax import Array, lax
from jax import numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import dynaxla
from dynaxla.errors import ArgumentError, CaptureError, OptionError, UnsupportedOp
from dynaxla.interop import to_jax, to_torch
from support import internals
from support.releases import fails_in_oldest


@pytest.fixture(params=[False, True], ids=["32 bits", "64 bits"])
def x64(request: pytest.FixtureRequest) -> Iterator[bool]:
    with jax.enable_x64(request.param):
        yield request.param


def to_array(tensor: torch.Tensor) -> Array:
    return jnp.asarray(tensor.numpy())


def close(actual: Any, expected: torch.Tensor) -> None:
    np.testing.assert_allclose(np.asarray(actual), expected.detach().numpy(), rtol=1e-4, atol=1e-4)


def gradients(module: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    module.zero_grad()
    loss.backward()
    return {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}


def all_close(actual: dict[str, Array], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        close(actual[name], gradient)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.usefixtures("x64")
def test_every_transform() -> None:
    model, x = mlp(), to_array(X)
    f, params = to_jax(model)
    close(f(params, x), model(X))
    close(jax.jit(f)(params, x), model(X))
    close(jax.vmap(f, (None, 0))(params, x), model(X))
    expected = gradients(model, (model(X) ** 2).sum())

    def loss(params: Any, x: Array) -> Array:
        return (f(params, x) ** 2).sum()

    def scanned(params: Any) -> Array:
        return lax.scan(lambda total, row: (total + loss(params, row), None), jnp.float32(0), x)[0]

    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    split = PartitionSpec("data")
    sharded = jax.shard_map(
        lambda params, x: lax.psum(loss(params, x), "data"), mesh=mesh, in_specs=(PartitionSpec(), split), out_specs=PartitionSpec()
    )
    for total in (
        lambda params: loss(params, x),
        scanned,
        lambda params: jax.checkpoint(loss)(params, x),
        lambda params: jax.vmap(loss, (None, 0))(params, x).sum(),
        lambda params: sharded(params, x),
    ):
        all_close(jax.jit(jax.grad(total))(params), expected)
    value, gradient = jax.value_and_grad(loss)(params, x)
    close(value, (model(X) ** 2).sum())
    all_close(gradient, expected)
    each = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(params, x)
    all_close({name: grads.sum(0) for name, grads in each.items()}, expected)
    along = jax.jvp(lambda params: loss(params, x), (params,), (params,))[1]
    np.testing.assert_allclose(along, sum((expected[name].numpy() * params[name]).sum() for name in params), rtol=1e-4)


class Language(nn.Module):
    """A model with tied weights, indices, keyword and static arguments, and numbers among its results."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor, *, scale: float = 1.0, labels: torch.Tensor | None = None) -> dict[str, Any]:
        logits = self.head(self.layer(self.words(tokens))) * scale
        loss = None if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"logits": logits, "loss": loss, "best": (logits.argmax(-1),), "count": tokens.shape[0]}


def test_language_model(x64: bool) -> None:
    torch.manual_seed(0)
    model, tokens = Language(), torch.randint(0, 11, (3, 6))
    f, params = to_jax(model)
    assert "head.weight" not in params
    result = f(params, to_array(tokens), scale=2.0, labels=to_array(tokens))
    expected = model(tokens, scale=2.0, labels=tokens)
    close(result["logits"], expected["logits"])
    assert result["count"] == 3
    assert result["best"][0].dtype == (jnp.int64 if x64 else jnp.int32)
    np.testing.assert_array_equal(result["best"][0], expected["best"][0].numpy())
    assert f(params, to_array(tokens))["loss"] is None
    gradient = jax.jit(jax.grad(lambda params: f(params, to_array(tokens), labels=to_array(tokens))["loss"]))(params)
    all_close(gradient, gradients(model, model(tokens, labels=tokens)["loss"]))


def test_index_out_of_range_gives_nan() -> None:
    f, params = to_jax(nn.Embedding(3, 2))
    assert np.isnan(f(params, jnp.array([1, 3]))).all()
    assert not np.isnan(f(params, jnp.array([1, 2]))).any()


def batch_norm_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5))


def test_buffers_are_arguments_and_results(x64: bool) -> None:
    model = batch_norm_model()
    f, params = to_jax(model)
    with pytest.raises(ArgumentError, match=r"changes its buffers \(1\.running_mean"):
        f(params, to_array(X))
    result, buffers = jax.jit(lambda params, buffers: f(params, to_array(X), buffers=buffers))(params, f.buffers)
    close(result, model(X))
    assert buffers.keys() == dict(model.named_buffers()).keys()
    assert buffers["1.num_batches_tracked"].dtype == (jnp.int64 if x64 else jnp.int32)
    for name, value in model.named_buffers():
        close(buffers[name], value)
    close(f(params, to_array(X), buffers=buffers)[1]["1.running_mean"], (model(X), model[1].running_mean)[1])
    assert f.buffers["1.num_batches_tracked"] == 0


def test_later_change_of_mode_is_refused() -> None:
    model = batch_norm_model()
    f, params = to_jax(model)
    f(params, to_array(X), buffers=f.buffers)
    model.eval()
    with pytest.raises(CaptureError, match="was in train mode when to_jax converted it, and is in eval mode now"):
        f(params, to_array(X), buffers=f.buffers)
    f, params = to_jax(model)
    close(f(params, to_array(X)), model(X))


def test_random_numbers_follow_from_the_key() -> None:
    f, params = to_jax(nn.Dropout(0.5))
    with pytest.raises(ArgumentError, match="draws random numbers, and was called without a key"):
        f(params, jnp.ones(100))
    with pytest.raises(ArgumentError, match="is not a key"):
        f(params, jnp.ones(100), rng=3.5)

    def draw(seed: int, x: Array) -> Array:
        return f(params, x, rng=jax.random.key(seed))

    first = draw(1, jnp.ones(100))
    assert set(np.unique(first)) == {0, 2}
    np.testing.assert_array_equal(first, jax.jit(draw)(1, jnp.ones(100)))
    assert (first != draw(2, jnp.ones(100))).any()
    value, gradient = jax.value_and_grad(lambda x: draw(1, x).sum())(jnp.ones(100))
    np.testing.assert_array_equal(gradient, first)
    assert value == first.sum()
    keys = jax.vmap(lambda key: f(params, jnp.ones(100), rng=key))(jax.random.split(jax.random.key(0), 3))
    assert len({tuple(row) for row in keys.tolist()}) == 3
    f, params = to_jax(nn.Dropout(0.5).eval())
    np.testing.assert_array_equal(f(params, jnp.ones(3)), 1)


class Sevenfold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 7 * gradient


def hooked(x: torch.Tensor) -> torch.Tensor:
    y = x.exp()
    y.register_hook(lambda gradient: gradient * 2)
    return y


def without_gradients(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = x * 3
    return y * x


@pytest.mark.quick
@pytest.mark.sample(quick=4)
@pytest.mark.parametrize(
    "function",
    [
        pytest.param(Sevenfold.apply, id="autograd.Function"),
        pytest.param(lambda x: x.detach() * x, id="detach"),
        pytest.param(without_gradients, id="no_grad"),
        pytest.param(hooked, id="hook"),
        pytest.param(lambda x: torch.relu(x - x) + x.abs() + x.clamp(0, 2), id="kinks"),
        pytest.param(lambda x: x.max() * x.amax() + x.median(), id="ties"),
        pytest.param(lambda x: torch.softmax(x, -1) * x.exp() * torch.logsumexp(x, 0), id="exp"),
        pytest.param(lambda x: x.norm() * (x - x).norm(), id="norm of zero"),
        pytest.param(lambda x: (x.sort().values * torch.arange(4.0)).cumsum(0), id="sort"),
    ],
)
def test_gradients_are_autograds(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """JAX would differentiate some of these functions differently."""
    x = torch.tensor([0.0, 1.0, 2.0, 2.0], requires_grad=True)
    function(x).sum().backward()
    f = to_jax(function)
    found = jax.jit(jax.grad(lambda x: f(x).sum()))(to_array(x.detach()))
    close(found, x.grad)
    along = jax.jvp(lambda x: f(x).sum(), (to_array(x.detach()),), (jnp.float32([1, 2, 3, 4]),))[1]
    close(along, (x.grad * torch.tensor([1.0, 2, 3, 4])).sum())


def test_gradients_of_complex_numbers_are_jaxs() -> None:
    """torch's gradients are the conjugates of JAX's."""
    z = jnp.array([1 + 2j, -0.5 + 0.25j], jnp.complex64)
    f = to_jax(lambda z: (z * z).real.sum() + 3 * z.abs().sum())

    def reference(z: Array) -> Array:
        return (z * z).real.sum() + 3 * jnp.abs(z).sum()

    np.testing.assert_allclose(jax.jit(jax.grad(f))(z), jax.grad(reference)(z), rtol=1e-5)
    np.testing.assert_allclose(jax.jvp(f, (z,), (1j * z,))[1], jax.jvp(reference, (z,), (1j * z,))[1], rtol=1e-5)
    g = to_jax(lambda z: z * z * 1j)
    expected = jax.vjp(lambda z: z * z * 1j, z)[1](z)[0]
    np.testing.assert_allclose(jax.vjp(g, z)[1](z)[0], expected, rtol=1e-5)


def test_static_arguments_are_distinguished() -> None:
    f = to_jax(lambda x, number: torch.copysign(x, torch.tensor(number)))
    assert [float(f(jnp.float32(1), number)) for number in (0.0, -0.0, 0.0)] == [1, -1, 1]
    g = to_jax(lambda x, flag: x + (1 if flag is True else 2))
    assert [float(g(jnp.float32(1), flag)) for flag in (1, True, 1)] == [3, 2, 3]


def test_no_tracer_leaks() -> None:
    f, params = to_jax(mlp())
    with jax.checking_leaks():
        jax.jit(jax.value_and_grad(lambda params: f(params, to_array(X)).sum()))(params)


def test_autocast_around_a_call_is_refused() -> None:
    f = to_jax(lambda x: x @ x)
    with torch.autocast("cpu"), pytest.raises(ArgumentError, match=r"called inside torch\.autocast"):
        f(jnp.eye(2))

    def inside(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu"):
            return x @ x

    assert to_jax(inside)(jnp.eye(2)).dtype == jnp.bfloat16


@pytest.mark.parametrize("outer", [jax.jacfwd, jax.jacrev])
@pytest.mark.parametrize("inner", [jax.jacfwd, jax.jacrev])
def test_second_derivatives(outer: Callable[..., Any], inner: Callable[..., Any]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            constant = x.exp()
        return (torch.relu(x) ** 2 * x + constant * x * x + x.detach() * x).sum()

    x = torch.tensor([-1.5, -0.5, 0.5, 2.0])
    expected = torch.autograd.functional.hessian(function, x)
    f = to_jax(function)
    close(outer(inner(f))(to_array(x)), expected)
    close(jax.jit(outer(inner(f)))(to_array(x)), expected)


def test_gradient_of_batched_second_derivatives() -> None:
    """The loss of a differential equation: second derivatives by sample, and their gradient with respect to parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    f, params = to_jax(model)

    def loss(params: Any) -> Array:
        return (jax.vmap(jax.hessian(lambda x: f(params, x[None])[0, 0]))(to_array(X))[:, 0, 0] ** 2).sum()

    x = X.clone().requires_grad_()
    (first,) = torch.autograd.grad(model(x)[:, 0].sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
    expected = torch.autograd.grad((second[:, 0] ** 2).sum(), list(model.parameters()), materialize_grads=True)
    result = jax.jit(jax.grad(loss))(params)
    for (name, _), gradient in zip(model.named_parameters(), expected, strict=True):
        close(result[name], gradient)


def test_second_derivatives_that_are_zero() -> None:
    x = jnp.ones(2)
    np.testing.assert_array_equal(jax.hessian(to_jax(lambda x: (x * x.detach()).sum()))(x), np.zeros((2, 2)))
    np.testing.assert_array_equal(jax.hessian(to_jax(lambda x: x.sum()))(x), np.zeros((2, 2)))


def test_second_derivative_of_dropout_keeps_its_mask() -> None:
    f = to_jax(lambda x: (torch.nn.functional.dropout(x, 0.5) ** 3).sum())
    x, key = jnp.arange(1.0, 33.0), jax.random.key(3)
    gradient = jax.grad(lambda x: f(x, rng=key))(x)
    second = jax.hessian(lambda x: f(x, rng=key))(x)
    np.testing.assert_allclose(second, np.diag(np.where(gradient != 0, 48 * x, 0)), rtol=1e-6)
    assert 0 < np.count_nonzero(gradient) < 32

    added = to_jax(lambda x: (x**3 + torch.rand_like(x)).sum())  # the gradient does not depend on the random numbers
    np.testing.assert_allclose(jax.hessian(lambda x: added(x, rng=key))(x), np.diag(6 * x), rtol=1e-6)


def test_linear_algebra_with_checks() -> None:
    """torch keeps the check of `inv` by an effect token, which is no operand of the JAX function."""
    f = to_jax(lambda x: (torch.linalg.inv(x) ** 2).sum())
    x = torch.tensor([[2.0, 1.0], [0.5, 3.0]])
    close(f(to_array(x)), (torch.linalg.inv(x) ** 2).sum())
    close(jax.grad(f)(to_array(x)), torch.func.grad(lambda x: (torch.linalg.inv(x) ** 2).sum())(x))
    assert np.isnan(f(jnp.zeros((2, 2))))
    assert np.isnan(jax.value_and_grad(f)(jnp.zeros((2, 2)))[0])


def test_module_hooks_run() -> None:
    model = mlp()
    model[0].register_forward_hook(lambda _module, _inputs, output: output * 2)
    model[2].register_full_backward_hook(lambda _module, inputs, _outputs: (inputs[0] * 3,))
    f, params = to_jax(model)
    close(f(params, to_array(X)), model(X))
    all_close(jax.grad(lambda params: f(params, to_array(X)).sum())(params), gradients(model, model(X).sum()))


def test_hooks_of_parameters_are_refused() -> None:
    model = mlp()
    model[0].weight.register_hook(lambda gradient: gradient * 0)
    with pytest.raises(CaptureError, match=r"0\.weight has a hook"):
        to_jax(model)


class Pair(NamedTuple):
    first: Any
    second: Any


@pytest.mark.quick
def test_structures_and_methods() -> None:
    model = Language()

    def function(pair: Any, *, names: dict[str, Any]) -> Any:
        return Pair([pair.first + names["a"]], (pair.second, None, "text"))

    result = to_jax(function)(Pair(jnp.ones(2), jnp.zeros(1)), names={"a": jnp.ones(2)})
    assert isinstance(result, Pair)
    assert result.first[0].tolist() == [2, 2]
    assert result.second[1:] == (None, "text")
    f, params = to_jax(model.words, method="forward")
    close(f(params, jnp.array([1, 2])), model.words.weight[1:3])


@pytest.mark.quick
def test_inputs_are_never_written() -> None:
    x = jnp.ones(3)
    assert to_jax(lambda x: x.add_(1))(x).tolist() == [2, 2, 2]
    assert x.tolist() == [1, 1, 1]


@pytest.mark.quick
@pytest.mark.sample(quick=1)
def test_dtypes(x64: bool) -> None:
    f, params = to_jax(mlp(), dtype=jnp.bfloat16)
    assert f(params, to_array(X).astype(jnp.bfloat16)).dtype == jnp.bfloat16
    with pytest.raises(OptionError, match="not a floating-point dtype"):
        to_jax(mlp(), dtype=jnp.int32)
    assert to_jax(lambda x: x.argmax())(jnp.ones(3)).dtype == (jnp.int64 if x64 else jnp.int32)
    assert to_jax(lambda x: x.double() / 3)(jnp.ones(3, jnp.float32)).dtype == (jnp.float64 if x64 else jnp.float32)
    if x64:
        f, params = to_jax(mlp().double())
        assert jax.grad(lambda params: f(params, to_array(X.double())).sum())(params)["0.weight"].dtype == jnp.float64
    else:
        with pytest.raises(OptionError, match="is float64, and JAX's 64-bit types are off here"):
            to_jax(mlp().double())
        weak = to_jax(lambda x: x + 1)(jnp.asarray(1.0))
        assert not weak.weak_type
        wide = to_jax(lambda x: (x * 2**40 + 1) - x * 2**40)  # intermediate values need 64 bits
        assert jax.jit(wide)(jnp.array([3])).tolist() == [1]
        gradient = jax.grad(lambda x: to_jax(lambda x: (x.double() ** 2).sum())(x))(jnp.float32([3]))
        assert gradient.dtype == jnp.float32
        assert gradient.tolist() == [6]


@pytest.mark.parametrize("dtype", [np.int32, np.bool_, np.complex64])
def test_parameter_of_another_kind_of_dtype_is_refused(dtype: Any) -> None:
    """torch's modules cannot compute with it, and JAX has no gradient of it."""
    f, params = to_jax(mlp())
    with pytest.raises(ArgumentError, match=r"0\.weight of Sequential has the dtype .*float32") as caught:
        jax.jit(f)({**params, "0.weight": jnp.ones((8, 4), dtype)}, to_array(X))
    assert "astype" in caught.value.hint
    half = f({name: value.astype(jnp.bfloat16) for name, value in params.items()}, to_array(X).astype(jnp.bfloat16))
    assert half.dtype == jnp.bfloat16


def test_memory_is_copied_or_shared() -> None:
    model = nn.Linear(64, 64)
    _, copied = to_jax(model)
    _, shared = to_jax(model, share=True)
    addresses = copied["weight"].unsafe_buffer_pointer(), shared["weight"].unsafe_buffer_pointer()
    assert addresses[1] == model.weight.data_ptr() != addresses[0]


def test_wrong_parameters_are_refused() -> None:
    f, params = to_jax(mlp())
    for given, message in (
        ({}, "lack 0.weight, 0.bias"),
        ({**params, "more": params["0.bias"]}, "have more, which it does not have"),
        ({**params, "0.bias": jnp.ones(3)}, r"\['0.bias'\] of Sequential is of shape \[3\], and the module needs shape \[8\]"),
        (list(params.values()), "are a list"),
        ({**params, "0.bias": torch.ones(8)}, r"\['0.bias'\] of Sequential is a Tensor"),
    ):
        with pytest.raises(ArgumentError, match=message):
            f(given, to_array(X))
    with pytest.raises(ArgumentError, match="was called with a torch tensor"):
        f(params, X)


def branching(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return x
    return -x


@pytest.mark.parametrize("function", [branching, lambda x: x[x > 0], lambda x: x * x.sum().item(), torch.nonzero])
def test_reads_of_values_are_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(CaptureError, match="depends on the values of a tensor") as caught:
        to_jax(function)(jnp.ones(3))
    assert function is torch.nonzero or "test_torch_in_jax.py" in caught.value.where


def test_op_without_lowering_is_refused() -> None:
    with pytest.raises(UnsupportedOp, match="linalg_eig"):
        to_jax(torch.linalg.eigvals)(jnp.eye(3))


def test_parameters_of_another_module_are_refused() -> None:
    model = mlp()
    with pytest.raises(CaptureError, match="reads a parameter that is not among its arguments"):
        to_jax(lambda x: model(x))(to_array(X))


def test_tensors_stored_in_the_module_are_refused() -> None:
    class StoresTensor(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = x + 1
            return self.last

    model = StoresTensor()
    f, params = to_jax(model)
    with pytest.raises(CaptureError, match="keeps a tensor as its attribute last"):
        f(params, jnp.ones(2))
    assert not hasattr(model, "last")


class CachesTensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.cache: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "twice" not in self.cache:
            self.cache["twice"] = self.weight * 2
        return x * self.cache["twice"]


# torch warns when it creates a fake tensor for a tensor with a gradient.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_caches_of_tensors_are_refused() -> None:
    """An empty cache has no values during a trace. At the tensors of a full cache, the gradient would end."""
    model = CachesTensor()
    f, params = to_jax(model)
    with pytest.raises(CaptureError, match="keeps a tensor in its attribute cache"):
        f(params, jnp.ones(2))
    assert model.cache == {}
    model(torch.ones(2))
    with pytest.raises(CaptureError, match="a tensor with requires_grad that is not among its arguments") as caught:
        jax.grad(lambda params: f(params, jnp.ones(2)).sum())(params)
    assert "test_torch_in_jax.py" in caught.value.where


@fails_in_oldest("its tracer raises another error")
def test_tensors_of_an_earlier_trace_are_refused() -> None:
    stored: list[torch.Tensor] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        stored.append(x)
        return x * stored[0]

    with pytest.raises(CaptureError, match="an earlier trace has stored") as caught:
        to_jax(function)(jnp.ones(2))
    assert "test_torch_in_jax.py" in caught.value.where


FACTOR: Any = 2.0


def helper(x: torch.Tensor) -> torch.Tensor:
    return x * FACTOR


@dataclass
class Settings:
    factor: float


class ScaleFunction:
    def __init__(self) -> None:
        self.factor = 2.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner: nn.Module = nn.Linear(3, 3)
        self.factor = 2.0
        self.constant = torch.ones(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.factor * self.constant


def check_never_stale(f: Callable[..., Any], function: Callable[..., Any], *changes: Callable[[], Any]) -> None:
    """Asserts that after each change the converted function returns eager PyTorch's results."""
    x = torch.tensor([1.0, 2.0, 3.0])
    results = [function(x).tolist()]
    close(f(to_array(x)), function(x))
    for change in changes:
        change()
        close(f(to_array(x)), function(x))
        results.append(function(x).tolist())
        assert results[-1] != results[-2]


def test_captured_values_are_never_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    check_never_stale(to_jax(helper), helper, lambda: monkeypatch.setitem(globals(), "FACTOR", 3.0))
    check_never_stale(to_jax(lambda x: helper(x)), lambda x: helper(x), lambda: monkeypatch.setitem(globals(), "helper", lambda x: x * 5))
    entries, rows, settings, method = {"a": 2.0}, [2.0], Settings(2.0), ScaleFunction()

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * entries["a"] + rows[0] * settings.factor + method(x)

    check_never_stale(
        to_jax(function),
        function,
        lambda: entries.update(a=3.0),
        lambda: rows.__setitem__(0, 3.0),
        lambda: setattr(settings, "factor", 3.0),
        lambda: setattr(method, "factor", 3.0),
        lambda: setattr(function, "__code__", (lambda x: (entries, rows, settings, method, x * 7)[-1]).__code__),
    )


def test_captured_tensors_are_never_stale() -> None:
    constant = torch.ones(3)

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * constant

    def rebind() -> None:
        nonlocal constant
        constant = torch.full((3,), 9.0)

    check_never_stale(
        to_jax(function), function, lambda: constant.mul_(2), lambda: setattr(constant, "data", torch.full((3,), 7.0)), rebind
    )


def test_state_of_a_module_is_never_stale() -> None:
    model = Scaled()
    f, params = to_jax(model)

    check_never_stale(
        lambda x: f(params, x),
        model,
        lambda: setattr(model, "factor", 3.0),
        lambda: model.constant.mul_(2),
        lambda: model.inner.register_forward_hook(lambda _module, _inputs, output: output * 2),
        lambda: setattr(model, "forward", lambda x: model.inner(x) * 11),
    )


def test_torchs_settings_are_never_stale() -> None:
    f = to_jax(lambda x: x + torch.ones(3, dtype=torch.float32) / torch.tensor(3.0).element_size())
    close(f(jnp.ones(3)), torch.full((3,), 1.25))
    torch.set_default_dtype(torch.float64)
    try:
        close(f(jnp.ones(3)), torch.full((3,), 1.125))
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_derivative_after_a_change_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX caches the trace, and asks for its derivative later."""
    table = torch.tensor([1.0, 2.0, 3.0])

    def function(x: torch.Tensor) -> torch.Tensor:
        return helper(x) * table * torch.tensor([1.0, 1.0, 2.0])

    def branching(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, helper, lambda x: x * table, (x,))

    def multiply(number: float) -> Callable[[], None]:
        return lambda: monkeypatch.setitem(globals(), "FACTOR", number)

    for changed, change in (
        (function, multiply(3.0)), (function, lambda: table.mul_(2)), (branching, multiply(4.0)), (branching, lambda: table.mul_(2)),
    ):  # fmt: skip
        f = jax.jit(to_jax(changed))
        f(jnp.ones(3))
        change()
        with pytest.raises(CaptureError, match="has changed since JAX traced the function"):
            jax.grad(lambda x, f=f: f(x).sum())(jnp.ones(3))


class AllEqualMode(TorchDispatchMode):
    """A mode in which all tensors compare as equal."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return True if func is torch.ops.aten.equal.default else func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [AllEqualMode, FakeTensorMode, lambda: FakeTensorMode(allow_non_fake_inputs=True)])
def test_modes_do_not_affect_a_derivative(mode: Callable[[], Any]) -> None:
    """The derivative compares the cached trace with a new one. A mode must not affect the comparison."""
    holder = {"table": torch.tensor([1.0, 2.0, 3.0])}
    f, other = (jax.jit(to_jax(lambda x: x * holder["table"] * torch.tensor([1.0, 1.0, 2.0]))) for _ in range(2))
    f(jnp.ones(3)), other(jnp.ones(3))
    holder["table"] = torch.tensor([1.0, 2.0, 3.0])
    with mode():
        np.testing.assert_array_equal(jax.grad(lambda x: f(x).sum())(jnp.ones(3)), [1.0, 2.0, 6.0])
        np.testing.assert_array_equal(jax.grad(lambda x: to_jax(lambda x: x * 2)(x).sum())(jnp.ones(3)), [2.0, 2.0, 2.0])
    holder["table"] = torch.tensor([1.0, 2.0, 4.0])
    with mode(), pytest.raises(CaptureError, match="has changed since JAX traced the function"):
        jax.grad(lambda x: other(x).sum())(jnp.ones(3))


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.weight * torch.tensor([1.0, 2.0])


def test_derivative_after_a_change_that_the_program_does_not_read() -> None:
    f, params = to_jax(Counting())
    step = jax.jit(f)
    step(params, jnp.ones(2))
    gradient = jax.grad(lambda params: step(params, jnp.ones(2)).sum())(params)
    close(gradient["weight"], torch.tensor([1.0, 2.0]))


def test_unchanged_state_causes_no_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    walks = internals.object_walks(monkeypatch)
    model = Scaled()
    f, params = to_jax(model)
    nested = to_jax(to_torch(lambda x: x * FACTOR))
    for _ in range(3):
        f(params, jnp.ones(3))
    assert len(walks) == 1
    with torch.no_grad():
        model.inner.weight.mul_(2)  # parameters are arguments of a call
    f(params, jnp.ones(3))
    assert len(walks) == 1
    for _ in range(3):
        nested(jnp.ones(3))
    count = len(walks)
    nested(jnp.ones(3))
    assert len(walks) == count


def test_writes_to_captured_tensors_are_refused() -> None:
    captured = torch.zeros(3)
    with pytest.raises(CaptureError, match="to a tensor that is not among its arguments") as caught:
        to_jax(lambda x: captured.add_(1) + x)(jnp.ones(3))
    assert "test_torch_in_jax.py" in caught.value.where
    assert captured.tolist() == [0.0] * 3


def test_writes_that_would_be_lost_are_refused() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        y.unfold(0, 1, 2).mul_(0)  # elements between the windows would become zero, too
        return y

    assert function(torch.ones(5)).tolist() == [0, 1, 0, 1, 0]
    with pytest.raises(CaptureError, match="unfold") as caught:
        to_jax(function)(jnp.ones(5))
    assert "test_torch_in_jax.py" in caught.value.where


def test_array_given_twice_becomes_two_tensors() -> None:
    f, x = to_jax(lambda x, y: x.add_(1) + y), jnp.ones(3)
    expected = torch.ones(3).add_(1) + torch.ones(3)
    close(f(x, x), expected)
    close(jax.jit(lambda x: f(x, x))(x), expected)
    close(jax.grad(lambda x: f(x, x).sum())(x), torch.full((3,), 2.0))
    close(x, torch.ones(3))


def test_functions_of_torch_compile() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 2

    f, x = to_jax(torch.compile(function, backend="dynaxla")), torch.ones(3)
    close(jax.jit(f)(to_array(x)), function(x))
    close(jax.vmap(f)(to_array(x)), function(x))
    close(jax.grad(lambda x: f(x).sum())(to_array(x)), 2 * x.cos())
    model = mlp()
    f, params = to_jax(torch.compile(model, backend="dynaxla"))
    assert params.keys() == dict(model.named_parameters()).keys()
    close(f(params, to_array(X)), model(X))


def test_to_jax_is_public() -> None:
    assert dynaxla.to_jax is to_jax


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_optax_and_torchs_optimizer_give_the_same_losses(name: str) -> None:
    model = batch_norm_model()
    f, params = to_jax(model)
    targets = torch.randn(6, 5, generator=torch.Generator().manual_seed(2))
    ours = {"sgd": optax.sgd(0.1, momentum=0.9), "adamw": optax.adamw(1e-2, weight_decay=0.1)}[name]
    parameters = model.parameters()
    theirs = torch.optim.SGD(parameters, 0.1, momentum=0.9) if name == "sgd" else torch.optim.AdamW(parameters, 1e-2, weight_decay=0.1)

    @jax.jit
    def step(params: Any, buffers: Any, state: Any) -> Any:
        def loss(params: Any) -> Any:
            out, updated = f(params, to_array(X), buffers=buffers)
            return jnp.square(out - to_array(targets)).mean(), updated

        (value, buffers), gradient = jax.value_and_grad(loss, has_aux=True)(params)
        updates, state = ours.update(gradient, state, params)
        return optax.apply_updates(params, updates), buffers, state, value

    buffers, state, losses, expected = f.buffers, ours.init(params), [], []
    for _ in range(20):
        params, buffers, state, value = step(params, buffers, state)
        losses.append(float(value))
        theirs.zero_grad()
        loss = (model(X) - targets).square().mean()
        loss.backward()
        theirs.step()
        expected.append(loss.item())
    np.testing.assert_allclose(losses, expected, rtol=1e-3)
    assert losses[-1] < losses[0]
    close(buffers["1.running_mean"], model[1].running_mean)
