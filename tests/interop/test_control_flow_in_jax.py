"""`to_jax` of functions of which TorchDynamo captures parts: torch's control flow, checkpoints, compiled functions."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax import numpy as jnp
from torch import nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.utils.checkpoint import checkpoint

import dynaxla
from dynaxla.errors import ArgumentError, CaptureError, UnsupportedOp
from dynaxla.interop import to_jax
from support.releases import fails_in_oldest

# Warnings of torch: TorchDynamo reads gradients of captured tensors, and torch.export uses a deprecated check of trees.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning"),
]

X = torch.tensor([1.0, 2.0, -0.5])
FACTOR = torch.tensor([2.0, 3.0, 4.0])


def cond(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda x: x.sin() * FACTOR, lambda x: x * 2, (x,))


def constant(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda x: x.sin() * torch.tensor([2.0, 1.0, 3.0]), lambda x: x * 2, (x,))


def nested(x: torch.Tensor) -> torch.Tensor:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x[0] > 1.5, lambda x: x.cos(), lambda x: x * 3, (x,))

    return torch.cond(x.sum() > 0, inner, lambda x: x.exp(), (x * 2,))


def looped(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return while_loop(lambda x: x.norm() < 50, lambda x: (x * 1.5,), (x,))[0]


def counted(x: torch.Tensor) -> torch.Tensor:
    return while_loop(lambda count, x: count < 3, lambda count, x: (count + 1, x.sin()), (torch.tensor(0), x.detach()))[1]


def scanned(x: torch.Tensor) -> Any:
    return scan(lambda total, x: (total + x.sin(), total * x), torch.zeros(()), x)


def mapped(x: torch.Tensor) -> torch.Tensor:
    return torch_map(lambda row, x: row.sin() * x, x.outer(x), x)


compiled = torch.compile(lambda x: x.sin() * 2, backend="eager")
compiled_cond = torch.compile(cond, backend="eager")


def eager(function: Callable[..., Any], x: torch.Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of control flow outside of compiled code
        return function(x)


def close(actual: Any, expected: Any) -> None:
    for mine, theirs in zip(jax.tree.leaves(actual), torch.utils._pytree.tree_leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(mine), theirs.detach().numpy(), rtol=1e-4, atol=1e-5)


def total(result: Any) -> Any:
    return sum((leaf**2).sum() for leaf in torch.utils._pytree.tree_leaves(result))


@pytest.mark.sample(usual=2)
@pytest.mark.parametrize(
    "function",
    [
        cond,
        nested,
        scanned,
        mapped,
        lambda x: associative_scan(lambda a, b: a * b, x, 0, combine_mode="generic"),
        lambda x: checkpoint(lambda x: x.sin() * FACTOR, x, use_reentrant=False),
        torch.vmap(lambda x: x.sin() * 2),
        torch.func.grad(lambda x: x.sin().sum()),
        compiled,
        compiled_cond,
    ],
    ids=["cond", "nested", "scan", "map", "associative scan", "checkpoint", "vmap", "grad", "compiled", "compiled cond"],
)
def test_every_transform(function: Callable[..., Any]) -> None:
    f = to_jax(function)
    rows = [X, -X, 2 * X]
    xs = jnp.stack([jnp.asarray(row.numpy()) for row in rows])
    results, gradients = [], []
    for row in rows:
        tensor = row.clone().requires_grad_()
        results.append(eager(function, tensor))
        gradients.append(torch.autograd.grad(total(results[-1]), tensor)[0])
    expected = [torch.stack(pieces) for pieces in zip(*map(torch.utils._pytree.tree_leaves, results), strict=True)]
    close(f(xs[1]), results[1])
    close(jax.jit(f)(xs[0]), results[0])
    close(jax.jit(jax.vmap(f))(xs), expected)
    gradient = jax.jit(jax.grad(lambda x: total(f(x))))
    close(gradient(xs[0]), gradients[0])
    close(jax.vmap(gradient)(xs), torch.stack(gradients))


@pytest.mark.parametrize("function", [looped, counted])
def test_loops_without_gradient(function: Callable[..., Any]) -> None:
    f, x = to_jax(function), jnp.asarray(X.numpy())
    close(f(x), eager(function, X))
    close(jax.jit(f)(-x), eager(function, -X))
    close(jax.vmap(f)(jnp.stack([x, 3 * x])), torch.stack([eager(function, X), eager(function, 3 * X)]))
    close(jax.grad(lambda x: f(x).sum())(x), torch.zeros(3))


class Gate(nn.Module):
    """Its branches read a parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0, 3.0, 4.0]))
        self.register_buffer("offset", torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin() * self.weight, lambda x: x * self.offset + self.weight, (x,))


def test_constants_of_a_branch() -> None:
    for x in (X, -X):
        close(to_jax(constant)(jnp.asarray(x.numpy())), eager(constant, x))


def test_branches_over_parameters() -> None:
    model = Gate()
    f, params = to_jax(model)
    for x in (X, -X):
        expected = eager(model, x)
        close(jax.jit(f)(params, jnp.asarray(x.numpy())), expected)
        gradient = jax.jit(jax.grad(lambda params, x: (f(params, x) ** 2).sum()))(params, jnp.asarray(x.numpy()))
        close(gradient["weight"], torch.autograd.grad((expected**2).sum(), model.weight)[0])


@pytest.mark.parametrize("function", [cond, nested, looped], ids=["cond", "nested", "while_loop"])
def test_control_flow_is_exported(function: Callable[..., Any]) -> None:
    exported = dynaxla.export(function, (X,), platforms=["cpu"])
    for x in (X, -X):
        close(exported.call(x.numpy()), eager(function, x))


@fails_in_oldest("it guards a function inside a traced one by a count that tracing changes")
def test_inner_compiled_function_causes_no_warning() -> None:
    @torch.compile(backend="eager")
    def inner(x: torch.Tensor) -> torch.Tensor:
        return x.cos() * 3

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        close(to_jax(lambda x: inner(x) + 1)(jnp.asarray(X.numpy())), X.cos() * 3 + 1)
    assert not [warning for warning in caught if issubclass(warning.category, UserWarning)]


PARAMETER = nn.Parameter(torch.ones(3))


def with_a_branch(branch: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    def function(x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, branch, lambda x: x * 2, (x,))

    return function


def branch_on_value(x: torch.Tensor) -> torch.Tensor:
    return x if x.sum() > 3 else x + 1  # the line that the error names


@pytest.mark.parametrize(
    ("branch", "message", "line"),
    [
        (branch_on_value, "Data-dependent branching", "in branch_on_value"),
        (lambda x: x.sum(), "expected same dim", "in function"),
        (lambda x: x[x > 0].sum() * x, "depends on the values", "test_control_flow_in_jax.py"),
        (lambda x: x * PARAMETER, "reads a parameter that is not among its arguments", "test_control_flow_in_jax.py"),
        (lambda x: x + FACTOR.add_(1), "input mutation", "in function"),
    ],
)
def test_errors_name_the_line(branch: Callable[..., Any], message: str, line: str) -> None:
    with pytest.raises(CaptureError, match=message) as caught:
        to_jax(with_a_branch(branch))(jnp.ones(3))
    assert line in caught.value.where
    assert caught.value.hint
    assert FACTOR.tolist() == [2.0, 3.0, 4.0]


def test_random_branch_needs_a_key() -> None:
    f = to_jax(with_a_branch(lambda x: x + torch.rand_like(x)))
    with pytest.raises(ArgumentError, match="was called without a key") as caught:
        f(jnp.ones(3))
    assert "test_control_flow_in_jax.py" in caught.value.where
    assert not np.array_equal(f(jnp.ones(3), rng=jax.random.key(0)), f(jnp.ones(3), rng=jax.random.key(1)))
    np.testing.assert_array_equal(f(-jnp.ones(3), rng=jax.random.key(0)), [-2.0, -2.0, -2.0])


def test_unsupported_loops_are_refused() -> None:
    with pytest.raises(UnsupportedOp, match="no_grad"):
        to_jax(lambda x: while_loop(lambda x: x.sum() < 9, lambda x: (x * 2,), (x,)))(jnp.ones(3))
    with pytest.raises(CaptureError, match=r"carry torch\.tensor\(0\)"):
        to_jax(lambda x: while_loop(lambda i, x: x.sum() < 9, lambda i, x: (i + 1, x * 2), (0, x.detach())))(jnp.ones(3))


NUMBER: Any = 2.0


def test_state_that_branches_read_is_never_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured tensor, and a number, which TorchDynamo treats as dynamic after its first change."""
    table = torch.tensor([1.0, 2.0, 3.0])
    f = to_jax(with_a_branch(lambda x: x * table * NUMBER))
    for number in (2.0, 3.0, 4.0, 5):
        monkeypatch.setitem(globals(), "NUMBER", number)
        table.mul_(2)
        close(f(jnp.ones(3)), table * number)
