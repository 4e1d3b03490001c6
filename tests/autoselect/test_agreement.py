"""Tests of the comparison of an engine's results with eager mode's."""

from __future__ import annotations

import torch

from dynaxla.autoselect import agreement


def test_results_agree_if_eager_is_as_far_from_float64() -> None:
    reference = torch.ones(4, dtype=torch.float64)
    eager = torch.full((4,), 1.01)
    assert not agreement.compare(torch.full((4,), 0.99), eager).agrees
    assert agreement.compare(torch.full((4,), 0.99), eager, reference).agrees
    assert not agreement.compare(torch.full((4,), 0.9), eager, reference).agrees
    infinite = torch.full((4,), float("inf"))
    assert not agreement.compare(torch.full((4,), 0.9), infinite, reference).agrees
    assert agreement.compare(infinite, infinite, reference).agrees


def test_error_of_a_gradient_is_relative_to_all_gradients() -> None:
    """The tolerance of a small gradient is that of a gradient with a hundredth of the norm of all gradients."""
    large, small = torch.ones(100), torch.full((4,), 1e-6)
    edge = large.index_fill(0, torch.tensor([3]), 1.005)
    assert agreement.compare([edge, small], [large, small], gradients=True).agrees
    assert not agreement.compare([edge, small], [large, small]).agrees
    assert agreement.compare([large, -small], [large, small], gradients=True).agrees
    assert not agreement.compare([large * 1.01, small], [large, small], gradients=True).agrees
    assert not agreement.compare([large, small + 0.01], [large, small], gradients=True).agrees
    assert not agreement.compare([large, small * float("nan")], [large, small], gradients=True).agrees
    assert not agreement.compare([large, None], [large, small], gradients=True).agrees


def test_tolerance_grows_with_eager_results_of_perturbed_inputs() -> None:
    """Inputs perturbed by rounding errors show the uncertainty of a gradient in eager mode."""
    eager, near, far = torch.ones(4), torch.full((4,), 1.02), torch.full((4,), 1.1)
    trials = [[torch.full((4,), 1.01)], [torch.full((4,), 0.998)]]
    assert not agreement.compare([near], [eager], gradients=True).agrees
    assert agreement.compare([near], [eager], gradients=True, perturbed=trials).agrees
    assert not agreement.compare([far], [eager], gradients=True, perturbed=trials).agrees
    assert not agreement.compare([near], [eager], gradients=True, perturbed=[[torch.full((4,), float("inf"))]]).agrees

    class Steep(torch.nn.Module):
        def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
            return (x - 1) * tokens

    x, tokens = torch.ones(8), torch.arange(8)
    perturbed = agreement.perturbed_results(Steep(), (x, tokens))
    assert all(0 < float((result - Steep()(x, tokens)).abs().max()) < 1e-5 for result in perturbed)
    assert len({result.sum().item() for result in perturbed}) > 1

    embedding = torch.nn.Embedding(4, 8)  # The input has integers, so the parameter is perturbed.
    weight = embedding.weight.detach().clone()
    for result in agreement.perturbed_results(embedding, (torch.arange(4),)):
        assert bool((result != weight).all())
        torch.testing.assert_close(result, weight, rtol=1e-6, atol=0.0)
    assert bool((embedding.weight == weight).all())


def test_integers_must_be_equal() -> None:
    assert agreement.compare([torch.tensor([1, 2]), 3], [torch.tensor([1, 2]), 3]).agrees
    assert agreement.compare([torch.tensor([1, 2]), 3], [torch.tensor([1, 3]), 3]).detail == "1 of 2 elements differ"
    assert not agreement.compare([3], [4]).agrees
