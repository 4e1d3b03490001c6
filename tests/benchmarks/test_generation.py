"""Tests of the measured models of one generation step."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from benchmarks import generation, suites
from dynaxla.bench.suites import BenchCase
from support.fakes.tiny_benchmark import check_case


@pytest.mark.parametrize(
    "case",
    [
        BenchCase("row", partial(generation.Row, 6), generation.rows),
        BenchCase("layer", partial(generation.Attention, 6), generation.tokens),
        BenchCase("decoder", partial(generation.decoder, 6, 2, layers=1), partial(generation.tokens, sequences=2)),
        BenchCase("int8_decoder", partial(generation.int8_decoder, 6, layers=1), generation.tokens),
    ],
    ids=lambda case: case.name,
)
def test_generation_models_can_be_compared(case: BenchCase) -> None:
    check_case(case)


def test_cases_have_the_length_and_number_of_sequences_of_their_names() -> None:
    layers = {case.name: case.build() for case in suites.GENERATION if case.name.startswith("layer")}
    assert len(layers) == 6
    for name, layer in layers.items():
        sequences, length = len(layer.keys), int(layer.position) + 1
        assert name == f"layer_{f'{sequences}x' * (sequences > 1)}{length}"
        assert layer.values.shape == (sequences, generation.CACHED_HEADS, length, generation.HEAD)


def test_8_bit_weights_are_close_to_the_weights() -> None:
    torch.manual_seed(0)
    linear, x = torch.nn.Linear(64, 32), torch.randn(3, 64)
    quantized = generation.Int8Linear(linear)
    assert quantized.weight.dtype == torch.int8
    torch.testing.assert_close(quantized(x), linear(x), atol=0.02, rtol=0)


def test_layer_writes_the_new_key_to_the_cache() -> None:
    layer = generation.Attention(5).requires_grad_(False)
    keys, x = layer.keys.clone(), torch.randn(1, 1, generation.WIDTH)
    layer(x)
    new = layer.key(x).view(1, generation.CACHED_HEADS, 1, generation.HEAD)
    torch.testing.assert_close(layer.keys, torch.cat([keys[:, :, :-1], new], 2))


def test_reading_time_is_proportional_to_the_size_of_weights_and_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 5.0, 10.0, 12.0, 20.0, 24.0])  # the best of three sums of 2 ** 26 numbers takes two seconds
    monkeypatch.setattr(generation, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    layer = torch.nn.Linear(1024, 1024, bias=False)
    layer.register_buffer("cache", torch.zeros(3, 1024, 1024))
    assert generation.reading_ms(layer, rounds=3) == 2000 / 16
