"""Random numbers: reproducible with torch.manual_seed, different in each call, and with ATen's distributions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dynaxla.errors import LoweringError
from support.comparisons.compare import aliases, assert_equal, check
from support.comparisons.single_op import run_op

HALF = [torch.float16, torch.bfloat16]
FLOATS = [*HALF, torch.float32, torch.float64]
N = 20_000


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend="dynaxla", fullgraph=True, **options)


def assert_same_distribution(mine: torch.Tensor, theirs: torch.Tensor) -> None:
    """The two-sample Kolmogorov-Smirnov statistic is below the bound that equal distributions exceed in 1 of 10,000 cases."""
    a, b = mine.double().flatten().sort().values, theirs.double().flatten().sort().values
    points = torch.cat([a, b])
    left = torch.searchsorted(a, points, right=True) / len(a)
    right = torch.searchsorted(b, points, right=True) / len(b)
    bound = 2.23 * ((len(a) + len(b)) / (len(a) * len(b))) ** 0.5
    assert (left - right).abs().max() < bound


def draw_all(x: torch.Tensor) -> list[torch.Tensor]:
    return [
        torch.rand(3, 4),
        torch.rand(2, dtype=torch.float64),
        torch.rand_like(x),
        torch.rand_like(x, dtype=torch.float16),
        torch.randn(3, 4),
        torch.randn((), dtype=torch.bfloat16),
        torch.randn(3, dtype=torch.complex64),
        torch.rand(3, dtype=torch.complex64),
        torch.randn_like(x),
        torch.randint(10, (5,)),
        torch.randint(-3, 9, (2, 2), dtype=torch.int32),
        torch.randint(0, 4, (3,), dtype=torch.float32),
        torch.randint_like(x, 7),
        torch.randint_like(x, -7, 7, dtype=torch.int8),
        torch.randint(-(2**62), 2**62, (3,)),
        torch.randperm(9),
        torch.randperm(0),
        torch.randperm(5, dtype=torch.int32),
        torch.bernoulli(x.sigmoid()),
        torch.bernoulli(x, 0.3),
        x.clone().bernoulli_(0.7),
        x.clone().bernoulli_(x.sigmoid()),
        x.clone().uniform_(-1, 3),
        x.clone().normal_(5, 2),
        torch.normal(x, 2.0),
        torch.normal(0.5, x.abs()),
        torch.normal(x, x.abs()),
        torch.normal(0.0, 1.0, (2, 5)),
        x.clone().exponential_(2.0),
        x.clone().geometric_(0.3),
        x.clone().log_normal_(0.1, 0.5),
        x.clone().cauchy_(1, 2),
        torch.poisson(x.abs() * 4),
        torch.multinomial(x.abs(), 2),
        torch.multinomial(x[0].abs(), 5, replacement=True),
        torch.ops.aten.random.to(x.long(), 5),
        torch.ops.aten.random(x),
        torch._standard_gamma(x.abs() + 1),
        F.dropout(x, 0.4),
        F.dropout1d(x, 0.4),
        torch.empty(0, 3).uniform_(),
        torch.rand(4, 0),
    ]


def test_strides_are_kept() -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        like = [torch.rand_like(x), torch.randn_like(x), torch.randint_like(x, 5), torch.bernoulli(x.sigmoid()), F.dropout(x, 0.2)]
        return [*like, x.clone().uniform_(), x.clone().normal_(), x.clone().exponential_()]

    # For torch.normal with a tensor as std, poisson and bernoulli_(p), PyTorch's fake tensors have other strides than its kernels.
    check(function, torch.randn(4, 3).t(), values=False, calls=1)


def test_metadata_matches_eager_mode_and_the_seed_repeats_draws() -> None:
    function = compiled(draw_all, options={"fallback": "error"})
    x = torch.randn(3, 4)
    before = x.clone()
    torch.manual_seed(7)
    first, second = function(x), function(x)
    expected = draw_all(x)
    assert_equal(first, expected, values=False)
    assert_equal(x, before)
    assert aliases([x], first) == aliases([x], expected)
    torch.manual_seed(7)
    again = function(x)
    assert_equal(again, first, tolerance=(0, 0))
    is_different = [not torch.equal(a, b) for a, b in zip(first, second, strict=True)]
    assert sum(is_different) > 0.8 * len(is_different)


def test_draws_of_one_program_differ() -> None:
    a, b, c = compiled(lambda: (torch.rand(50), torch.rand(50), torch.rand(50)))()
    assert not torch.equal(a, b)
    assert not torch.equal(b, c)


@pytest.mark.sample(usual=1)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_distributions(dtype: torch.dtype) -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        return [
            torch.rand_like(x),
            torch.randn_like(x),
            x.clone().uniform_(-2, 5),
            x.clone().normal_(3, 0.5),
            x.clone().exponential_(0.5),
            x.clone().geometric_(0.2),
            x.clone().log_normal_(0, 0.3),
            x.clone().cauchy_(1, 3),
            torch.normal(torch.arange(4, dtype=dtype).repeat(N // 4), 0.1),
            torch.poisson(x + 3),
            torch.poisson(x + 30),
            torch._standard_gamma((x + 2.5).float()),
            torch.ops.aten.random(x),
            torch.bernoulli(x + 0.3),
        ]

    x = torch.zeros(N, dtype=dtype)
    for mine, theirs in zip(compiled(function)(x), function(x), strict=True):
        assert mine.dtype == theirs.dtype
        assert_same_distribution(mine, theirs)


def test_distributions_of_prims() -> None:
    kind = {"dtype": torch.float32, "device": torch.device("cpu")}
    normal = run_op(torch.ops.prims.normal.default, [N], mean=2.0, std=0.5, requires_grad=False, **kind)
    assert_same_distribution(normal, torch.randn(N) * 0.5 + 2)
    uniform = run_op(torch.ops.prims.uniform.default, [N], low=-2.0, high=5.0, stride=[1], **kind)
    assert_same_distribution(uniform, torch.rand(N) * 7 - 2)


def test_normal_functional() -> None:
    drawn = run_op(torch.ops.aten.normal_functional.default, torch.zeros(N), 2.0, 0.5)
    assert_same_distribution(drawn, torch.randn(N) * 0.5 + 2)


def test_bounds() -> None:
    uniform, narrow, half, exponential, integers = compiled(
        lambda: (
            torch.rand(100_000),
            torch.rand(100_000, dtype=torch.bfloat16),
            torch.rand(100_000, dtype=torch.float16),
            torch.empty(100_000).exponential_(),
            torch.randint(-3, 4, (100_000,)),
        )
    )()
    for drawn in (uniform, narrow, half):
        assert 0 <= drawn.min() < 0.01
        assert 0.99 < drawn.max() < 1
    assert exponential.min() > 0
    assert integers.unique().tolist() == [-3, -2, -1, 0, 1, 2, 3]
    counts = integers.add(3).bincount()
    assert (counts / 100_000 - 1 / 7).abs().max() < 0.01


def test_integers_of_wide_ranges() -> None:
    wide, low, half = compiled(
        lambda: (torch.randint(-(2**62), 2**62, (N,)), torch.randint(0, 2**40, (N,)), torch.randint(0, 3, (N,), dtype=torch.int8))
    )()
    assert_same_distribution(wide, torch.randint(-(2**62), 2**62, (N,)))
    assert_same_distribution(low, torch.randint(0, 2**40, (N,)))
    assert_same_distribution(half, torch.randint(0, 3, (N,)))


@pytest.mark.sample(usual=3)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_dropout(dtype: torch.dtype, p: float) -> None:
    """The mask, the scale and the gradient are consistent."""
    x = (torch.rand(100, 200) + 1).to(dtype).requires_grad_()
    out, mask = compiled(lambda x: torch.native_dropout(x, p, True))(x)
    assert mask.dtype == torch.bool
    assert abs(mask.float().mean() - (1 - p)) < 0.02
    expected = (x.detach().to(torch.promote_types(dtype, torch.float32)) * mask * (0 if p == 1 else 1 / (1 - p))).to(dtype)
    assert_equal(out.detach(), expected, tolerance=(0, 0))
    out.sum().backward()
    scale = torch.tensor(0 if p == 1 else 1 / (1 - p), dtype=dtype)
    assert_equal(x.grad, mask.to(dtype) * scale)


def test_dropout_in_a_graph() -> None:
    x = torch.ones(64, 64, requires_grad=True)

    def function(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.25) + F.alpha_dropout(x, 0.5, training=False) + F.dropout(x, 0.5, training=False)

    out = compiled(function)(x)
    assert_equal(out.detach().unique(), torch.tensor([2.0, 2 + 1 / 0.75]))
    out.sum().backward()
    assert_equal(x.grad, out.detach(), tolerance=(1e-6, 1e-6))


@pytest.mark.parametrize("train", [True, False])
def test_native_dropout_train(train: bool) -> None:
    out, mask = compiled(lambda x: torch.native_dropout(x, 0.5, train))(torch.ones(1000))
    assert mask.dtype == torch.bool
    assert mask.all().item() is not train
    assert_equal(out, mask.float() * (2.0 if train else 1.0))


def test_native_dropout_without_a_train_flag_raises() -> None:
    """PyTorch's fake tensors treat None as False, its kernels as True."""
    with pytest.raises(LoweringError, match="train=None"):
        compiled(lambda x: torch.native_dropout(x, 0.5, None))(torch.ones(10))


def test_fused_dropout() -> None:
    """The second argument is the probability to keep an element. torch has kernels for GPUs alone."""
    x = torch.rand(200, 100) + 1
    out, mask = run_op(torch.ops.aten._fused_dropout.default, x, 0.8, expected=(x, x.to(torch.uint8)))
    assert set(mask.unique().tolist()) == {0, 1}
    assert abs(mask.float().mean() - 0.8) < 0.02
    assert_equal(out, x * mask / 0.8)


def test_slopes_of_rrelu_with_noise() -> None:
    x = torch.randn(N)
    out, noise = run_op(torch.ops.aten.rrelu_with_noise_functional.default, x, torch.zeros(N), 0.1, 0.5, True)
    assert (noise[x > 0] == 1).all()
    assert_same_distribution(noise[x <= 0], torch.rand(N) * 0.4 + 0.1)
    assert_equal(out, x * noise)


def test_dropped_nan_stays_nan() -> None:
    x = torch.full((100,), float("nan"))
    assert compiled(lambda x: F.dropout(x, 0.5))(x).isnan().all()


def test_permutations() -> None:
    a, b = compiled(lambda: (torch.randperm(1000), torch.randperm(1000)))()
    assert_equal(a.sort().values, torch.arange(1000))
    assert not torch.equal(a, b)


def test_multinomial() -> None:
    weights = torch.tensor([[0.0, 1.0, 3.0, 0.0, 4.0], [5.0, 0.0, 0.0, 5.0, 0.0]])
    with_replacement, without_replacement = compiled(lambda w: (torch.multinomial(w, 20_000, replacement=True), torch.multinomial(w, 2)))(
        weights
    )
    for row in range(2):
        share = with_replacement[row].bincount(minlength=5) / 20_000
        assert (share - weights[row] / weights[row].sum()).abs().max() < 0.02
    assert (without_replacement[:, 0] != without_replacement[:, 1]).all()
    assert (weights.gather(1, without_replacement) > 0).all()
    many = compiled(lambda w: torch.multinomial(w, 2))(weights[:1].expand(5000, 5).contiguous())
    assert_same_distribution(many[:, 0], torch.multinomial(weights[0].expand(5000, 5), 2)[:, 0])
    assert_same_distribution(many[:, 1], torch.multinomial(weights[0].expand(5000, 5), 2)[:, 1])


def test_ops_of_torch_distributions() -> None:

    def function(a: torch.Tensor) -> list[torch.Tensor]:
        return [
            torch.distributions.Normal(a, 1.0, validate_args=False).sample(),
            torch.distributions.Categorical(logits=a, validate_args=False).sample(),
            torch._sample_dirichlet(a.exp()[None]),
            torch.binomial(torch.full_like(a, 10.0), torch.full_like(a, 0.25)),
        ]

    normal, category, dirichlet, binomial = compiled(function)(torch.zeros(N))
    assert_same_distribution(normal, torch.randn(N))
    assert 0 <= category < N
    assert_equal(dirichlet.sum(-1), torch.ones(1), tolerance=(1e-3, 1e-3))
    assert_same_distribution(binomial, torch.binomial(torch.full((N,), 10.0), torch.full((N,), 0.25)))


def test_random_initialisation_in_place() -> None:
    def function(x: torch.Tensor) -> None:
        torch.nn.init.kaiming_uniform_(x)

    x = torch.zeros(64, 64)
    compiled(function)(x)
    expected = torch.nn.init.kaiming_uniform_(torch.zeros(64, 64))
    assert_same_distribution(x, expected)


def test_complex_numbers() -> None:
    x = torch.zeros(4000, dtype=torch.complex64)
    uniform, normal = compiled(lambda x: (x.clone().uniform_(2, 3), x.clone().normal_(-2, 0.1)))(x)
    assert 2 <= torch.view_as_real(uniform).min() < torch.view_as_real(uniform).max() <= 3
    assert (torch.view_as_real(normal).mean(0) + 2).abs().max() < 0.01


def test_uniform_bfloat16_has_full_resolution() -> None:
    drawn = compiled(lambda x: x.clone().uniform_(0, 1))(torch.zeros(20000, dtype=torch.bfloat16))
    assert drawn.max() < 1
    assert len(drawn.unique()) > 600
